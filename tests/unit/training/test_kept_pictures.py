"""The first batch of a real run is kept where someone asks for it, and only there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from runs import Recipe, images_and_labels, make_trainer

from manyhosts.records import first_batch
from manyhosts.records.samples import read

RECIPE = Recipe(samples=40, batch=20, trainer={"keep_pictures": 16})


def test_first_batch_is_that_of_the_first_step_and_is_kept_when_the_run_goes_on(tmp_path: Path) -> None:
    make_trainer(RECIPE, tmp_path).fit("1 step")
    kept = first_batch.read(tmp_path / "first-batch.npz")
    assert kept is not None
    taken = next(iter(samples(tmp_path).values()))
    images, labels = images_and_labels(RECIPE.samples)
    expected = first_batch.pictures_of(images[taken].numpy(), labels[taken].numpy(), 16)
    assert expected is not None
    assert kept.labels == expected.labels
    assert np.array_equal(kept.pixels, expected.pixels)
    before = (tmp_path / "first-batch.npz").stat()
    make_trainer(RECIPE, tmp_path).fit("3 steps")
    assert (tmp_path / "first-batch.npz").stat().st_mtime_ns == before.st_mtime_ns


def test_no_sample_is_written_to_disk_unless_asked(tmp_path: Path) -> None:
    make_trainer(Recipe(samples=40, batch=20), tmp_path).fit("1 step")
    assert (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "first-batch.npz").exists()


def samples(folder: Path) -> dict[int, list[int]]:
    """In the order in which they were taken."""
    return {line["step"]: line["indices"] for line in read(folder / "logs" / "samples-0.jsonl")}
