"""A server as its users start it, and what they ask it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Serving:
    process: subprocess.Popen[str]
    address: str = ""
    token: str = ""
    lines: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def ask(
        self, path: str, body: Any = None, *, headers: Mapping[str, str] = {}, timeout: float = 60
    ) -> tuple[int, Any]:
        """Status and content of the answer; JSON where it is some."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        own = {"Content-Type": "application/json"} if data is not None else {}
        own |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(self.address + path, data, {**own, **headers})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, content, kind = answer.status, answer.read(), answer.headers.get("content-type", "")
        except urllib.error.HTTPError as error:
            status, content, kind = error.code, error.read(), error.headers.get("content-type", "")
        return status, json.loads(content) if kind.startswith("application/json") else content

    def predict(self, inputs: Any) -> list[Any]:
        status, answer = self.ask("/predict", {"inputs": inputs})
        assert status == 200, (status, answer)
        return answer["outputs"]

    def children(self) -> list[int]:
        """Of the server: the processes with the model."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.seen |= {int(pid) for pid in found}
        return [int(pid) for pid in found]

    def children_left(self) -> list[int]:
        """Those of the processes that `children` ever gave which live."""
        return [pid for pid in self.seen if Path(f"/proc/{pid}").exists()]


@contextmanager
def serving(folder: Path, *words: str, cwd: Path | None = None, env: Mapping[str, str] = {}) -> Iterator[Serving]:
    """Serve `folder` on a free port, and end the server as a supervisor does."""
    command = [
        sys.executable,
        "-m",
        "manyhosts.cli.main",
        "serve",
        str(folder),
        "--port",
        "0",
        "--threads",
        "1",
        *words,
    ]
    process = subprocess.Popen(
        command, cwd=cwd, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1", **env}
    )
    served = Serving(process)
    assert process.stderr is not None
    reported = threading.Event()

    def listen() -> None:
        for line in process.stderr or ():
            served.lines.append(line)
            if found := re.search(r" at (http://\S+)", line):
                served.address = found[1].replace("0.0.0.0", "127.0.0.1")
            if found := re.match(r"token: (\S+)", line):
                served.token = found[1]
            if "curl" in line:
                reported.set()
        reported.set()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        reported.wait(200)
        assert served.address, "".join(served.lines)
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        thread.join(60)
        process.stderr.close()
