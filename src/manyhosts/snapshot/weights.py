"""The weights of a run: out of its directory, and into a file of their own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyhosts.errors import ConfigError, SnapshotError
from manyhosts.records.manifest import NAME, found_in
from manyhosts.records.run_directory import RunDirectory
from manyhosts.snapshot import load as snapshots

_FIX = (
    "give a snapshot folder, a run directory with a best/ or snapshots/, a .safetensors file, or a .pt of a state_dict"
)
SUFFIXES = (".safetensors", ".pt", ".pth")


def load(run_dir: str | Path, weights: Literal["best", "last"] = "best") -> dict[str, Tensor]:
    """The `state_dict` of a run's model, on the CPU, with the names that the model itself has.

    Of an `mh.Run` each name begins with its model's: `generator.0.weight`.
    `run_dir` is a run directory, one snapshot, or a file that `Trainer.save` wrote. `weights="best"`: those of the best
    validation, or the newest where the run has no best; `"last"`: the newest. Every byte is checked against its hash; a
    damaged snapshot is named in a warning, and the one before it is taken.

    Raises:
        ConfigError: there are no weights, or a file of them cannot be read.
        SnapshotError: there are, and all are damaged.
    """
    path = Path(run_dir)
    if path.is_file():
        return from_file(path, where=str(path))
    if weights not in ("best", "last"):
        raise ConfigError(f"weights is {weights!r}", where="mh.load(…)", fix='choose "best" or "last"')
    directory = RunDirectory(path)
    found = [path] if (path / NAME).exists() else []
    if not found and weights == "best" and (directory.best / NAME).exists():
        found.append(directory.best)
    if not found:
        folder = directory.snapshots if directory.snapshots.is_dir() else path  # that of an mh.Saver
        found = [each.path for each in found_in(folder) if each.how != "half" and each.step >= 0]
    if not found:
        what = "there is no such folder" if not path.exists() else "there is no best model and no snapshot here"
        raise ConfigError(what, where=str(path), fix="give the directory of a run that has saved, or one snapshot")
    for number, each in enumerate(found, start=1):
        try:
            state: dict[str, Tensor] = of_model(snapshots.load(each).state, each)
        except SnapshotError as error:
            if number == len(found):
                raise
            warnings.warn(f"{each} is left out: {error.what}", stacklevel=2)
        else:
            return state
    raise AssertionError("the last one either was given back or has raised")


def of_model(state: Mapping[str, Any], where: Path) -> Any:
    """What a snapshot of a run has of its model, or one of an `mh.Saver` of the object that is called so.

    Raises:
        ConfigError: it has none.
    """
    names = list(state)  # to ask a snapshot whether it has one reads it
    if "model" in names:
        return state["model"]
    objects = state["objects"] if "objects" in names else {}
    if "model" not in objects:
        raise ConfigError(
            f"nothing in this snapshot is called model; it has {', '.join(objects) or 'no objects'}",
            where=str(where),
            fix="resume it by the mh.Saver that has made it, and take the weights of the object from there",
        )
    return objects["model"]


def from_file(path: Path, *, where: str) -> dict[str, Tensor]:
    """The `state_dict` in the file `path`, on the CPU. Nothing is unpickled but tensors. `where`: for errors.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        if not path.exists():
            raise FileNotFoundError("there is no such file or folder")
        if path.suffix == ".safetensors":
            return load_file(path)
        read = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as cause:  # of many kinds: no file, no access, half-written, or more than tensors in it
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise ConfigError(f"cannot read the weights: {reason}", where=where, fix=_FIX) from cause
    inner = read.get("state_dict", read) if isinstance(read, dict) else None
    # A model may keep more than tensors: get_extra_state().
    if not isinstance(inner, dict) or not is_state_dict(inner):
        raise ConfigError("the file holds no state_dict", where=where, fix=_FIX)
    return inner


def is_state_dict(given: Mapping[str, Any]) -> bool:
    """Whether it is one of a model: tensors, and what `get_extra_state` gives; no checkpoint of several things."""
    others = [name for name, value in given.items() if not isinstance(value, Tensor)]
    return all(str(name).endswith("_extra_state") for name in others)


def check_path(path: Path) -> None:
    """See that `save` knows what to write to `path`.

    Raises:
        ConfigError: by its name it is neither a safetensors file nor one of torch.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"cannot tell what to write from the name {path.name!r}",
            where="trainer.save(…)",
            fix='end it in .safetensors (such as "model.safetensors"), or in .pt for torch.load',
        )


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a `state_dict` to one file, completely or not at all.

    Raises:
        ConfigError: it cannot be written there.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}.half")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            # Memory of its own for each: the format has no word for two names of one tensor.
            if other := [name for name, each in state.items() if not isinstance(each, Tensor)]:
                raise TypeError(
                    f"{other[0]} is a {type(state[other[0]]).__name__}, and safetensors keeps tensors alone"
                )
            tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
            save_file(tensors, half, metadata={"format": "pt"})
        else:
            kept = {name: each.detach().cpu() if isinstance(each, Tensor) else each for name, each in state.items()}
            torch.save(kept, half)
        with half.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave an empty file in place of the one before
        os.replace(half, path)
    except Exception as cause:  # of many kinds: the disk, a dtype that the format does not know
        said = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise ConfigError(
            f"cannot write the weights: {said}", where=str(path), fix="choose another place, or a .pt file"
        ) from cause
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)
