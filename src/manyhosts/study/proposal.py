"""What computing centres ask for before they grant hours: strong and weak scaling, the cost of the job, how sure it is.

`proposal.txt` has the table and the paragraph, `proposal.svg` and `proposal.pdf` the figure, where matplotlib is
installed. Errors of points are standard deviations over the runs of a size; those of predictions are intervals that
hold 90 % of what is fitted to runs drawn again from the measured ones (a bootstrap).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.study import fits, plots
from manyhosts.study.points import WEAK
from manyhosts.study.rows import Size, samples_per_second
from manyhosts.study.study import Study
from manyhosts.units import Duration

FEWEST_STEPS = 100
"""Of a point, without which a centre does not take it for a measurement."""
_DRAWS = 200
_FEWEST_SIZES, _LARGEST_ERROR = 3, 0.1
"""Without so many sizes, or with a law that is farther off on average, nothing is extrapolated."""
_BEYOND = (2, 4)
"""Predictions are made for so many times the largest size."""
_WIDTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The training that hours are asked for, at one size."""

    workers: int
    nodes: int
    speed_up: float
    interval: tuple[float, float]
    """Of the speed-up."""
    hours: float
    hours_interval: tuple[float, float]
    price: float | None
    measured: bool

    @property
    def worker_hours(self) -> float:
        """Of all workers together."""
        return self.hours * self.workers


def check(job: str, budget: str | None) -> None:
    """See that a proposal can be made of what is asked.

    Raises:
        ConfigError: the job is no number of epochs or steps, or the points would be too short.
    """
    found = Duration.parse(job, where="--proposal")
    if found.seconds is not None or (found.epochs is None) == (found.steps is None):
        fix = 'say how long the entire job trains, as in --proposal "90 epochs"'
        raise ConfigError(f"the length of the job {job!r} depends on its speed", where="--proposal", fix=fix)
    steps = Duration.parse(budget, where="--budget").steps if budget is not None else FEWEST_STEPS
    if steps is not None and steps < FEWEST_STEPS:
        fix = f'give --budget "{FEWEST_STEPS} steps" or more'
        raise ConfigError(f"points of {steps} steps are too short for a proposal", where="--budget", fix=fix)


def write(study: Study, job: str) -> tuple[Path, ...]:
    """Write the files of the proposal into the study's folder. Returns them.

    Raises:
        ConfigError: no size has ended well, or a point has fewer steps than centres ask for.
    """
    text = text_of(study, job)
    place = study.folder / "proposal.txt"
    place.write_text(text, encoding="utf-8")
    return (place, *_draw(study, job)) if plots.is_possible() else (place,)


def text_of(study: Study, job: str) -> str:
    """The table and the paragraph."""
    strong, weak = _groups(study)
    if not strong:
        raise ConfigError("no size has ended well", where=str(study.folder), fix="see why: DIR/points/*.log")
    short = [f"{row.point.name}: {_steps(row)}" for size in [*strong, *weak] for row in size.rows
             if _steps(row) < FEWEST_STEPS]  # fmt: skip
    if short:
        raise ConfigError(
            f"points have fewer than {FEWEST_STEPS} steps ({'; '.join(short)})",
            where=str(study.folder),
            fix=f'study longer, in another --run-dir: --budget "{FEWEST_STEPS} steps"',
        )
    head = ["scaling", "workers", "hosts", "runs", "steps", "samples/s", "speed-up", "efficiency"]
    table = [head, *_rows("strong", strong), *_rows("weak", weak)]
    jobs = jobs_of(study, job)
    costs = [["workers", "hosts", "hours", "worker-hours", "cost", "from"]]
    for each in jobs:
        cost = "" if each.price is None else f"{each.price:,.2f}"
        hours = f"{each.hours:.3g} ({each.hours_interval[0]:.3g} - {each.hours_interval[1]:.3g})"
        source = "measured" if each.measured else "extrapolated"
        costs.append([str(each.workers), str(each.nodes), hours, f"{each.worker_hours:.3g}", cost, source])
    return "\n".join(
        [f"Scaling of {Path(study.asked.script).name}", "", *_columns(table), "", f"The entire job: {job}", "",
         *_columns(costs), "", paragraph(study, job), ""]
    )  # fmt: skip


