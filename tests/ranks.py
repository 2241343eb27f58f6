"""Real processes for tests: one function on several ranks, as a launcher would start them.

    from ranks import run_ranks

    def add(rank: int, amount: int) -> float:
        world = World(Place.from_environment())
        return float(world.all_reduce(torch.tensor([rank + amount])))

    def test_sum_is_the_same_on_every_rank() -> None:
        assert run_ranks(2, add, 10) == [21.0, 21.0]

Every rank finds torchrun's variables in its environment and has one thread; it joins a group only if `function` does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import multiprocessing.forkserver
import os
import pickle
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import Signals
from typing import Any

PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "numpy"]
PRELOADED += [
    "sklearn.datasets",
    "torchmetrics.classification",
    "torch.utils.tensorboard",
    "manyhosts.training.trainer",
]
IMPORTED = ["pytest", "psutil", "runs"]
"""What most files of tests import, beside that: each rank imports the file that its function stands in."""
PORTS = range(12_000, 29_000)
"""Below those that Linux gives out, and those at which a run listens by itself."""
GRACE_S = 0.3  # after a failure: time for the others to fail too, so that the first can be told from its consequences
_asked = itertools.count()


@dataclass(frozen=True)
class Errand:
    """A function named so that a process which shares nothing with this one finds it, and what it is called with."""

    module: str
    file: Path
    name: str
    arguments: bytes
    variables: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What a rank gave back, or the traceback of why it did not."""

    rank: int
    result: bytes
    trouble: str
    time: float


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(rank, *args)` in `size` processes, and return what each gave back, by rank.

    `function` must stand at the top of a module: it travels by name. The variables of this process's environment
    go along. When one rank fails, the others are ended at once, for they may wait for it in a collective for ever.

    Raises:
        AssertionError: a rank raised (with that rank's own traceback), died, or the time ran out.
    """
    errand = Errand(
        module=function.__module__,
        file=Path(sys.modules[function.__module__].__file__ or ""),
        name=function.__qualname__,
        arguments=pickle.dumps(args),
        variables=dict(os.environ) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    )
    context = multiprocessing.get_context("forkserver")  # forks from a clean process that has torch loaded
    context.set_forkserver_preload([*PRELOADED, *IMPORTED])
    with _only_ours_on_the_path():
        multiprocessing.forkserver.ensure_running()
    lines = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_main, args=(rank, size, errand, sender), daemon=True)
        for rank, (_, sender) in enumerate(lines)
    ]
    try:
        for process, (_, sender) in zip(ranks, lines, strict=True):
            process.start()
            sender.close()  # ours; now the line ends when the rank does
        answers = _collect([receiver for receiver, _ in lines], ranks, time.monotonic() + timeout_s, function.__name__)
        return [pickle.loads(answer.result) for answer in answers]
    finally:
        for process, (receiver, _) in zip(ranks, lines, strict=True):
            if process.pid is not None:
                process.kill()
                process.join()
            receiver.close()


def free_port() -> int:
    """A port on this machine that nobody listens on, and that nobody else is given until it is listened on.

    It is not one of those that the system gives out by itself, and each process has others.
    """
    while True:
        port = PORTS[(1009 * os.getpid() + next(_asked)) % len(PORTS)]
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def _only_ours_on_the_path() -> Iterator[None]:
    """Python finds the modules of this folder, and none in the current one: `make train` leaves `runs` there."""
    before = dict(os.environ)
    paths = [str(Path(__file__).parent), *filter(None, [before.get("PYTHONPATH")])]
    os.environ.update(PYTHONSAFEPATH="1", PYTHONPATH=os.pathsep.join(paths))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _collect(receivers: Sequence[Connection], ranks: Sequence[Any], deadline: float, name: str) -> list[Answer]:
    size = len(receivers)
    open_lines = {receiver: rank for rank, receiver in enumerate(receivers)}
    answers: dict[int, Answer] = {}
    while open_lines:
        ready = wait(list(open_lines), timeout=max(0.0, deadline - time.monotonic()))
        for receiver in ready:
            rank = open_lines.pop(receiver)  # type: ignore[index]  # `wait` gives back what it was given
            try:
                answers[rank] = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join()
                answers[rank] = Answer(rank, b"", _how_it_ended(ranks[rank].exitcode), time.monotonic())
            if answers[rank].trouble:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if not ready:
            break
    failed = sorted((answer for answer in answers.values() if answer.trouble), key=lambda answer: answer.time)
    if failed:
        others = f"\n(ranks {sorted(a.rank for a in failed[1:])} failed after it)" if failed[1:] else ""
        raise AssertionError(f"{name}: rank {failed[0].rank} of {size} failed:\n{failed[0].trouble}{others}")
    if open_lines:
        raise AssertionError(f"{name}: no answer in time from ranks {sorted(open_lines.values())} of {size}")
    return [answers[rank] for rank in range(size)]


def _how_it_ended(code: int) -> str:
    return f"died of {Signals(-code).name}" if code < 0 else f"exited with code {code} and no answer"


def _main(rank: int, size: int, errand: Errand, sender: Connection) -> None:
    """The life of one rank."""
    os.environ.clear()  # what the fork server was born with; a test may have changed its own since
    os.environ.update(errand.variables)
    for key, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)):
        os.environ[key] = str(value)
    import torch  # there already in a rank; not when a test imports this file to start one

    torch.set_num_threads(1)
    try:
        function = _find(errand)
        result, trouble = pickle.dumps(function(rank, *pickle.loads(errand.arguments))), ""
    except BaseException:
        result, trouble = b"", traceback.format_exc()
    sender.send_bytes(pickle.dumps(Answer(rank, result, trouble, time.monotonic())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Gloo's destructors abort now and then in a process that has finished its work


def _find(errand: Errand) -> Callable[..., Any]:
    """The function, in a process where pytest's own way of importing test files does not exist."""
    with contextlib.suppress(ImportError):
        importlib.import_module(errand.module)
    if errand.module not in sys.modules:
        parents = errand.module.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            sys.modules.setdefault(".".join(parents[:depth]), types.ModuleType(".".join(parents[:depth])))
        spec = importlib.util.spec_from_file_location(errand.module, errand.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {errand.file}")
        sys.modules[errand.module] = importlib.util.module_from_spec(spec)  # found by pickle, by this name
        spec.loader.exec_module(sys.modules[errand.module])
    found: Any = sys.modules[errand.module]
    for part in errand.name.split("."):
        found = getattr(found, part)
    return found
