"""What was served, for the next training: samples that are kept where that was asked for, and how far data drifts."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from manyhosts.errors import ConfigError
from manyhosts.serve.tensors import Arrays, samples_of

# Samples of a file
_TOGETHER = 64
# What a sample counts for after each later one: the last thousand count
_MEMORY = 0.999


class KeptSamples:
    """Writes a share of what is served to files of 64 samples, until they are as large as allowed; the oldest go then.

    `served-00000001.safetensors` has `inputs.NAME` and `outputs.NAME`, each (samples, …).
    """

    def __init__(self, folder: Path, *, share: float, most_bytes: int, seed: int | None = None) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"the share is {share:g}", where="--keep-share", fix="give one above 0 and up to 1")
        self._folder, self._share, self._most_bytes = folder, share, most_bytes
        self._random = random.Random(seed)  # noqa: S311  # which samples are kept is no secret
        self._held: list[dict[str, np.ndarray]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as cause:
            raise ConfigError(
                f"cannot keep samples: {cause.strerror}", where=str(folder), fix="choose another"
            ) from cause

    def add(self, inputs: Arrays, outputs: Arrays) -> None:
        """Keep some samples of a batch."""
        for number in range(samples_of(inputs)):
            if self._random.random() < self._share:
                row = {f"inputs.{name}": each[number] for name, each in inputs.items()}
                row |= {f"outputs.{name}": each[number] for name, each in outputs.items()}
                if self._held and {k: v.shape for k, v in self._held[0].items()} != {
                    k: v.shape for k, v in row.items()
                }:
                    self.flush()
                self._held.append(row)
        if len(self._held) >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory."""
        if not self._held:
            return
        files = kept_files(self._folder)
        number = int(files[-1].stem.rpartition("-")[2]) + 1 if files else 1
        place = self._folder / f"served-{number:08d}.safetensors"
        half = place.with_suffix(".half")
        save_file({name: np.stack([row[name] for row in self._held]) for name in self._held[0]}, half)
        os.replace(half, place)
        self._held = []
        sizes = [(path, path.stat().st_size) for path in [*files, place]]
        total = sum(size for _, size in sizes)
        for path, size in sizes:
            if total <= self._most_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def kept_files(folder: Path) -> list[Path]:
    """The files of kept samples, oldest first."""
    return sorted(folder.glob("served-*.safetensors"))


def kept_samples(folder: str | Path) -> list[dict[str, np.ndarray]]:
    """Every sample that was kept: `inputs.NAME` and `outputs.NAME`, a list that a DataLoader or `mh.Data` takes.

    Raises:
        ConfigError: there are none.
    """
    files = kept_files(Path(folder))
    if not files:
        raise ConfigError("no samples were kept here", where=str(folder), fix="serve with --keep DIR")
    return [
        {name: each[number] for name, each in batch.items()}
        for batch in map(load_file, files)
        for number in range(len(next(iter(batch.values()))))
    ]


class Drift:
    """How far the means of what is served are from those that the model was made with, in deviations of these."""

    def __init__(self, expected: Mapping[str, Any]) -> None:
        """`expected`: `data` of the description."""
        self._expected = {
            (kind, name): (float(values["mean"]), float(values["deviation"]))
            for kind in ("inputs", "outputs")
            for name, values in expected.get(kind, {}).items()
        }
        self._sums: dict[tuple[str, str], tuple[float, float]] = {}

    def add(self, inputs: Arrays, outputs: Arrays) -> None:
        """One batch was served."""
        for kind, arrays in (("inputs", inputs), ("outputs", outputs)):
            for name, each in arrays.items():
                known = each[np.isfinite(each)] if each.dtype.kind == "f" else each
                if (kind, name) in self._expected and known.size:
                    keep = _MEMORY ** len(each)
                    total, weight = self._sums.get((kind, name), (0.0, 0.0))
                    mean = float(known.mean(dtype=np.float64))
                    self._sums[kind, name] = (total * keep + mean * (1 - keep), weight * keep + 1 - keep)

    def values(self) -> dict[tuple[str, str], float]:
        """(`inputs` or `outputs`, name) → deviations from the expected mean."""
        found = {}
        for key, (total, weight) in self._sums.items():
            mean, deviation = self._expected[key]
            found[key] = abs(total / weight - mean) / max(deviation, 1e-12)
        return found
