"""The process that has the model: it answers batches and takes over snapshots, in the order in which it is asked.

Started by `workers`, with one end of a socket pair. Where the model is cut over several workers, rank 0 has the pair
and passes on what it is asked: all compute each batch together, and rank 0 answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import runpy
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch

from manyhosts.config.strategies import CUTS
from manyhosts.errors import ConfigError, ManyhostsError, SnapshotError, first_line
from manyhosts.export import formats
from manyhosts.export.description import Description, Preprocessing
from manyhosts.export.export import describe, named_function
from manyhosts.export.model_call import ModelCall, without_cache
from manyhosts.model.trained_module import collective_forward
from manyhosts.serve import frames
from manyhosts.serve.tensors import Arrays, Refused, from_json
from manyhosts.training.trained_script import open_run


class OfRun:
    """The script's own model, out of a run directory; on several workers each has a part of it."""

    def __init__(self, run: Any, preprocess: str) -> None:
        self._run = run
        collective_forward(run.model).__enter__()  # from here to the end: all workers are asked the same, in one order
        call = ModelCall(run)
        self._program = call.program()
        batches = list(call.batches())[:3]
        self.described = describe(run, call, formats.answers_of(self._program, batches), batches)
        self.preprocess = named_function(preprocess, run) if preprocess else None
        self._device = run.trainer.world.device
        without_cache(run.model).__enter__()

    @torch.no_grad()
    def __call__(self, arrays: Arrays) -> Arrays:
        """The outputs of a batch."""
        inputs = (each.to(self._device) for each in _tensors(arrays, self.described))
        return _arrays(self._program(*inputs), self.described)

    def take(self, snapshot: Path) -> int:
        """Answer from now on with the weights of another snapshot."""
        return int(self._run.take(snapshot).step)


class OfExport:
    """A program that was exported: torch-export or ONNX."""

    def __init__(self, folder: Path) -> None:
        self.described = Description.read(folder)
        self.preprocess = _loaded(folder, self.described.preprocessing)
        if self.described.format == "torch-export":
            self._answer: Callable[..., Any] = torch.export.load(folder / formats.PROGRAM).module()
        elif self.described.format == "onnx":
            names = [[each.name for each in specs] for specs in (self.described.inputs, self.described.outputs)]
            self._answer = formats.onnx_program(folder, *names)
        else:
            raise ConfigError(
                f"a {self.described.format} export holds weights and no program",
                where=str(folder),
                fix="serve the run itself, or an export of format torch-export or onnx",
            )

    @torch.no_grad()
    def __call__(self, arrays: Arrays) -> Arrays:
        """The outputs of a batch."""
        return _arrays(self._answer(*_tensors(arrays, self.described)), self.described)

    def take(self, snapshot: Path) -> int:
        """An export is what it is."""
        raise SnapshotError("an export takes over no snapshot", where=str(snapshot), fix="serve the run")


Model = OfRun | OfExport


def _tensors(arrays: Arrays, described: Description) -> list[torch.Tensor]:
    return [torch.from_numpy(arrays[spec.name]).to(getattr(torch, spec.dtype)) for spec in described.inputs]


def _arrays(outputs: Any, described: Description) -> Arrays:
    found = {}
    for spec, each in zip(described.outputs, outputs, strict=True):
        found[spec.name] = (each.float() if each.dtype == torch.bfloat16 else each).detach().cpu().numpy()
    return found


def _loaded(folder: Path, before: Preprocessing | None) -> Callable[[list[Any]], Any] | None:
    """The function of an export that makes the model's inputs of what a client sends."""
    if before is None:
        return None
    names = runpy.run_path(str(folder / before.file), run_name="manyhosts_preprocess")
    return cast(Callable[[list[Any]], Any], names[before.function])


@contextlib.contextmanager
def opened(request: dict[str, Any]) -> Iterator[Model]:
    """The model that `request` names by `folder`, `snapshot`, `model`, `preprocess` and `workers`."""
    folder = Path(request["folder"])
    if not (folder / "run.json").exists():
        yield OfExport(folder)
        return
    strategy = next(iter(CUTS)) if request["workers"] > 1 else "single"
    with open_run(folder, snapshot=request["snapshot"], strategy=strategy) as run:
        yield OfRun(run.with_model(request["model"]), request["preprocess"])


