"""`export.json`: what an exported model takes and gives, where it is from and which files it is made of."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.records.atomic_file import read_json, write_json
from manyhosts.records.numbers import to_words

NAME = "export.json"
VERSION = 1
FORMATS = ("safetensors", "torch-export", "onnx", "hf")
PRECISIONS = ("fp32", "bf16", "int8")
# Sizes of the batches on which a program is compared with the trained model
BATCHES = (1, 2, 17)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor that goes in or comes out."""

    name: str
    dtype: str  # As numpy calls it, such as `float32`
    shape: tuple[int | None, ...]  # Of one sample, without the batch; None where any length will do

    def __str__(self) -> str:
        sides = " x ".join("any" if side is None else str(side) for side in self.shape)
        return f"{self.name}: {self.dtype}, {sides or 'one number'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """A function of the script's that turns what a client sends into the tensors that the model takes."""

    file: str  # In the folder of the export; absolute where a run is served
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What `export.json` holds."""

    format: str
    precision: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    preprocessing: Preprocessing | None = None
    source: Mapping[str, Any] = field(default_factory=dict)  # The run, its script, step, settings and versions
    # Sizes of the sets, and mean and deviation of inputs and outputs over some samples, for drift
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    licence: str = "unknown"
    # The largest difference from the trained model, and on how many samples
    verified: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # Name → sha256 of every other file of the export
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """Write it into `folder`, with the hashes of the files that are there."""
        described = dataclasses.replace(self, files=hashes(folder))
        # A metric of the run may be NaN, which JSON has no word for.
        write_json(folder / NAME, {**dataclasses.asdict(described), "metrics": to_words(described.metrics)})

    @classmethod
    def read(cls, folder: Path, *, check: bool = True) -> Description:
        """That of the export in `folder`. `check`: whether every file is compared with its hash.

        Raises:
            ConfigError: there is none, it is of a newer version, or a file is not what it was.
        """
        if not (folder / NAME).exists():
            raise ConfigError(
                f"this folder is not an export: there is no {NAME} in it",
                where=str(folder),
                fix="make one: manyhosts export RUN --format torch-export",
            )
        content = read_json(folder / NAME)
        if content.get("version") != VERSION:
            raise ConfigError(
                f"{NAME} has version {content.get('version')}, and this manyhosts reads version {VERSION}",
                where=str(folder / NAME),
                fix="export again, or install the manyhosts that wrote it",
            )
        try:
            described = cls.from_json(content)
        except (KeyError, TypeError) as cause:
            raise ConfigError(f"{NAME} cannot be read: {cause}", where=str(folder), fix="export again") from cause
        if check and (other := sorted(described.files.items() ^ hashes(folder).items())):
            raise ConfigError(
                f"{other[0][0]} is not the file that was exported", where=str(folder), fix="export the model again"
            )
        return described

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Description:
        """What `dataclasses.asdict` and JSON made of one."""
        specs = {
            key: tuple(TensorSpec(**{**each, "shape": tuple(each["shape"])}) for each in content[key])
            for key in ("inputs", "outputs")
        }
        before = content.get("preprocessing")
        return cls(**{**content, **specs, "preprocessing": None if before is None else Preprocessing(**before)})


def hashes(folder: Path) -> dict[str, str]:
    """Name → sha256 of the files in `folder`, those of its folders too, but for `export.json`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != NAME and "__pycache__" not in path.parts:
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
