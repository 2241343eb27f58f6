"""Snapshots in an object store: a crash at every call that writes, a network that goes, old lists, flipped bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from object_stores import ADDRESS, Crash, Store, TrialFileSystem, Unreachable, trial_store

from manyhosts.cli.main import main
from manyhosts.errors import ConfigError
from manyhosts.events import Note, SnapshotCopied
from manyhosts.records.manifest import Facts, verify_files
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.load import everything_fits, load
from manyhosts.snapshot.objects.client import Client
from manyhosts.snapshot.objects.copies import Brought, Copier, bring_best, bring_newer, bring_records
from manyhosts.snapshot.objects.location import ObjectStoreLocation
from manyhosts.snapshot.store import Store as LocalStore

KEEP = 2


@pytest.fixture
def store() -> Iterator[Store]:
    with trial_store() as made:
        yield made


def facts(step: int) -> Facts:
    return Facts(step=step, epoch=0, position={}, strategy="single", model={})


def shelf_there() -> ObjectStoreLocation:
    return ObjectStoreLocation(Client(ADDRESS, pause=lambda _: None))


def copier_of(run: Path) -> Copier:
    return Copier(shelf_there, ADDRESS, keep=KEEP, records={"metrics.jsonl": run / "metrics.jsonl"})


def save(run: Path, step: int) -> Path:
    local = LocalStore(run / "snapshots", keep=9)
    local.save({"weight": torch.full((5,), float(step))}, facts(step))
    local.wait()
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {each}}}\n' for each in range(1, step + 1)))
    return run / "snapshots" / f"step-{step:08d}"


def save_best(run: Path, step: int) -> Path:
    local = LocalStore(run / "snapshots", keep=9)
    local.save_as(run / "best", {"weight": torch.full((5,), float(step))}, facts(step))
    local.wait()
    return run / "best"


def copy(run: Path, path: Path) -> list[SnapshotCopied | Note]:
    copier = copier_of(run)
    copier.offer(path)
    assert copier.wait(60)
    return copier.finished()


def brought(folder: Path, than: int = -1) -> Brought:
    return bring_newer(shelf_there(), folder, everything_fits, than=than, disk=Disk())


def newest_step(folder: Path) -> int:
    """What a machine with an empty disk gets, every byte compared."""
    found = brought(folder).found
    assert found is not None
    loaded = load(folder / found.name)
    assert (loaded.state["weight"] == loaded.facts.step).all()
    return loaded.facts.step


def whole_steps() -> list[int]:
    """The snapshots that pass for whole, every one of which must be."""
    location = shelf_there()
    found = [each for each in location.found() if not each.how]
    for each in found:
        verify_files(location.files(each))
    return [each.step for each in found]


def test_snapshot_comes_back_as_it_was_with_the_record_up_to_it(store: Store, tmp_path: Path) -> None:
    path = save(tmp_path / "a", 3)
    [news] = copy(tmp_path / "a", path)
    assert isinstance(news, SnapshotCopied)
    assert (news.step, news.bytes > 0) == (3, True)
    assert news.address.startswith(f"{ADDRESS}/step-00000003.")
    other = tmp_path / "b"
    found = brought(other / "snapshots").found
    assert found is not None
    assert {each.name: each.read_bytes() for each in (other / "snapshots" / "step-00000003").iterdir()} == {
        each.name: each.read_bytes() for each in path.iterdir()
    }
    assert not bring_records(shelf_there(), found, {"metrics.jsonl": other / "metrics.jsonl"})
    assert (other / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_manifest_is_written_last_and_removed_first(store: Store, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        copy(tmp_path, save(tmp_path, step))
    puts = [line for line in store.log if line.startswith(("put", "complete")) and "step-00000003" in line]
    assert puts[-1].endswith("manifest.json")
    removals = [line for line in store.log if line.startswith("remove ")]
    assert "step-00000001" in removals[0]
    assert removals[0].endswith("manifest.json")
    assert not [name for name in store.names() if "step-00000001" in name]


def test_crash_at_any_call_that_writes_leaves_the_earlier_snapshots_whole(store: Store, tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    for path in paths[:2]:
        copy(tmp_path, path)
    before, begun = dict(store.objects), store.writes
    copy(tmp_path, paths[2])
    calls = store.writes - begun
    assert calls == 10
    outcomes = set()
    for crash_at in range(1, calls + 1):
        store.objects, store.parts, store.writes, store.crash_at = dict(before), [], 0, crash_at
        copier = copier_of(tmp_path)
        copier.offer(paths[2])
        assert copier.wait(60)
        with pytest.raises(Crash):
            copier.finished()
        store.crash_at = None
        whole = whole_steps()
        assert whole in ([2, 1], [3, 2], [3, 2, 1]), store.log[-1]
        assert newest_step(tmp_path / f"at-{crash_at}") == whole[0]
        outcomes.add(whole[0])

        assert [type(news) for news in copy(tmp_path, paths[3])] == [SnapshotCopied]  # and the next one goes well
        assert newest_step(tmp_path / f"after-{crash_at}") == 4
        assert len(store.manifests()) == KEEP
        assert {name[:13] for name in store.names()} == {name[:13] for name in store.manifests()}, (
            "nothing half is left"
        )
    assert outcomes == {2, 3}


def test_upload_that_broke_off_goes_on_where_it_was(store: Store, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    store.crash_at = 4  # the second file
    copier = copier_of(tmp_path)
    copier.offer(path)
    copier.wait(60)
    with pytest.raises(Crash):
        copier.finished()
    assert store.parts
    store.crash_at, store.log = None, []
    copy(tmp_path, path)
    assert len([line for line in store.log if line.startswith("upload")]) == len(list(path.iterdir())) - 2
    assert newest_step(tmp_path / "other") == 1


def test_one_best_replaces_another_without_a_moment_that_has_none(store: Store, tmp_path: Path) -> None:
    copy(tmp_path, save_best(tmp_path, 1))
    before, begun = dict(store.objects), store.writes
    path = save_best(tmp_path, 2)
    copy(tmp_path, path)
    for crash_at in range(1, store.writes - begun + 1):
        store.objects, store.writes, store.crash_at = dict(before), 0, crash_at
        copier = copier_of(tmp_path)
        copier.offer(path)
        copier.wait(60)
        with pytest.raises(Crash):
            copier.finished()
        store.crash_at = None
        target = tmp_path / f"at-{crash_at}" / "best"
        bring_best(shelf_there(), target, everything_fits, Disk())
        assert load(target).facts.step in (1, 2), store.log[-1]
    copy(tmp_path, path)
    assert len(store.manifests()) == 1


def test_short_failures_of_the_network_are_not_noticed(store: Store, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    store.fails = 3
    assert [type(news) for news in copy(tmp_path, path)] == [SnapshotCopied]
    store.fails = 3
    assert newest_step(tmp_path / "other") == 1


def test_store_that_stays_away_costs_copies_and_nothing_else(store: Store, tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    copier = copier_of(tmp_path)
    store.away = True
    copier.offer(first)
    assert copier.wait(60)
    [news] = copier.finished()
    assert isinstance(news, Note)
    assert news.text == (
        f"step-00000001 is not copied to {ADDRESS}: Connect timeout on endpoint; "
        "it stays on the disk, and the next one is tried"
    )
    store.away = False
    copier.offer(second)
    assert copier.wait(60)
    assert [type(news) for news in copier.finished()] == [SnapshotCopied]
    assert newest_step(tmp_path / "other") == 2


def test_calls_that_fail_are_tried_again_with_longer_and_longer_pauses(store: Store) -> None:
    pauses: list[float] = []
    client = Client(ADDRESS, pause=pauses.append)
    store.away = True
    with pytest.raises(OSError, match="Connect timeout"):
        client.read("x")
    assert pauses == [0.5, 1, 2]


def test_lists_that_lag_hide_and_show_nothing_wrong(store: Store, tmp_path: Path) -> None:
    for step in (1, 2):
        copy(tmp_path, save(tmp_path, step))
    store.stale = dict(store.objects)
    copy(tmp_path, save(tmp_path, 3))
    store.stale |= {name: b"x" for name in store.objects if "step-00000003" not in name}
    assert newest_step(tmp_path / "old list") == 2
    for name in [name for name in store.objects if "step-00000002" in name]:
        del store.objects[name]  # removed, and the list still shows it
    store.stale |= {name: content for name, content in store.objects.items()}
    result = brought(tmp_path / "half old list")
    assert result.found is not None
    assert result.found.step == 3
    store.objects = {name: content for name, content in store.objects.items() if "step-00000003" not in name}
    store.objects |= {name: content for name, content in store.stale.items() if "step-00000001" in name}
    result = brought(tmp_path / "very old list")
    assert result.passed_over == []


@pytest.mark.parametrize("name", ["tensors-00000", "state.json", "manifest.json"])
def test_flipped_bit_is_found_and_the_one_before_is_brought(store: Store, name: str, tmp_path: Path) -> None:
    for step in (1, 2):
        copy(tmp_path, save(tmp_path, step))
    store.flip(f"step-00000002.{name}" if name == "manifest" else _of_step(store, 2, name))
    result = brought(tmp_path / "other")
    assert result.found is not None
    assert result.found.step == 1
    [reason] = result.passed_over
    assert reason.startswith(f"{ADDRESS}/step-00000002.")
    assert "is damaged" in reason
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["step-00000001"]


def _of_step(store: Store, step: int, name: str) -> str:
    [found] = [each for each in store.names() if each.startswith(f"step-{step:08d}.") and f"/{name}" in each]
    return found


def test_record_with_a_flipped_bit_is_left_out_and_named(store: Store, tmp_path: Path) -> None:
    copy(tmp_path, save(tmp_path, 1))
    [name] = [path for path in store.objects if path.endswith("metrics.jsonl.gz")]
    content = bytearray(store.objects[name])
    content[len(content) // 2] ^= 1
    store.objects[name] = bytes(content)
    found = brought(tmp_path / "other").found
    assert found is not None
    target = tmp_path / "other" / "metrics.jsonl"
    assert bring_records(shelf_there(), found, {"metrics.jsonl": target}) == ["metrics.jsonl"]
    assert not target.exists()


def test_snapshot_that_the_disk_has_spoiled_is_not_copied(store: Store, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    content = bytearray((path / "state.json").read_bytes())
    content[-1] ^= 1
    (path / "state.json").write_bytes(content)
    [news] = copy(tmp_path, path)
    assert isinstance(news, Note)
    assert "state.json is damaged" in news.text
    assert store.manifests() == []


def test_best_that_is_replaced_while_it_is_copied_is_never_mixed(store: Store, tmp_path: Path) -> None:
    path = save_best(tmp_path, 1)
    about_to = store.about_to

    def replace_in_the_middle(kind: str, where: str, *, writes: bool = False) -> None:
        about_to(kind, where, writes=writes)
        if kind == "upload":
            store.about_to = about_to  # type: ignore[method-assign]
            save_best(tmp_path, 2)

    store.about_to = replace_in_the_middle  # type: ignore[method-assign]
    assert copy(tmp_path, path) == []
    assert store.manifests() == []
    copy(tmp_path, path)
    bring_best(shelf_there(), tmp_path / "other", everything_fits, Disk())
    assert load(tmp_path / "other").facts.step == 2


def test_removal_that_is_not_allowed_is_told_once_and_copies_go_on(store: Store, tmp_path: Path) -> None:
    store.denied = {"remove"}
    copier = copier_of(tmp_path)
    reported = []
    for step in (1, 2, 3, 4):
        copier.offer(save(tmp_path, step))
        assert copier.wait(60)
        reported += copier.finished()
    assert [news.step for news in reported if isinstance(news, SnapshotCopied)] == [1, 2, 3, 4]
    assert [news.text for news in reported if isinstance(news, Note)] == [
        f"older snapshots cannot be removed from {ADDRESS}: Access Denied: remove"
    ]


def test_newest_offer_takes_the_place_of_one_that_waits(store: Store, tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3)]
    copier = copier_of(tmp_path)
    about_to = store.about_to

    def offer_more(kind: str, where: str, *, writes: bool = False) -> None:
        about_to(kind, where, writes=writes)
        if kind == "upload":
            store.about_to = about_to  # type: ignore[method-assign]
            copier.offer(paths[1])
            copier.offer(paths[2])
            held.extend(copier.holds(path) for path in paths)

    held: list[bool] = []
    store.about_to = offer_more  # type: ignore[method-assign]
    copier.offer(paths[0])
    assert copier.wait(60)
    assert held == [True, False, True]
    assert [news.step for news in copier.finished()] == [1, 3]
    assert not copier.holds(paths[2])


def test_snapshot_that_is_still_to_be_copied_stays_on_the_disk(tmp_path: Path) -> None:
    held = {tmp_path / "snapshots" / "step-00000001"}
    local = LocalStore(tmp_path / "snapshots", keep=1, holds=held.__contains__)
    names = []
    for step in (1, 2, 3):
        local.save({"weight": torch.ones(5)}, facts(step))
        local.wait()
        names.append(sorted(path.name for path in (tmp_path / "snapshots").iterdir()))
        if step == 2:
            held.clear()
    assert names == [["step-00000001"], ["step-00000001", "step-00000002"], ["step-00000003"]]


def test_best_gets_its_turn_however_often_steps_are_offered(store: Store, tmp_path: Path) -> None:
    paths, best = [save(tmp_path, step) for step in (1, 2, 3)], save_best(tmp_path, 1)
    copier = copier_of(tmp_path)
    about_to = store.about_to
    later = iter(paths[1:])

    def offer_more(kind: str, where: str, *, writes: bool = False) -> None:
        about_to(kind, where, writes=writes)
        if where.endswith("state.json") and kind == "complete" and (path := next(later, None)):
            copier.offer(best)
            copier.offer(path)

    store.about_to = offer_more  # type: ignore[method-assign]
    copier.offer(paths[0])
    assert copier.wait(60)
    addresses = [news.address for news in copier.finished() if isinstance(news, SnapshotCopied)]
    assert [address.split("/")[-1].split(".")[0] for address in addresses][:2] == ["step-00000001", "best"]


def test_older_best_on_the_disk_gives_way_to_the_one_in_the_store_and_a_newer_one_does_not(
    store: Store, tmp_path: Path
) -> None:
    save_best(tmp_path / "old", 1)
    copy(tmp_path, save_best(tmp_path, 2))
    save_best(tmp_path / "new", 3)
    for name, step in (("old", 2), ("new", 3)):
        bring_best(shelf_there(), tmp_path / name / "best", everything_fits, Disk())
        assert load(tmp_path / name / "best").facts.step == step


def test_answer_that_is_lost_does_no_harm(store: Store, tmp_path: Path) -> None:
    """The object is there, the caller heard of a failure, and the second try is told that there is one already."""
    path = save(tmp_path, 1)
    put_file, lost = TrialFileSystem.put_file, []

    def put_once(system: TrialFileSystem, lpath: str, rpath: str, **more: Any) -> None:
        if rpath in store.objects:
            raise FileExistsError(rpath)
        put_file(system, lpath, rpath, **more)
        if not lost:
            lost.append(rpath)
            raise Unreachable("Connection reset by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrialFileSystem, "put_file", put_once)
        assert [type(news) for news in copy(tmp_path, path)] == [SnapshotCopied]
    assert lost
    assert newest_step(tmp_path / "other") == 1


@pytest.mark.parametrize(
    ("trouble", "what"),
    [
        ({"buckets": set()}, "there is no 'bucket' to keep snapshots in"),
        ({"away": True}, "no snapshots can be kept there: Connect timeout on endpoint"),
        ({"denied": {"put"}}, "the store does not let us in: Access Denied: put"),
        ({"denied": {"list"}}, "the store does not let us in: Access Denied: list"),
    ],
)
def test_what_is_wrong_with_an_address_is_said_in_one_sentence(store: Store, trouble: dict, what: str) -> None:
    for name, value in trouble.items():
        setattr(store, name, value)
    with pytest.raises(ConfigError) as caught:
        Client(ADDRESS, pause=lambda _: None).check()
    assert caught.value.what == what
    assert caught.value.where == ADDRESS
    assert caught.value.fix


def test_package_that_is_missing_is_named_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(ConfigError) as caught:
        Client("gs://bucket/run")
    assert caught.value.what == "addresses with gs:// need gcsfs, which is not installed here"
    assert caught.value.fix == f"{sys.executable} -m pip install fsspec gcsfs"


def test_address_of_an_unknown_kind_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"^xyz:// is no kind of address that fsspec knows"):
        Client("xyz://bucket/run")


@pytest.mark.parametrize("address", ["memory://bucket/run", "file://{}", "{}"])
def test_other_places_that_fsspec_knows_do_as_well(address: str, tmp_path: Path) -> None:
    address = address.format(tmp_path / "second")
    client = Client(address)
    client.check()
    location = ObjectStoreLocation(client)
    for step in (1, 2, 3):
        location.add(save(tmp_path, step), {"metrics.jsonl": tmp_path / "metrics.jsonl"})
    for found in location.found()[1:]:
        location.remove(found)
    assert [found.step for found in location.found()] == [3]
    assert len(client.folders()) == 1
    assert bring_newer(location, tmp_path / "other", everything_fits, than=-1, disk=Disk()).found is not None
    assert load(tmp_path / "other" / "step-00000003").facts.step == 3
    location.remove(location.found()[0])


# The command line.


@pytest.fixture
def kept(store: Store, tmp_path: Path) -> Store:
    """Snapshots of steps 1 and 2, a best, and one half-written."""
    for step in (1, 2):
        copy(tmp_path, save(tmp_path, step))
    copy(tmp_path, save_best(tmp_path, 1))
    store.objects["bucket/run/step-00000003.0123456789ab/state.json"] = b"{}"
    return store


def test_ls_lists_what_a_store_holds(kept: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "ls", ADDRESS, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["best"], one["condition"]) for one in listed] == [
        (3, False, "half"),
        (2, False, "whole"),
        (1, False, "whole"),
        (1, True, "whole"),
    ]
    assert listed[1]["path"].startswith(f"{ADDRESS}/step-00000002.")


def test_verify_reads_every_byte_in_the_store(kept: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "verify", ADDRESS]) == 0
    kept.flip(_of_step(kept, 2, "tensors-00000"))
    assert main(["snapshots", "verify", ADDRESS]) == 2
    assert "is damaged: its sha256 is" in capsys.readouterr().out
    assert main(["snapshots", "ls", ADDRESS, "--quick"]) == 0


def test_show_finds_one_in_the_store_by_its_step(kept: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "show", ADDRESS, "1"]) == 0
    out = capsys.readouterr().out
    assert "step       1 (epoch 0)" in out
    assert f"path       {ADDRESS}/step-00000001." in out
    assert main(["snapshots", "show", ADDRESS, "best"]) == 0


def test_prune_removes_from_the_store(kept: Store) -> None:
    assert main(["snapshots", "prune", ADDRESS, "--keep", "1"]) == 0
    left = {name.partition(".")[0] for name in kept.names()}
    assert left == {"step-00000003", "step-00000002", "best"}  # the half one may be under way


def test_store_that_does_not_answer_is_said_by_the_command(
    kept: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhosts.snapshot.objects.client._FIRST_PAUSE_S", 0.0)
    kept.away = True
    assert main(["snapshots", "ls", ADDRESS]) == 2
    assert "the store does not answer: Connect timeout" in capsys.readouterr().err
