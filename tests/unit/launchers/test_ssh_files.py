"""What of a working directory goes to hosts, and how it gets there and back: against a host that is this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhosts.errors import LaunchError
from manyhosts.hosts import files, remote_probe
from manyhosts.hosts.files import Files
from manyhosts.hosts.remote_probe import MARK_OF_DISK
from manyhosts.launchers.ssh import run_files

CHATTY = "head -c 200000 /dev/zero | tr '\\0' 'e' >&2; echo 'Welcome to the cluster!'; "


def put(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)


def chosen(folder: Path, **more: Any) -> set[str]:
    return set(Files.to_bring(folder, **more).paths)


def test_secrets_caches_and_what_git_ignores_stay_and_the_user_may_overrule_that(tmp_path: Path) -> None:
    kept = ("train.py", "tracked.pt", "id_map.py", "data/x.bin")
    put(tmp_path, *kept, ".env", "id_ed25519", "ssl/server.key", "runs/a/run.json", ".venv/x.py")
    assert chosen(tmp_path) == set(kept)
    put(tmp_path, "new.py", "big/model.pt", "big/notes.txt", "loose.pt")
    (tmp_path / ".gitignore").write_text("*.pt\nbig/\ntrain.py\n")
    git = ["git", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "-f", "tracked.pt", "id_map.py", "data"]):
        subprocess.run([*git, *words], check=True)
    expected = {*kept, "new.py", ".gitignore"}
    found = Files.to_bring(tmp_path, needed="train.py")
    assert set(found.paths) == expected, "the script is brought, whatever git thinks of it"
    assert found.left_out == [".env", "big", "id_ed25519", "loose.pt", "ssl/server.key"]
    assert "big, id_ed25519, loose.pt, ssl/server.key; a line !NAME in .manyhostsignore brings it" in found.notes()[0]
    (tmp_path / ".manyhostsignore").write_text("# mine\n!.env\n!big/model.pt\nnew.py\n")
    wanted = {*kept, ".gitignore", ".manyhostsignore", ".env", "big/model.pt"}
    assert chosen(tmp_path, needed="train.py") == wanted
    put(tmp_path / "big", "own.py")
    assert "own.py" in chosen(tmp_path / "big"), "a folder that is itself ignored was chosen by the user"


def test_gitignore_counts_where_no_checkout_is_and_the_user_may_overrule_it(tmp_path: Path) -> None:
    """In a copy of a checkout, or an archive of one."""
    put(tmp_path, "train.py", "model.pt", "out/a.txt", "data/x.bin", "data/y.tmp", "data/keep.tmp", "deep/out/b.txt")
    assert len(chosen(tmp_path)) == 7
    (tmp_path / ".gitignore").write_text("*.pt\n/out/\ntrain.py\n")
    (tmp_path / "data" / ".gitignore").write_text("*.tmp\n!keep.tmp\n")
    found = Files.to_bring(tmp_path, needed="train.py")
    expected = {".gitignore", "data/.gitignore", "train.py", "data/x.bin", "data/keep.tmp", "deep/out/b.txt"}
    assert (set(found.paths), found.left_out) == (expected, ["data/y.tmp", "model.pt", "out"])
    (tmp_path / ".manyhostsignore").write_text("!out\n!model.pt\n")
    assert chosen(tmp_path, needed="train.py") == {*expected, ".manyhostsignore", "out/a.txt", "model.pt"}
    assert not (tmp_path / ".git").exists()


def test_much_is_told_with_the_largest_and_what_vanishes_while_it_is_listed_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "train.py")
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(300_000_000)
    walk = files._Choice.walk

    def with_a_ghost(self: Any) -> Iterator[str]:
        yield from ("ghost.py", *walk(self))

    monkeypatch.setattr(files._Choice, "walk", with_a_ghost)
    found = Files.to_bring(tmp_path)
    assert found.paths == ["huge.bin", "train.py"]
    assert "the largest are huge.bin (300.0 MB)" in found.notes()[0]


class Far:
    """A host on this machine, which has the folder `root` where this side has `here`. `first`: what a login does."""

    host = "far"

    def __init__(self, here: Path, root: Path, first: str = CHATTY) -> None:
        self.here, self.root, self.first = str(here), str(root), first
        root.mkdir(exist_ok=True)

    def command(self, words: str) -> list[str]:
        return ["bash", "-c", self.first + words.replace(self.here, self.root)]

    def ask(self, question: str, *, timeout_s: float = 0, **details: Any) -> Any:
        there = {key: value.replace(self.here, self.root) for key, value in details.items() if isinstance(value, str)}
        return remote_probe.COMMANDS[question](**{**details, **there})


def test_shell_with_a_banner_and_much_on_stderr_stops_nothing(tmp_path: Path) -> None:
    here, root = tmp_path / "here", tmp_path / "there"
    put(here, "train.py", "data/x.bin", "gone.py")
    (here / "data" / "x.bin").write_bytes(bytes(10_000_000))
    found = Files.to_bring(here)
    (here / "gone.py").unlink()
    far = Far(here, root)
    reported: list[tuple[int, int]] = []
    run_files.bring(far, found, progress=lambda *numbers: reported.append(numbers))
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*.*")) == ["data/x.bin", "train.py"]
    put(root, "run/result.txt", "run/logs/far-0.log", f"run/{MARK_OF_DISK}1")
    run_files.fetch(far, here / "run")
    assert (here / "run" / "result.txt").read_text() == "run/result.txt"
    assert not (here / "run" / f"{MARK_OF_DISK}1").exists()


def test_what_is_here_already_is_not_brought_again_in_either_direction(tmp_path: Path) -> None:
    here, root = tmp_path / "here", tmp_path / "there"
    put(here, "train.py", "sub/part.py")
    found, far = Files.to_bring(here), Far(here, root)
    run_files.bring(far, found)
    put(root, "run/kept.txt", "run/gone.txt", "run/deep/new name.txt", "run/-f", f"run/{MARK_OF_DISK}1")
    (root / "run" / "link").symlink_to("deep")
    (root / "run" / "empty").mkdir()
    run_files.fetch(far, here / "run")
    assert (here / "run" / "link").is_symlink()
    assert (here / "run" / "empty").is_dir()
    assert (here / "run" / "-f").is_file()
    (root / "run" / "deep" / "new name.txt").write_text("longer than it was")
    before = {path: path.stat().st_ctime_ns for path in [*root.rglob("*.*"), *here.rglob("*.*")]}
    run_files.bring(far, found)
    run_files.fetch(far, here / "run")
    changed = [path for path, when in before.items() if path.stat().st_ctime_ns != when]
    assert changed == [here / "run" / "deep" / "new name.txt"]
    assert changed[0].read_text() == "longer than it was"


def test_file_of_one_size_and_time_and_of_other_content_is_brought(tmp_path: Path) -> None:
    here, root = tmp_path / "here", tmp_path / "there"
    put(here, "train.py", "model.bin", "other.py")
    (here / "link").symlink_to("train.py")
    (here / "model.bin").write_bytes(bytes(run_files._MOST_HASHED))
    run_files.bring(Far(here, root), found := Files.to_bring(here))
    for name, content in (("train.py", b"trein.py"), ("model.bin", b"1" + bytes(run_files._MOST_HASHED - 1))):
        state = (root / name).stat()
        (root / name).write_bytes(content)
        os.utime(root / name, ns=(state.st_atime_ns, state.st_mtime_ns))
    link = (root / "link").lstat()
    (root / "link").unlink()
    (root / "link").symlink_to("other.py")
    os.utime(root / "link", ns=(link.st_atime_ns, link.st_mtime_ns), follow_symlinks=False)
    run_files.bring(Far(here, root), found)
    assert (root / "train.py").read_text() == "train.py"
    assert (root / "model.bin").read_bytes()[:1] == b"1", "large files go by size and time"
    assert os.readlink(root / "link") == "train.py", "it led to another file, with a name as long"


def test_links_that_lead_out_and_pipes_stay_there_by_name_and_all_else_comes(tmp_path: Path) -> None:
    here, root = tmp_path / "here", tmp_path / "there"
    put(here, "train.py")
    put(root, "run/a.txt", "run/deep/z.txt", "run/zz/last.txt")
    for name, target in {"b-out": "/etc/hostname", "c-up": "../../x", "d-in": f"{here}/run/deep"}.items():
        (root / "run" / name).symlink_to(target)
    os.mkfifo(root / "run" / "e-pipe")
    left = run_files.fetch(Far(here, root), here / "run")
    assert sorted(left) == [
        "b-out (a link to /etc/hostname)",
        "c-up (a link to ../../x)",
        "e-pipe (a pipe or a device)",
    ]
    came = sorted(str(path.relative_to(here / "run")) for path in (here / "run").rglob("*"))
    assert came == ["a.txt", "d-in", "deep", "deep/z.txt", "zz", "zz/last.txt"]
    assert (here / "run" / "d-in" / "z.txt").read_text() == "run/deep/z.txt", "its own place, by its full path"


def test_file_that_vanishes_while_it_is_fetched_is_no_trouble(tmp_path: Path) -> None:
    here, root = tmp_path / "here", tmp_path / "there"
    put(here, "train.py")
    far = Far(here, root, f"rm {root}/run/gone.txt; ")
    put(root, "run/kept.txt", "run/gone.txt")
    run_files.fetch(far, here / "run")
    assert [path.name for path in (here / "run").iterdir()] == ["kept.txt"]


def test_what_goes_wrong_with_files_is_a_sentence(tmp_path: Path) -> None:
    here, root = tmp_path / "here", tmp_path / "there"
    put(here, "train.py", "data/x.bin")
    (here / "data" / "x.bin").write_bytes(bytes(10_000_000))
    found = Files.to_bring(here)

    def far(first: str) -> Any:
        return Far(here, root, first)

    with pytest.raises(LaunchError, match="host far: tar: x: No space left on device"):
        run_files.bring(far("echo 'tar: x: No space left on device' >&2; exit 2; "), found)
    put(root, "run/result.txt")
    for first in ("exit 1; ", "printf 'manyhosts-archive rubbish'; exit 0; ", "exit 0; "):
        with pytest.raises(LaunchError, match="files could not be brought to or from host far"):
            run_files.fetch(far(first), here / "run")
    (here / "run" / "result.txt").mkdir(parents=True)  # the archive's file cannot take its place
    (here / "run" / "result.txt" / "x").touch()
    with pytest.raises(LaunchError, match=r"host far: .*irectory"):
        run_files.fetch(far(""), here / "run")