def paragraph(study: Study, job: str) -> str:
    """In words: what was measured, how well it scales, what the job needs."""
    strong, weak = _groups(study)
    large, jobs = strong[-1], jobs_of(study, job)
    law = _law(strong)
    runs = sum(len(size.rows) for size in [*strong, *weak])
    words = [
        f"We measured {Path(study.asked.script).name} on {_listed(size.row.workers for size in strong)} workers in "
        f"{runs} runs of at least {min(_steps(row) for size in strong for row in size.rows)} optimizer steps each.",
        f"With a constant global batch (strong scaling), {large.row.workers} workers are {large.speed_up:.2f}"
        f"{_plus_minus(large)} times as fast as {strong[0].row.workers}, an efficiency of {large.efficiency:.0%}.",
    ]
    if weak:
        words.append(
            f"With a constant batch per worker (weak scaling), the efficiency on {weak[-1].row.workers} workers is "
            f"{weak[-1].efficiency:.0%}."
        )
    best = min((each for each in jobs if each.measured), key=lambda each: each.hours)
    price = "" if best.price is None else f" and costs {best.price:,.2f}"
    words.append(
        f"The entire job of {job} takes {best.hours:.3g} hours on {best.workers} workers (90 % interval "
        f"{best.hours_interval[0]:.3g} to {best.hours_interval[1]:.3g}), {best.worker_hours:.3g} worker-hours{price}."
    )
    for each in jobs:
        if not each.measured and law is not None:
            words.append(
                f"By extrapolation ({law.title}), {each.workers} workers would be {each.speed_up:.2f} times as fast "
                f"({each.interval[0]:.2f} to {each.interval[1]:.2f}) and use {each.worker_hours:.3g} worker-hours."
            )
    if all(len(size.rows) == 1 for size in strong):
        words.append("Each point is one run, so there are no errors of points: --repeat 3 gives them.")
    if law is None:
        few = len(strong) < _FEWEST_SIZES
        why = f"that takes {_FEWEST_SIZES} sizes" if few else "no law of scaling describes these points"
        words.append(f"Nothing is extrapolated: {why}.")
    return " ".join(words)


def jobs_of(study: Study, job: str) -> list[Job]:
    """The job at every size that was measured, and at larger ones as far as a law can be fitted."""
    strong, _ = _groups(study)
    small, length = strong[0], Duration.parse(job, where="--proposal")
    draws = _drawn(strong)
    law = _law(strong)
    found = []
    for size in strong:
        times = size.row.times or 1.0
        values = [statistics.fmean(draw[times]) for draw in draws]
        found.append(_job(study, small, size.row.workers, size.row.point.nodes, size.speed_up, values, length))
    for factor in _BEYOND if law is not None else ():
        times = factor * (strong[-1].row.times or 1.0)
        values = [
            fitted.speed_up(times)
            for draw in draws
            if law is not None
            and (fitted := fits.fit(law.law, [n for n in draw for _ in draw[n]], [v for n in draw for v in draw[n]]))
        ]
        point = strong[-1].row.point
        assert law is not None, "the loop is empty without a law"
        found.append(
            _job(study, small, factor * strong[-1].row.workers, factor * point.nodes if point.nodes > 1 else 1,
                 law.speed_up(times), values, length, measured=False)
        )  # fmt: skip
    return found


def _job(
    study: Study, small: Size, workers: int, nodes: int, speed_up: float, values: Sequence[float], length: Duration,
    *, measured: bool = True,
) -> Job:  # fmt: skip
    measured_run = small.row.measured
    epoch, steps = small.epoch_seconds, measured_run.summary.steps_per_epoch if measured_run else None
    if length.epochs is not None and epoch is not None:
        seconds = length.epochs * epoch
    else:
        assert measured_run is not None, "what has a speed-up was measured"
        if length.steps is None and steps is None:
            raise ConfigError(
                "the training set is a stream, and no epoch of it has ended in the study: its length is not known",
                where="--proposal",
                fix='say the job in steps: --proposal "100000 steps"',
            )
        seconds = (
            measured_run.spent.total / measured_run.spent.steps * (length.steps or (length.epochs or 0) * (steps or 1))
        )
    low, high = _interval(values or [speed_up])
    hours = seconds * small.speed_up / speed_up / 3600
    return Job(
        workers=workers, nodes=nodes, speed_up=speed_up, interval=(low, high), hours=hours,
        hours_interval=(seconds / high / 3600, seconds / low / 3600),
        price=None if study.price is None else study.price * nodes * hours, measured=measured,
    )  # fmt: skip


