"""What a forked process does to be a worker: it becomes what `python script.py` would be, and says how it ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib.machinery
import io
import json
import multiprocessing
import os
import runpy
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

from manyhosts import refusals
from manyhosts.cluster import ports, reports
from manyhosts.control import titles, tracebacks
from manyhosts.control.agent import import_preloader, inspection, script_patches, script_probe
from manyhosts.errors import ManyhostsError
from manyhosts.imports import when_imported
from manyhosts.records import opened_files

Request = dict[str, Any]


class Line:
    """A worker's channel to its agent. Processes that it forks do not have it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self._let_go)

    def send(self, record: str, **fields: Any) -> None:
        """Send one record. After the end of the agent it is dropped."""
        with contextlib.suppress(OSError):
            message = json.dumps({"record": record, **fields}, default=str).encode() + b"\n"
            while message and self._descriptor >= 0:
                message = message[os.write(self._descriptor, message) :]

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)


def be(request: Request, descriptors: list[int]) -> int:
    """Run the user's program in this process. Returns its exit code; an executable never returns.

    The agent gets one JSON line each on the third descriptor: `imported` when a Trainer has made its first step,
    `failed` with the error where the main module raised one, `finished` when it has ended. On the fourth the worker
    reports its stack, when a signal asks for it.
    """
    line = _take_streams(descriptors[:3], has_stdin=request["stdin"])
    os.environ.update(request["environment"])
    _name_process(request["program"])
    os.chdir(request["folder"])
    if request["kind"] == "executable":
        return _execute(request, line)
    opened_files.begin()
    opened_files.forget()
    sys.argv = [request["program"], *request["arguments"]]
    sys.orig_argv = [sys.executable, *(["-m"] if request["kind"] == "module" else []), *sys.argv]
    _freshen()
    inspection.answer_on(descriptors[3])
    own, code, watching = os.getpid(), 0, None
    try:
        script_patches.begin()
        script_patches.configure_libraries()
        watching = script_probe.begin()
        _report_imports(line)
        run_main(request["program"], request["kind"])
    except SystemExit as ended:
        code = _exit_code(ended)
    except BaseException as error:
        code = 1
        if os.getpid() == own:
            line.send("failed", **_account(error))
        else:
            traceback.print_exception(error)
    if os.getpid() != own:  # a process that the script has forked: its end is not the worker's
        _wind_up()
        return code
    if code == 0:
        faulthandler.disable()  # the work is done: an abort on the way out is no news
    line.send("finished", code=code, exchanges=script_patches.exchanges_made())
    _wind_up()
    if watching is not None and code == 0:
        watching.report_end()
    return code


def _report_imports(line: Line) -> None:
    """Have the first worker of a host say what the script has imported, once it trains."""
    if os.environ.get("LOCAL_RANK") != "0":
        return
    before = frozenset(sys.modules)

    def report_imports() -> None:
        line.send("imported", modules=import_preloader.imported_since(before))

    reports.on_report("trainer", lambda: reports.on_report("step", report_imports))


def _name_process(program: str) -> None:
    rank, workers = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
    titles.of_worker(rank, workers, program)


def _take_streams(descriptors: list[int], *, has_stdin: bool) -> Line:
    """Make the descriptors stdin, unless it has one, stdout and stderr. Returns the line to the agent."""
    out, err, line = descriptors
    nothing = 0 if has_stdin else os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
        if source > 2:
            os.close(source)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a line appears as soon as it ends, also in a pipe
    return Line(line)


def _execute(request: Request, line: Line) -> int:
    command = [request["program"], *request["arguments"]]
    try:
        os.execvp(command[0], command)  # noqa: S606  # no shell is wanted
    except OSError as error:
        what = f"cannot start {command[0]!r}: {error.strerror}"
        fix = "name an executable that every host has, or leave --no-python out to run a Python script"
        line.send(
            "failed", words={"what": what, "where": command[0], "fix": fix, "exit_code": 2, "type": "ConfigError"}
        )
    return 127


def _freshen() -> None:
    """Undo what one process must not share with its siblings: random state, keys; and take the threads it was given.

    What the agent does about errors of its own is none of the script's.
    """
    sys.excepthook = sys.__excepthook__
    multiprocessing.current_process().authkey = os.urandom(32)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
        if threads.isdigit() and int(threads) > 0:
            torch.set_num_threads(int(threads))
    when_imported("torch.distributed.distributed_c10d", ports.limit_gloo)
    when_imported("torch.distributed.distributed_c10d", script_patches.watch_groups)
    faulthandler.enable()  # a crash in C code shows the Python line it came from


def run_main(program: str, kind: str) -> None:
    """Run `program` as the main module, as `python program` and `python -m program` do."""
    if kind == "module":
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if Path(program).is_dir() or program.endswith((".zip", ".pyz")):
        runpy.run_path(program, run_name="__main__")
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program)))
    program = os.path.abspath(program)  # as `python` says it since 3.9
    loader = importlib.machinery.SourceFileLoader("__main__", program)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=program, __cached__=None, __loader__=loader, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = module
    code = compile(loader.get_data(program), program, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102  # this is the user's program


def _exit_code(ended: SystemExit) -> int:
    """The code that the system would get; a text is printed, as Python does."""
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code & 0xFF
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{ended.code}\n")
    return 1


def _account(error: BaseException) -> dict[str, Any]:
    """Everything that the head needs to report `error`."""
    account: dict[str, Any] = {"summary": tracebacks.summary(error), "monotonic_s": time.monotonic()}
    account["exchanges"] = script_patches.exchanges_made()
    account["step"] = reports.last_step()
    if (reported := error if isinstance(error, ManyhostsError) else refusals.explained(error)) is not None:
        words = {"what": reported.what, "where": reported.where, "fix": reported.fix}
        account["words"] = {**words, "exit_code": reported.exit_code, "type": type(reported).__name__}
    account["text"], account["brief"] = tracebacks.text(error), tracebacks.brief(error)
    _write_error_file(account)
    put_in_by_script = str(getattr(sys.excepthook, "__module__", "")).partition(".")[0] not in ("sys", "torch")
    if put_in_by_script and not isinstance(error, ManyhostsError):
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
    return account


def _write_error_file(account: dict[str, Any]) -> None:
    """What torchelastic's `record` writes, for scripts that do not use it."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if path.name and not path.exists():
        extra = {"py_callstack": account["text"], "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            path.write_text(json.dumps({"message": {"message": account["summary"], "extraInfo": extra}}))


def _wind_up() -> None:
    """Do what Python does at its end, but for the destructors: Gloo aborts in them now and then (9 of 120 runs)."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads; multiprocessing ends its workers so
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom) and not thing.closed:
            with contextlib.suppress(OSError, ValueError):
                thing.flush()  # files that the script left open
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # what C code has printed
