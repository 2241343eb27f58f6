"""The lock of a run directory: who is refused, who passes, and what becomes of a lock whose owner is gone."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from manyhosts.errors import ConfigError
from manyhosts.records import run_lock, run_owner
from manyhosts.records.run_lock import NAME, Owner


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.02)
    monkeypatch.setattr(run_lock, "SILENT_S", 0.4)
    monkeypatch.delenv(run_lock.VARIABLE, raising=False)
    yield
    for lock in list(run_lock._held.values()):
        lock.release()


def parent(**changes: object) -> Owner:
    """The lock of another process that is there: that of the process which has started this one."""
    process = os.getppid()
    began = run_owner.began(process)
    assert began is not None
    return replace(Owner.here("another", launches=False), process=process, began=began, **changes)


def put(run_dir: Path, owner: Owner) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / NAME).write_text(json.dumps(asdict(owner)))


def test_lock_is_there_while_it_is_held_and_no_longer(tmp_path: Path) -> None:
    lock = run_lock.take(tmp_path / "run", "mine")
    assert lock is not None
    assert json.loads((tmp_path / "run" / NAME).read_text())["process"] == os.getpid()
    assert run_lock.take(tmp_path / "run", "mine") is lock, "a second training of one script"
    lock.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_living_owner_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    owner = parent()
    put(tmp_path, owner)
    before = (tmp_path / NAME).read_bytes()
    for attempt in (lambda: run_lock.take(tmp_path, "mine"), lambda: run_lock.see_that_free(tmp_path)):
        with pytest.raises(ConfigError, match=f"process {owner.process} on host {owner.host}") as refused:
            attempt()
        assert refused.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == before


@pytest.mark.parametrize("gone", [{"process": 2**22 + 1}, {"began": "1"}], ids=["ended", "its_number_is_anothers"])
def test_dead_owner_of_this_machine_is_not_waited_for(
    tmp_path: Path, gone: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, replace(parent(), **gone))
    monkeypatch.setattr(run_lock, "_see_silent", lambda *_: pytest.fail("it was waited for"))
    run_lock.see_that_free(tmp_path)
    assert run_lock.take(tmp_path, "mine") is not None


@pytest.mark.parametrize("elsewhere", [{"machine": "another"}, {"processes": "pid:[1]"}], ids=["machine", "container"])
def test_owner_elsewhere_is_judged_by_its_signs_of_life(tmp_path: Path, elsewhere: dict[str, object]) -> None:
    put(tmp_path, parent(**elsewhere))
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.01):
            os.utime(tmp_path / NAME)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(ConfigError, match="is in progress"):
            run_lock.take(tmp_path, "mine")
    finally:
        over.set()
        beating.join()
    assert run_lock.take(tmp_path, "mine") is not None, "it is silent now"


def test_whoever_knows_the_token_passes(tmp_path: Path) -> None:
    put(tmp_path, parent(token="mine", launches=True))
    assert run_lock.take(tmp_path, "mine") is None, "the head holds it"
    put(tmp_path, parent(token="mine"))
    assert run_lock.take(tmp_path, "mine") is not None, "the leader before this one held it"
    assert json.loads((tmp_path / NAME).read_text())["process"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"{}"], ids=["empty", "half", "nested", "nobody"])
def test_damaged_lock_is_nobodys(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    run_lock.see_that_free(tmp_path)
    assert run_lock.take(tmp_path, "mine") is not None


def test_owner_that_stood_still_for_long_notices_who_has_the_directory_now(tmp_path: Path) -> None:
    lock = run_lock.take(tmp_path, "mine")
    assert lock is not None
    lock.check()
    put(tmp_path, parent())
    for _ in range(500):
        if lock.lost is not None:
            break
        threading.Event().wait(0.02)
    with pytest.raises(ConfigError, match=f"process {os.getppid()} "):
        lock.check()
    lock.release()
    assert (tmp_path / NAME).exists(), "it is another's"


def test_disk_without_locks_is_settled_by_who_wrote_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_locked", lambda _: False)
    monkeypatch.setattr(run_lock, "_SETTLE_S", 0)
    assert run_lock.take(tmp_path / "alone", "mine") is not None
    rival = parent()
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: put(tmp_path / "two", rival))
    with pytest.raises(ConfigError, match=f"process {rival.process}"):
        run_lock.take(tmp_path / "two", "mine")


@pytest.mark.parametrize("launches", [True, False], ids=["head", "leader"])
def test_owner_here_is_wrested_from_where_it_is_no_head_that_lives(tmp_path: Path, launches: bool) -> None:
    put(tmp_path, replace(parent(), launches=launches))
    assert run_lock.steal_lock(tmp_path, "another") is not launches
    assert not run_lock.steal_lock(tmp_path, "a third run's")
    put(tmp_path, replace(parent(), launches=launches, process=2**22 + 1))
    assert run_lock.steal_lock(tmp_path, "another")
    assert not run_lock.steal_lock(tmp_path / "nowhere", "another")


def test_owner_elsewhere_that_beats_keeps_the_directory_and_a_silent_one_that_is_back_finds_it_gone(
    tmp_path: Path,
) -> None:
    head = run_lock.take(tmp_path, "the run's", launches=True)
    assert head is not None
    elsewhere = replace(head.owner, machine="another")
    (tmp_path / NAME).write_text(json.dumps(asdict(elsewhere)))
    assert not run_lock.steal_lock(tmp_path, "the run's"), "it touches the file"
    head._over.set()  # the host of the head is frozen
    head._thread.join()
    with run_lock.shut(tmp_path, "the run's") as is_ours:
        assert is_ours
        assert run_lock.steal_lock(tmp_path, "the run's")
        assert not run_lock.steal_lock(tmp_path, "the run's"), "another worker has it"
    back = run_lock.RunLock(tmp_path / NAME, head.owner)  # it is back, and beats again
    back._thread.join(timeout=120)
    with pytest.raises(ConfigError, match="is in progress"):
        back.check()
    after = run_lock.take(tmp_path, "the next run's")
    assert after is not None, "what is named there never began, so the next start waits for nobody"
    after.release()


def test_directory_that_is_shut_is_taken_by_nobody_until_it_is_open_again(tmp_path: Path) -> None:
    put(tmp_path, replace(parent(), process=2**22 + 1))
    taken = threading.Event()

    def take() -> None:
        run_lock.take(tmp_path, "mine")
        taken.set()

    with run_lock.shut(tmp_path, "another") as is_ours, run_lock.shut(tmp_path, "mine") as is_another:
        assert (is_ours, is_another) == (True, False)
        waiting = threading.Thread(target=take)
        waiting.start()
        assert not taken.wait(0.3)
    waiting.join()
    assert taken.is_set()
    with run_lock.shut(tmp_path / "nowhere", "mine") as is_there:
        assert not is_there


def test_another_head_of_the_same_start_takes_the_lock_only_of_one_that_is_dead(tmp_path: Path) -> None:
    for heir in ("mine", "other"):  # whoever knows the token, and whoever does not
        put(tmp_path, replace(parent(launches=True), token="mine"))
        with pytest.raises(ConfigError, match="is in progress"):
            run_lock.take(tmp_path, heir, launches=True, succeeds=heir == "mine")
    put(tmp_path, replace(parent(launches=True), token="mine", machine="another"))  # it shows no sign of life
    run_lock.see_that_free(tmp_path, "mine")
    lock = run_lock.take(tmp_path, "mine", launches=True, succeeds=True)
    assert lock is not None
    put(tmp_path, replace(parent(launches=False), token="mine", machine="another"))  # a leader of the run has it
    lock.release()
    put(tmp_path, replace(parent(launches=False), token="mine"))
    run_lock.see_that_free(tmp_path, "mine")
    lock = run_lock.take(tmp_path, "mine", launches=True, succeeds=True)
    assert lock is not None, "workers of the run are no rivals"
    lock.check()
    put(tmp_path, replace(parent(launches=True), token="mine"))
    lock._thread.join(timeout=120)
    with pytest.raises(ConfigError, match="is in progress"):
        lock.check()  # this head stood still, and another one has come in its place


def test_head_elsewhere_that_beats_is_not_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "SILENT_S", 30.0)  # it is over with the first sign of life
    put(tmp_path, replace(parent(launches=True), token="mine", machine="another"))
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(tmp_path / NAME)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(ConfigError, match="is in progress"):
            run_lock.take(tmp_path, "mine", launches=True, succeeds=True)
    finally:
        over.set()
        beating.join()