def _drawn(strong: Sequence[Size]) -> list[dict[float, list[float]]]:
    """Speed-ups by times the smallest size, with the runs of each size drawn again."""
    known = {size.row.times or 1.0: [row.speed_up for row in size.rows if row.speed_up] for size in strong}
    draw = random.Random(0)  # noqa: S311  # no secret
    return [{times: draw.choices(values, k=len(values)) for times, values in known.items()} for _ in range(_DRAWS)]


def _law(strong: Sequence[Size]) -> fits.Fit | None:
    """What larger sizes are extrapolated by; None where the sizes are too few for it, or no law describes them."""
    if len(strong) < _FEWEST_SIZES:
        return None
    rows = [row for size in strong for row in size.rows]
    law = fits.best(fits.fits([row.times or 1 for row in rows], [row.speed_up or 1 for row in rows]))
    return law if law is not None and law.error <= _LARGEST_ERROR else None


def _interval(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[int(0.05 * (len(ordered) - 1))], ordered[round(0.95 * (len(ordered) - 1))]


def _groups(study: Study) -> tuple[list[Size], list[Size]]:
    """The sizes with a constant global batch, and those with a constant batch per worker."""
    strong: list[Size] = []
    weak: list[Size] = []
    for varied, group in study.sizes.items():
        (weak if WEAK in dict(varied) else strong).extend(
            group if not (weak if WEAK in dict(varied) else strong) else []
        )
    return strong, weak


def _steps(row: Any) -> int:
    return int(row.measured.spent.steps)


def _plus_minus(size: Size) -> str:
    values = [row.speed_up for row in size.rows if row.speed_up]
    return f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""


def _rows(kind: str, group: Sequence[Size]) -> list[list[str]]:
    found = []
    for size in group:
        speeds = [speed for row in size.rows if row.measured and (speed := samples_per_second(row.measured.spent))]
        spread = f" ± {statistics.stdev(speeds):,.0f}" if len(speeds) > 1 else ""
        found.append(
            [kind, str(size.row.workers), str(size.row.point.nodes), str(len(size.rows)),
             str(min(_steps(row) for row in size.rows)), f"{statistics.fmean(speeds):,.0f}{spread}",
             f"{size.speed_up:.2f}{_plus_minus(size)}", f"{size.efficiency:.0%}"]
        )  # fmt: skip
    return found


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    return ["  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]


def _listed(counts: Any) -> str:
    *most, last = map(str, counts)
    return f"{', '.join(most)} and {last}" if most else last


def _draw(study: Study, job: str) -> tuple[Path, ...]:
    """Speed-up of both kinds with their errors, the ideal, and the prediction with its interval."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "proposal", "pdf.fonttype": 42}):
        figure = Figure(figsize=(6, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        strong, weak = _groups(study)
        jobs = jobs_of(study, job)
        _points(axes, {"strong scaling": strong, "weak scaling": weak})
        ends = [strong[0].row.workers, jobs[-1].workers]
        axes.plot(ends, [1, ends[1] / ends[0]], color="#9aa1a9", linestyle=":", label="ideal")
        if not jobs[-1].measured:
            shown = [jobs[len(strong) - 1], *(each for each in jobs if not each.measured)]
            sizes = [each.workers for each in shown]
            axes.plot(sizes, [each.speed_up for each in shown], color="#1f6fb4", linestyle="--", label="extrapolated")
            low, high = [each.interval[0] for each in shown], [each.interval[1] for each in shown]
            axes.fill_between(sizes, low, high, color="#1f6fb4", alpha=0.2, label="90 % interval")
        axes.set(xlabel="workers", ylabel="speed-up", xscale="log", yscale="log")
        axes.set_xticks(ticks := sorted({each.workers for each in jobs}), [str(each) for each in ticks])
        axes.legend()
        places = tuple(study.folder / f"proposal.{kind}" for kind in ("svg", "pdf"))
        figure.savefig(places[0], metadata={"Date": None})
        figure.savefig(places[1], metadata={"CreationDate": None})
    return places


def _points(axes: Any, groups: Mapping[str, Sequence[Size]]) -> None:
    for (name, group), colour in zip(groups.items(), ("#1f6fb4", "#d1631f"), strict=True):
        if not group:
            continue
        speed_ups = [[row.speed_up for row in size.rows if row.speed_up] for size in group]
        errors = [statistics.stdev(each) if len(each) > 1 else 0 for each in speed_ups]
        sizes = [size.row.workers for size in group]
        axes.errorbar(
            sizes, list(map(statistics.fmean, speed_ups)), errors, color=colour, marker="o", capsize=3, label=name
        )
