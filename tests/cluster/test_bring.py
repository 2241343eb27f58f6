"""`--bring`: data reaches hosts by ssh once, continues after a cut, and nothing of a host's own is overwritten."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from remote import Ended, run

from manyhosts.lab import Lab

READ = """
    import hashlib, pathlib, socket
    whole = b"".join(path.read_bytes() for path in sorted(pathlib.Path("data").rglob("*")) if path.is_file())
    print(socket.gethostname(), hashlib.sha256(whole).hexdigest())
"""


def test_host_gets_what_it_lacks_once(four: Lab, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    large = data / "deep" / "large.bin"
    large.write_bytes(os.urandom(3_000_000))
    (data / "labels.txt").write_text("a b c\n" * 1000)
    (tmp_path / ".gitignore").write_text("data/\n")

    def brought() -> tuple[Ended, str]:
        ended = run(four, tmp_path, READ, "--hosts", "lab1,lab2", "--bring", "data")
        whole = b"".join(path.read_bytes() for path in sorted(data.rglob("*")) if path.is_file())
        if ended.code == 0:
            for host in ("lab1", "lab2"):
                assert f"{host} {hashlib.sha256(whole).hexdigest()}" in ended.out
        return ended, " ".join(ended.err.split())

    ended, said = brought()
    assert ended.code == 0, ended.err
    assert "2 files of data, 3.0 MB: 3.0 MB go to lab1" in said
    (data / "labels.txt").write_text("d e f\n" * 1000)
    ended, said = brought()
    assert (ended.code, said.count("2 files of data, 3.0 MB: 6.0 kB go to lab")) == (0, 2), ended.err
    # A connection that was cut leaves what had come; what a host has of its own is left alone.
    large.write_bytes(content := os.urandom(2_000_000))
    half = four[0].path(tmp_path / ".manyhosts-data" / f"{hashlib.sha256(content).hexdigest()}.half")
    half.write_bytes(content[:1_500_000])
    four[1].path(large).write_bytes(b"its own")
    ended, said = brought()
    assert ended.code == 3
    assert "host lab2 has other data under the same name" in said
    assert "data/deep/large.bin" in said
    assert four[1].path(large).read_bytes() == b"its own"
    assert "500.0 kB go to lab1, continuing after 1.5 MB that came before" in said
    four[1].path(large).unlink()
    ended, said = brought()
    assert ended.code == 0, ended.err
    assert "lab1 has all 2 files of data, 2.0 MB: nothing is sent" in said
    assert "2 files of data, 2.0 MB: 2.0 MB go to lab2" in said
