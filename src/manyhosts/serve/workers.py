"""The processes that have the model, as the server sees them: started, asked one thing after another, started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.export.description import Description
from manyhosts.serve import frames
from manyhosts.serve.tensors import Arrays, Refused

log = logging.getLogger("manyhosts.serve")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_ASKED_AT_ONCE = 3
"""What is asked while another answer is computed lies ready, so that the model need not wait for the server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What is served, and by how many processes."""

    folder: Path  # An export, or a run directory
    snapshot: str = "best"
    model: str = ""  # Which one, of a run of mh.Run that has several
    preprocess: str = ""
    workers: int = 1  # Processes that hold the model together, each a part of every tensor
    threads: int = 0  # Of each for its computations; 0: as PyTorch chooses
    answer_s: float = 60.0  # After so long without an answer the processes are started again
    start_s: float = 600.0


_START = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); import runpy;"
    " runpy.run_module('manyhosts.serve.model_process', run_name='__main__', alter_sys=True)"
)
"""No file of the working directory is imported unless the script is there: one may be called csv.py."""


class Lost(Exception):
    """The processes ended, or were silent for too long, before they had answered."""


class Workers:
    """One group of processes with one model."""

    def __init__(self, served: Served, on_restart: Callable[[], None] = lambda: None) -> None:
        self.served, self._on_restart = served, on_restart
        self.described = Description(format="run", precision="fp32", inputs=(), outputs=())  # Once it was opened
        self.preprocesses = False  # Whether a function of the script's makes the inputs of what a client sends
        self.step: int | None = None  # The step of the snapshot that answers
        self.ready = asyncio.Event()
        self._processes: list[asyncio.subprocess.Process] = []
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._places = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._turn = asyncio.Lock()  # To read a reply, in the order of what was asked
        self._keeper: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._snapshot = served.snapshot

    async def start(self) -> None:
        """Start the processes, and keep them running until `stop`.

        Raises:
            ConfigError: the model cannot be opened.
        """
        try:
            await self._open()
        except Lost as lost:
            raise ConfigError(
                f"the model could not be opened: {lost}", where=str(self.served.folder), fix="see the lines above"
            ) from lost
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End the processes."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        await self._end()

    async def answer(self, arrays: Arrays) -> Arrays:
        """The outputs of a batch.

        Raises:
            Refused: the model cannot compute it.
            Lost: no one can say what the answer would have been.
        """
        return (await self._ask({"kind": "batch"}, arrays))[1]

    async def preprocess(self, samples: list[Any]) -> Arrays:
        """The model's inputs, which the script's function makes of what a client sends. Raises as `answer`."""
        return (await self._ask({"kind": "preprocess", "samples": samples}, {}))[1]

    async def take(self, snapshot: Path) -> str:
        """Answer with another snapshot from the next batch on. Returns why it was not taken; empty where it was."""
        head, _ = await self._ask({"kind": "take", "snapshot": str(snapshot)}, {})
        if head["kind"] == "taken":
            self.step = head["step"]
        return str(head.get("why", ""))

    async def _ask(self, head: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        async with self._places:
            writer, reader = self._writer, self._reader
            if not self.ready.is_set() or writer is None or reader is None:
                raise Lost("the model is being opened")
            try:
                writer.write(frames.frame(head, arrays))
                async with self._turn:
                    if reader is not self._reader:
                        raise Lost("the process with the model ended")
                    async with asyncio.timeout(self.served.answer_s):
                        await writer.drain()
                        reply, outputs = await frames.read(reader)
            except (asyncio.IncompleteReadError, OSError, TimeoutError, asyncio.CancelledError) as cause:
                if reader is self._reader:  # a reply that is still to come would be taken for that to the next request
                    self.ready.clear()
                    self._ended.set()
                if isinstance(cause, asyncio.CancelledError):
                    raise
                raise Lost("the process with the model ended") from cause
        if reply["kind"] == "refused":
            raise Refused(reply["status"], reply["why"])
        return reply, outputs

    async def _open(self) -> None:
        own, others = socket.socketpair()
        port, size = _free_port() if self.served.workers > 1 else 0, self.served.workers
        request = {
            "folder": str(self.served.folder),
            "snapshot": self._snapshot,
            "model": self.served.model,
            "preprocess": self.served.preprocess,
            "workers": size,
            "threads": self.served.threads,
        }
        self._ended.clear()
        for rank in range(size):
            variables = {**os.environ, frames.REQUEST: json.dumps(request), frames.SOCKET: str(others.fileno())}
            if size > 1:
                variables |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _START),
                env=variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=[others.fileno()] if rank == 0 else [],
                start_new_session=True,  # Ctrl-C is for the server, which lets them finish
            )
            self._processes.append(process)
        others.close()
        self._reader, self._writer = await asyncio.open_connection(sock=own)
        try:
            async with asyncio.timeout(self.served.start_s):
                head, _ = await frames.read(self._reader)
        except (asyncio.IncompleteReadError, OSError, TimeoutError) as cause:
            await self._end()
            raise Lost("the process with the model ended while it opened it") from cause
        if head["kind"] == "failed":
            await self._end()
            raise ConfigError(head["what"], where=head["where"], fix=head["fix"])
        self.described = Description.from_json(head["described"])
        self.preprocesses = bool(head["preprocesses"])
        self.step = self.described.source.get("step")
        self.ready.set()

    async def _keep(self) -> None:
        """Open the model again whenever a process ends."""
        wait_s = _FIRST_WAIT_S
        while True:
            if self.ready.is_set():
                waits = [asyncio.create_task(each.wait()) for each in self._processes]
                ended = asyncio.create_task(self._ended.wait())
                await asyncio.wait([*waits, ended], return_when=asyncio.FIRST_COMPLETED)
                for each in (*waits, ended):
                    each.cancel()
                log.warning("a process with the model ended; it is started again")
                self._on_restart()
            self.ready.clear()
            await self._end()
            try:
                await self._open()
                wait_s = _FIRST_WAIT_S
            except (Lost, ConfigError, OSError) as error:
                log.error("the model could not be opened: %s; next attempt in %g s", error, wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _end(self) -> None:
        self.ready.clear()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
        self._processes, self._reader, self._writer = [], None, None


def _free_port() -> int:
    """One where no one listens now: the processes connect there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
