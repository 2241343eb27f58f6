"""`manyhosts snapshots`: what a person learns about the snapshots of a run, and may remove."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyhosts.cli.main import main
from manyhosts.records.manifest import FORMAT_VERSION
from manyhosts.snapshot.store import Facts, Store

TENSORS = "tensors-00000-of-00001.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with whole snapshots of steps 10, 20 and 30, and a best."""
    store = Store(tmp_path / "snapshots", keep=9)
    for step in (10, 20, 30):
        store.save({"weight": torch.ones(5)}, facts(step))
    store.save_as(tmp_path / "best", {"weight": torch.ones(5)}, facts(20))
    store.wait()
    return tmp_path


def facts(step: int) -> Facts:
    model = {"weight": ("float32", (5,))}
    return Facts(step=step, epoch=step // 10, position={"sample": 7}, strategy="ddp", model=model, run={"seed": 3})


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def make_half(run: Path, age_s: float) -> Path:
    half = run / "snapshots" / "step-00000040.0123456789ab.half"
    shutil.copytree(run / "snapshots" / "step-00000030", half)
    for path in (*half.iterdir(), half):
        os.utime(path, (time.time() - age_s,) * 2)
    return half


def left(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "snapshots").iterdir())


def test_ls_lists_the_newest_first_with_step_size_and_condition(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "snapshots" / "step-00000020" / TENSORS)
    make_half(run, 0)
    assert main(["snapshots", "ls", str(run)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [
        "snapshot",
        "step-00000040.0123456789ab.half",
        "step-00000030",
        "step-00000020",
        "step-00000010",
        "best",
    ]
    assert rows[1][-1] == "it"  # "half-written, perhaps by a run that is still at it"
    assert rows[2][1:3] == ["30", "3"]
    assert rows[2][-1] == "complete"
    assert rows[3][7:11] == [TENSORS, "is", "damaged:", "its"]
    assert rows[5][1] == "20"


def test_ls_as_json_says_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "snapshots" / "step-00000020" / TENSORS).unlink()
    assert main(["snapshots", "ls", str(run / "snapshots"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["condition"], one["best"]) for one in found] == [
        ("step-00000030", "whole", False),
        ("step-00000020", "damaged", False),
        ("step-00000010", "whole", False),
    ]
    assert found[1]["reason"] == f"{TENSORS} is missing"
    assert (found[0]["step"], found[0]["epoch"]) == (30, 3)


def test_quick_ls_looks_at_sizes_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "snapshots" / "step-00000030" / TENSORS)
    (run / "snapshots" / "step-00000020" / TENSORS).write_bytes(b"")
    assert main(["snapshots", "ls", str(run), "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].endswith("sizes right")
    assert f"{TENSORS} has 0 bytes in place of " in out.splitlines()[2]


def test_ls_of_a_run_without_snapshots_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "ls", str(tmp_path)]) == 0
    assert "no snapshots" in capsys.readouterr().out


def test_folder_that_is_not_there_is_a_wrong_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "ls", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_run_that_is_near_a_mistyped_name_is_named(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "run.json").write_text("{}")
    assert main(["snapshots", verb, str(tmp_path / "firts")]) == 2
    assert f"did you mean {tmp_path / 'first'}?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["best", "20", "step-00000020"])
def test_show_prints_what_the_manifest_says(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "show", str(run), name]) == 0
    out = capsys.readouterr().out
    assert "step       20 (epoch 2)" in out
    assert "workers    1, strategy ddp" in out
    assert "seed       3" in out
    assert "weight  float32 [5]" in out


