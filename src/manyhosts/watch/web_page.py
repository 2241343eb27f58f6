"""The live page: the sections of a run's page, which a small script of its own asks for again every second."""

from __future__ import annotations

from html import escape

from manyhosts.listeners.figures import rate
from manyhosts.report.page import Section, page, pairs, paragraphs, table
from manyhosts.report.run_page import under
from manyhosts.report.run_sections import (
    current_facts,
    curves,
    happenings,
    time_line,
    where_time_went,
    workers_by_steps,
)
from manyhosts.watch.live_run import LiveRun
from manyhosts.watch.live_study import LiveStudy

Parts = dict[str, str]
_MOST_TOLD = 30  # what is folded would fold again with each answer
_TITLES = {
    "progress": "",
    "current_facts": "",
    "runs": "Runs",
    "curves": "Curves",
    "times": "Where the time of a step went",
    "map": "Workers and steps",
    "happened": "What happened",
}
_LOST = "No answer: manyhosts watch has ended, or cannot be reached. What is shown is its last state."
SCRIPT = """
const shown = new Map();
function put(state) {
  for (const [name, html] of Object.entries(state.parts)) {
    if (shown.get(name) === html) continue;
    shown.set(name, html);
    const part = document.getElementById(name);
    part.querySelector(".body").innerHTML = html;
    part.hidden = html === "";
  }
  document.title = state.title;
  document.querySelector("h1").textContent = state.title;
}
async function look() {
  const lost = document.getElementById("lost");
  try {
    const answer = await fetch("state", {cache: "no-store"});
    if (!answer.ok) throw new Error(String(answer.status));
    put(await answer.json());
    lost.hidden = true;
  } catch {
    lost.hidden = false;
  }
  setTimeout(look, 1000);
}
look();
"""


def live_page(live: LiveRun | LiveStudy) -> str:
    """The page as it is now; its script keeps it so."""
    now = parts(live)
    sections = [Section(title, now.get(name, ""), name) for name, title in _TITLES.items()]
    lost = Section("", paragraphs([_LOST]), "lost", hidden=True)
    below = "Live from manyhosts watch, on this machine only."
    return page(title(live), below, [lost, *sections], script=SCRIPT)


def title(live: LiveRun | LiveStudy) -> str:
    """For the window: what runs, and how far it is."""
    if isinstance(live, LiveStudy):
        return f"{live.done} of {len(live.rows)} runs: study of {live.script}"
    run = live.run
    fraction = run.history.fraction(run.longest_s)
    done = "" if fraction is None or run.status != "running" else f"{100 * fraction:.0f} % "
    return f"{done}{run.status}: {run.script}"


def parts(live: LiveRun | LiveStudy) -> Parts:
    """Each part of the page in HTML; empty where it has nothing to show."""
    if isinstance(live, LiveStudy):
        return _of_study(live)
    run = live.run
    return {
        "progress": _bar(run.history.fraction(run.longest_s)),
        "current_facts": pairs([*current_facts(run), ("run", under(run))]),
        "runs": "",
        "curves": curves(run),
        "times": where_time_went(run),
        "map": workers_by_steps(run),
        "happened": time_line(run) + happenings(run, most=_MOST_TOLD),
    }


def _of_study(live: LiveStudy) -> Parts:
    rows = [["run", "status", "done", "step", "speed", "loss"]]
    for row in live.rows:
        done = "" if row.fraction is None else f"{100 * row.fraction:.0f} %"
        rows.append([row.name, row.status, done, row.step, "" if row.speed is None else rate(row.speed), row.loss])
    said = "running" if live.is_running else "over; manyhosts report makes a page of it"
    empty = dict.fromkeys(_TITLES, "")
    counted = [("runs done", f"{live.done} of {len(live.rows)}"), ("status", said)]
    return empty | {"progress": _bar(live.share), "current_facts": pairs(counted), "runs": table(rows, kind="named")}


def _bar(fraction: float | None) -> str:
    if fraction is None:
        return ""
    words = f"{100 * fraction:.0f} %"
    return f'<progress max="1" value="{fraction:.4f}">{escape(words)}</progress>'
