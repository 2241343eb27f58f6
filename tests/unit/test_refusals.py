"""What PyTorch refuses for want of a GPU is told in a sentence, with the script's own line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhosts import refusals
from manyhosts.errors import ConfigError, ScriptError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is refused where there is a GPU")


def says(text: str, kind: type[Exception] = RuntimeError) -> Callable[[], object]:
    """What another build of PyTorch, or another version, says."""

    def fail() -> None:
        raise kind(text)

    return fail


def group_with_nccl() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
@pytest.mark.parametrize(
    ("ask", "what", "fix"),
    [
        (lambda: nn.Linear(2, 2).cuda(), "asks for one: ", "'cuda' if torch.cuda.is_available()"),
        (lambda: torch.zeros(2, device="cuda"), "asks for one: ", "--rehearse"),
        (lambda: torch.zeros(2).to("cuda:1"), "asks for one: ", "--rehearse"),
        (lambda: torch.cuda.set_device(0), "asks for one: ", "--rehearse"),
        (
            says("Found no NVIDIA driver on your system. Please check that"),
            "your system), and the script",
            "--rehearse",
        ),
        (says("No CUDA GPUs are available"), "(No CUDA GPUs are available)", "--rehearse"),
        (group_with_nccl, "asks for NCCL", "without a backend"),
        (says("nccl2 requires at least one CUDA device"), "asks for NCCL", "without a backend"),
        (says("Attempting to deserialize object on a CUDA device but"), "loads tensors", "map_location='cpu'"),
    ],
)
def test_refusal_becomes_a_sentence_with_the_line(ask: Callable[[], object], what: str, fix: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # each build of PyTorch raises its own kind
        ask()
    reported = refusals.explained(caught.value)
    assert isinstance(reported, ScriptError)
    assert what in reported.what
    assert fix in reported.fix
    assert reported.where.startswith(f"{__file__}, line "), "the innermost line that is the user's own"


def test_other_errors_are_left_as_they_are() -> None:
    assert refusals.explained(ValueError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert refusals.explained(ConfigError("No CUDA GPUs are available")) is None


def test_gpu_that_is_there_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a rehearsal, where `torch.cuda` answers: what is refused then is something else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert refusals.explained(AssertionError("Torch not compiled with CUDA enabled")) is None


def test_script_that_nobody_launched_is_told_before_its_trainer(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import manyhosts as mh\nfrom torch import nn\nmodel = nn.Linear(2, 2).cuda()\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "MANYHOSTS_TRACE": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (1, 3), done.stderr
    assert lines[0].endswith("and the script asks for one: model = nn.Linear(2, 2).cuda()")
    assert lines[1:] == [
        f"  where: {script}, line 3",
        "  fix:   leave that out: the trainer moves the model and its batches to each worker's device;"
        " manyhosts run --rehearse tries the script here as it is",
    ]