def test_damaged_snapshot_is_shown_in_no_form(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [tensors] = (run / "snapshots" / "step-00000020").glob("*.safetensors")
    os.truncate(tensors, tensors.stat().st_size - 1)
    for words in ([], ["--json"]):
        assert main(["snapshots", "show", *words, str(run), "20"]) == 2
        assert capsys.readouterr().out == ""


def test_show_has_one_column_of_settings_as_they_are_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path / "snapshots", keep=9)
    store.save({"weight": torch.ones(5)}, replace(facts(10), run={"seed": 3, "shuffle": True, "virtual_workers": None}))
    store.wait()
    assert main(["snapshots", "show", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("seed", "shuffle", "virtual"))] == [
        "seed            3",
        "shuffle         true",
        "virtual_workers none",
    ]


def test_show_as_json_is_the_manifest_of_the_newest_whole_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "snapshots" / "step-00000030" / TENSORS).unlink()
    assert main(["snapshots", "show", str(run), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["step"], content["files"][TENSORS]["bytes"] > 0) == (20, True)


def test_show_of_one_that_is_not_there_names_those_that_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "show", str(run), "25"]) == 2
    assert "step-00000030, step-00000020, step-00000010, best" in capsys.readouterr().err


def test_verify_names_the_file_and_what_is_wrong_with_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "verify", str(run)]) == 0
    flip(run / "best" / TENSORS)
    assert main(["snapshots", "verify", str(run)]) == 2
    out = capsys.readouterr().out
    assert f"best: {TENSORS} is damaged: its sha256 is" in out
    assert "step-00000030: complete" in out


def test_verify_takes_one_snapshot_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "snapshots" / "step-00000010" / TENSORS)
    assert main(["snapshots", "verify", str(run / "snapshots" / "step-00000010")]) == 2
    assert main(["snapshots", "verify", str(run / "snapshots" / "step-00000020")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "step-00000020: complete"


def test_verify_of_nothing_is_a_wrong_request(tmp_path: Path) -> None:
    assert main(["snapshots", "verify", str(tmp_path)]) == 2


def test_half_written_one_is_no_damage(run: Path) -> None:
    make_half(run, 0)
    assert main(["snapshots", "verify", str(run)]) == 0


def test_prune_keeps_the_newest_whole_ones_and_removes_damaged_and_half_ones(run: Path) -> None:
    flip(run / "snapshots" / "step-00000030" / TENSORS)
    make_half(run, 3600)
    assert main(["snapshots", "prune", str(run), "--keep", "1"]) == 0
    assert left(run) == ["step-00000020"]
    assert (run / "best").is_dir()


def test_dry_run_of_prune_removes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "prune", str(run), "--keep", "2", "--dry-run"]) == 0
    assert "Would remove step-00000010 (older than the newest 2" in capsys.readouterr().out
    assert len(left(run)) == 3


def test_prune_leaves_a_half_one_alone_that_a_run_may_be_writing(run: Path) -> None:
    half = make_half(run, 60)
    assert main(["snapshots", "prune", str(run), "--keep", "1"]) == 0
    assert left(run) == ["step-00000030", half.name]


def test_prune_removes_no_damaged_one_where_none_is_whole(run: Path) -> None:
    make_half(run, 3600)
    for step in (10, 20, 30):
        flip(run / "snapshots" / f"step-000000{step}" / TENSORS)
    assert main(["snapshots", "prune", str(run), "--keep", "1"]) == 0
    assert left(run) == ["step-00000010", "step-00000020", "step-00000030"]


def test_prune_leaves_what_takes_a_newer_manyhosts_to_judge(run: Path) -> None:
    manifest = run / "snapshots" / "step-00000010" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 9'))
    assert main(["snapshots", "prune", str(run), "--keep", "1"]) == 0
    assert left(run) == ["step-00000010", "step-00000030"]
    assert main(["snapshots", "verify", str(run)]) == 2


def test_prune_to_none_is_refused(run: Path) -> None:
    assert main(["snapshots", "prune", str(run), "--keep", "0"]) == 2
    assert len(left(run)) == 3


def test_snapshots_are_looked_at_without_torch(run: Path) -> None:
    code = f"import sys; from manyhosts.cli.main import main; main(['snapshots', 'ls', {str(run)!r}]); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