def main() -> None:
    """Open the model, say what it takes, and answer until the other side ends."""
    request = json.loads(os.environ[frames.REQUEST])
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(request["threads"] or torch.get_num_threads())
    line = socket.socket(fileno=int(os.environ[frames.SOCKET])) if rank == 0 else None
    try:
        with opened(request) as model:
            if line is not None:
                reported = {
                    "kind": "ready",
                    "described": dataclasses.asdict(model.described),
                    "preprocesses": model.preprocess is not None,
                }
                line.sendall(frames.frame(reported))
            asks = None if line is None else line.makefile("rb")
            while (asked := _next(asks, size)) is not None:
                reply = _answer(model, *asked)
                if line is not None:
                    line.sendall(reply)
    except ManyhostsError as error:
        if line is not None:
            line.sendall(frames.frame({"kind": "failed", "what": error.what, "where": error.where, "fix": error.fix}))
        raise SystemExit(error.exit_code) from error
    except (BrokenPipeError, ConnectionResetError):
        pass


def _next(asks: BinaryIO | None, size: int) -> tuple[dict[str, Any], Arrays] | None:
    """What is asked next, the same on every worker; None at the end."""
    reported = [None if asks is None else frames.read_blocking(asks)]
    if size > 1:
        torch.distributed.broadcast_object_list(reported, src=0)
    return reported[0]


def _answer(model: Model, head: dict[str, Any], arrays: Arrays) -> bytes:
    """The reply to one message. An error that the input may be to blame for is reported; the model is as it was."""
    try:
        if head["kind"] == "take":
            try:
                return frames.frame({"kind": "taken", "step": model.take(Path(head["snapshot"]))})
            except SnapshotError as error:
                return frames.frame({"kind": "kept", "why": error.what})
        made = preprocessed(model, head["samples"]) if head["kind"] == "preprocess" else model(arrays)
        return frames.frame({"kind": "arrays"}, made)
    except Refused as error:
        return frames.frame({"kind": "refused", "status": error.status, "why": error.sentence})
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if head["kind"] == "take" or torch.distributed.is_initialized():
            raise  # who knows what the others compute
        traceback.print_exc()
        return frames.frame(
            {"kind": "refused", "status": 422, "why": f"the model cannot compute this: {first_line(error)}"}
        )


def preprocessed(model: Model, samples: list[Any]) -> Arrays:
    """What the script's function makes of the samples of a client, checked as other inputs are.

    Raises:
        Refused: the function fails, or gives something that the model does not take.
    """
    assert model.preprocess is not None, "the server sends samples only then"
    specs = model.described.inputs
    try:
        if len(specs) == 1:
            given = model.preprocess(_as_tensor(samples, getattr(torch, specs[0].dtype)))
            columns = given if isinstance(given, dict) else {specs[0].name: given}
        else:
            columns = dict(model.preprocess(samples))
        lists = {name: torch.as_tensor(each).tolist() for name, each in columns.items()}
        if lists.keys() != {spec.name for spec in specs}:
            raise ValueError(f"preprocessing gives {', '.join(lists)}")
    except Exception as cause:
        raise Refused(422, f"the inputs cannot be preprocessed: {first_line(cause)}") from cause
    rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    if len(rows) != len(samples):
        raise Refused(422, f"preprocessing gives {len(rows)} samples for {len(samples)}")
    return from_json(rows, model.described)


_EXACT = 1 << 24
"""Up to here every integer is a number of float32."""


def _as_tensor(samples: list[Any], dtype: torch.dtype) -> Any:
    """Numbers as a tensor, of the dtype of the model's input where none of them becomes another one by that."""
    try:
        array = np.array(samples)
    except ValueError:
        return samples
    if array.dtype.kind not in "iufb":
        return samples
    is_cut = array.dtype.kind == "f" and not dtype.is_floating_point
    is_rounded = array.dtype.kind in "iu" and dtype.is_floating_point and bool((abs(array) > _EXACT).any())
    return torch.as_tensor(samples) if is_cut or is_rounded else torch.as_tensor(samples, dtype=dtype)


if __name__ == "__main__":
    main()
