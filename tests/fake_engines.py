"""Programs of engines that stand on PATH in a test, and start real processes on this machine.

    python fake_engines.py PROGRAM WORDS...

They read their options as the real ones do, and refuse one that these do not have. What each was told goes to the
file that FAKE_ENGINES names.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HOSTS = ("127.0.0.1", "127.0.0.2")
PROGRAMS = ("mpirun", "srun", "sbatch", "ssh", "bsub", "bjobs", "bkill", "blaunch")
TOLD = "FAKE_ENGINES"


def install(folder: Path) -> dict[str, str]:
    """Put all programs into `folder`. Returns the variables by which they are found, and write down what they hear."""
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__, name])} "$@"\n')
        program.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", TOLD: str(folder / "reported")}


def reported(variables: Mapping[str, str]) -> list[list[str]]:
    """What the programs were told, in order: the program, then its words."""
    path = Path(variables[TOLD])
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _options(
    words: list[str], with_value: Sequence[str], alone: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The options before the first word that is none, and all behind them."""
    found, rest = {}, list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name = word.partition("=")[0]
        if word in with_value:
            found[word] = rest.pop(0)
        elif name in alone:
            found[name] = word
        else:
            sys.exit(f"unrecognized option {word}")
    return found, rest


def _all(commands: list[tuple[list[str], dict[str, str]]]) -> int:
    """Start all, pass on the signal that asks for their end, and return the code of the first that failed."""
    started = [subprocess.Popen(words, env={**os.environ, **more}) for words, more in commands]

    def end(number: int, _: object) -> None:
        for process in started:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    return next((code for code in [process.wait() for process in started] if code), 0)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def mpirun(words: list[str]) -> int:
    parts: list[list[str]] = [[]]
    for word in words:
        parts.append([]) if word == ":" else parts[-1].append(word)
    commands: list[tuple[list[str], dict[str, str]]] = []
    for part in parts:
        while part[0] == "--mca":  # which takes two words
            part = part[3:]
        found, rest = _options([*part], ("--bind-to", "-np", "--host", "-x", "--mca"))
        while rest[0] != sys.executable:  # the second word of --mca stands before what is meant
            more, rest = _options(rest[1:], ("--bind-to", "-np", "--host", "-x", "--mca"))
            found |= more
        assert found["-np"] == "1"
        commands.append((rest, {"OMPI_COMM_WORLD_RANK": str(len(commands)), "PMIX_RANK": str(len(commands))}))
    return _all(commands)


def srun(words: list[str]) -> int:
    with_value = ("--nodes", "--ntasks", "--ntasks-per-node", "--nodelist", "--cpu-bind", "--cpus-per-task")
    alone = ("--kill-on-bad-exit", "--overlap", "--unbuffered", "--quit-on-interrupt")
    found, rest = _options(words, with_value, alone)
    return _all([(rest, {"SLURM_PROCID": str(number)}) for number in range(int(found["--ntasks"]))])


def sbatch(words: list[str]) -> int:
    say("4711")
    return 0


def ssh(words: list[str]) -> int:
    while words[:1] == ["-o"]:
        words = words[2:]
    if words[:2] == ["-O", "forward"]:  # from this machine to itself: the same port
        say(words[3].rpartition(":")[2])
        return 0
    while words[0] != "-T":
        words = words[1:]
    return _all([(["sh", "-c", words[2]], {})])


def blaunch(words: list[str]) -> int:
    _, rest = _options(words, ("-z", "-u"), ("-n", "-use-login-shell", "-no-shell"))
    return _all([(rest[1:], {"LSF_PM_TASKID": "1"})])


def bsub(words: list[str]) -> int:
    found, rest = _options(words, ("-n", "-R", "-q", "-W", "-o", "-J", "-cwd"), ("-I",))
    assert found["-R"] == "span[ptile=1]"
    folder = Path(os.environ[TOLD]).parent / "job-101"
    folder.mkdir(exist_ok=True)
    own = {"LSB_JOBID": "101", "LSB_HOSTS": " ".join(HOSTS[: int(found["-n"])])}
    if "-I" in found:
        say("Job <101> is submitted to default queue <normal>.\n<<Waiting for dispatch ...>>\n<<Starting on node>>")
        return _all([(rest, own)])
    log = found["-o"].replace("%J", "101")
    shell = 'cd "$1"; shift; "$@"; echo $? >"$FOLDER/new"; mv "$FOLDER/new" "$FOLDER/code"'
    with open(log, "ab") as out:
        job = subprocess.Popen(
            ["sh", "-c", shell, "sh", found["-cwd"], *rest],
            env={**os.environ, **own, "FOLDER": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    (folder / "job").write_text(json.dumps({"process": job.pid, "log": log, "hosts": own["LSB_HOSTS"]}))
    say("Job <101> is submitted to default queue <normal>.")
    return 0


def bjobs(words: list[str]) -> int:
    assert words[:3] == ["-noheader", "-o", "stat exit_code exec_host output_file delimiter='|'"]
    folder = Path(os.environ[TOLD]).parent / "job-101"
    job, over = json.loads((folder / "job").read_text()), folder / "code"
    code = over.read_text().strip() if over.exists() else ""
    state = {"": "RUN", "0": "DONE"}.get(code, "EXIT")
    say(f"{state}|{code if state == 'EXIT' else '-'}|{job['hosts'].replace(' ', ':')}|{job['log']}")
    return 0


def bkill(words: list[str]) -> int:
    folder = Path(os.environ[TOLD]).parent / "job-101"
    os.killpg(json.loads((folder / "job").read_text())["process"], signal.SIGTERM)
    return 0


def main() -> int:
    name, *words = sys.argv[1:]
    with open(os.environ[TOLD], "a") as file:
        file.write(json.dumps([name, *words]) + "\n")
    return int(globals()[name](words))


if __name__ == "__main__":
    sys.exit(main())
