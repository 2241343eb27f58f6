"""Data by what it holds: what a host lacks, what it keeps of a lost connection, and what is never overwritten."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import contents, data
from manyhosts.hosts.data import Data
from manyhosts.hosts.data_receiver import FOLDER, DataReceiver


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def nothing_said(_: str) -> None:
    pass


class Scene:
    """A host's folder, and what the desk has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent = folder, 0
        folder.mkdir()

    def keeper(self, here: dict[str, bytes]) -> DataReceiver:
        files = {path: [len(content), sha(content), 1_700_000_000 * 10**9] for path, content in here.items()}
        return DataReceiver(str(self.folder), files, lambda _: None)

    def bring(self, here: dict[str, bytes]) -> dict[str, Any]:
        """What `data.bring` does, without a connection."""
        keeper = self.keeper(here)
        found = keeper.look()
        by_digest = {sha(content): content for content in here.values()}
        self.sent = 0
        for digest, start in found["lacks"].items():
            content = by_digest[digest]
            keeper.take(digest, len(content), start, io.BytesIO(content[start:]))
            self.sent += len(content) - start
        keeper.place()
        for path, content in here.items():
            assert (self.folder / path).read_bytes() == content
        left = [name for name in os.listdir(self.folder / FOLDER) if name != "index.json"]
        assert left == []
        return found


def test_each_content_is_sent_once_whatever_its_files_are_called(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "host")
    here = {"data/a": b"one" * 100, "data/b/c": b"two" * 50, "data/b/d": b"one" * 100, "data/empty": b""}
    scene.bring(here)
    assert scene.sent == 450
    assert (scene.folder / "data/a").stat().st_mtime == 1_700_000_000
    scene.bring(here)
    assert scene.sent == 0
    scene.bring({**here, "data/b/c": b"new" * 50})
    assert scene.sent == 150, "a file that has changed goes alone"
    scene.bring({"data/renamed": b"new" * 50})
    assert scene.sent == 0, "its host has that content under another name"


def test_two_files_that_exchange_their_names_lose_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "host")
    scene.bring({"data/a": b"a" * 10, "data/b": b"b" * 20})
    scene.bring({"data/a": b"b" * 20, "data/b": b"a" * 10})
    assert scene.sent == 0


def test_what_came_before_a_cut_is_not_sent_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "host")
    content = bytes(range(256)) * 20
    here = {"data/x": content}
    keeper = scene.keeper(here)
    assert keeper.look()["lacks"] == {sha(content): 0}
    with pytest.raises(EOFError):
        keeper.take(sha(content), len(content), 0, io.BytesIO(content[:2000]))
    assert not (scene.folder / "data/x").exists(), "a file gets its name when it is whole"
    found = scene.bring(here)
    assert found["lacks"] == {sha(content): 2000}
    assert scene.sent == len(content) - 2000


def test_what_came_to_harm_is_not_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "host")
    here = {"data/x": b"right" * 10}
    keeper = scene.keeper(here)
    keeper.look()
    with pytest.raises(OSError, match="changed while it was brought"):
        keeper.take(sha(b"right" * 10), 50, 0, io.BytesIO(b"wrong" * 10))
    assert scene.bring(here)["lacks"] == {sha(b"right" * 10): 0}


def test_file_of_the_hosts_own_is_named_and_not_overwritten(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "host")
    (scene.folder / "data").mkdir()
    (scene.folder / "data/mine").write_bytes(b"years of work")
    (scene.folder / "data/alike").write_bytes(b"the same")
    here = {"data/mine": b"another one!!", "data/alike": b"the same", "data/longer": b"x" * 99}
    found = scene.keeper(here).look()
    assert found["others"] == ["data/mine"]
    assert sha(b"the same") not in found["lacks"]
    scene.bring({"data/longer": b"x" * 99})
    (scene.folder / "data/longer").write_bytes(b"changed there")
    assert scene.keeper({"data/longer": b"y" * 13}).look()["others"] == ["data/longer"]


@pytest.mark.parametrize(
    ("found", "total", "words"),
    [
        ({"others": ["a", "b", "c", "d"], "free": 1 << 40}, 0, "has other data under the same name.*a, b, c, …"),
        ({"others": [], "free": 1 << 20}, 5 << 20, "has no room for the data: 5.2 MB are to come, and 1.0 MB"),
    ],
)
def test_host_that_cannot_take_them_is_refused_before_a_byte_goes(
    found: dict[str, Any], total: int, words: str
) -> None:
    with pytest.raises(LaunchError, match=words):
        data._see_that_it_fits("b", Data(Path("/p"), {}), found, total)


def test_files_are_found_behind_links_and_once_in_a_circle(tmp_path: Path) -> None:
    project, far = tmp_path / "project", tmp_path / "far"
    (project / "more").mkdir(parents=True)
    (far / "sub").mkdir(parents=True)
    (far / "sub" / "x").write_bytes(b"x")
    (far / "circle").symlink_to(far)
    (project / "data").symlink_to(far)
    (project / "more" / "one.bin").write_bytes(b"1")
    found = Data.read(project, ["data", "more/one.bin"], nothing_said)
    assert sorted(found.files) == ["data/sub/x", "more/one.bin"]
    assert found.files["data/sub/x"].digest == sha(b"x")
    assert found.size == 2


@pytest.mark.parametrize(
    ("word", "words"), [("..", "not below"), (".", "not below"), ("/etc", "not below"), ("nothing", "there is no")]
)
def test_what_has_no_place_on_a_host_is_refused(tmp_path: Path, word: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Data.read(tmp_path, [word], nothing_said)


def test_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="data/x cannot be read"):
        Data.read(tmp_path, ["data"], nothing_said)


def test_hash_is_computed_once_for_each_state_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "x", []
    path.write_bytes(b"one")
    real = contents.hash_of

    def counting(path: Path, tell: Any = None) -> str:
        read.append(path)
        return real(path, tell)

    monkeypatch.setattr(contents, "hash_of", counting)
    for _ in range(2):
        hashes = contents.Hashes()
        assert hashes.of(path) == sha(b"one")
        hashes.keep()
    assert len(read) == 1
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert contents.Hashes().of(path) == sha(b"two")
    (tmp_path / "cache" / "manyhosts" / "hashes.json").write_text("{ nonsense")
    assert contents.Hashes().of(path) == sha(b"two")
