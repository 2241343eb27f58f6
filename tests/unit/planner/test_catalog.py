"""A catalog of machines is read as it is written, and what cannot be is refused by table and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from measured_training import MEASURED

from manyhosts.errors import ConfigError
from manyhosts.planner import catalog
from manyhosts.planner.measured import Network
from manyhosts.planner.predict import predictions, ways


def write(folder: Path, text: str) -> Path:
    path = folder / "machines.toml"
    path.write_text(text)
    return path


def test_catalog_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[large]\ncount = 1\nworkers = 8\nspeed = 2.5\nmemory = "80 GB"\ncores = 96\nwithin = "600 GB/s, 0.01 ms"\n'
        'price = 32.77\n[small]\ncount = 8\nbetween = "10 Gbit/s, 50 us"\n',
    )
    large, small = catalog.read(path)
    assert (large.name, large.count, large.workers, large.speed, large.price) == ("large", 1, 8, 2.5, 32.77)
    assert (large.memory_bytes, large.cores) == (80 * 10**9, 96)
    assert large.within == Network(latency_s=0.01 * 1e-3, bytes_per_second=6e11)
    assert small.between == Network(latency_s=50 * 1e-6, bytes_per_second=1.25e9)
    assert (small.workers, small.speed, small.price, small.memory_bytes) == (1, 1.0, None, 0)


def test_example_of_the_documentation_can_be_read(tmp_path: Path) -> None:
    text = "\n".join(line for line in (catalog.__doc__ or "").splitlines()[2:])
    [dgx] = catalog.read(write(tmp_path, text))
    assert (dgx.name, dgx.workers, dgx.price) == ("dgx", 8, 32.77)


def test_faster_machines_are_predicted_faster(tmp_path: Path) -> None:
    path = write(tmp_path, "[slow]\ncount = 1\n[fast]\ncount = 1\nspeed = 4\n")
    slow, fast = (predictions(MEASURED, each, [(1, 1)], ways(MEASURED))[0] for each in catalog.read(path))
    assert slow.epoch_seconds == pytest.approx(4 * fast.epoch_seconds)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lists no machines"),
        ("[a\n", "is no TOML"),
        ("count = 3\n", "count is outside of any table"),
        ("[a]\nworkers = 8\n", "a lacks count"),
        ("[a]\ncount = 0\n", "count is 0"),
        ("[a]\ncount = true\n", "count is True"),
        ("[a]\ncount = 1\nspeed = 0\n", "speed is 0"),
        ("[a]\ncount = 1\nspeed = nan\n", "speed is nan"),
        ("[a]\ncount = 1\nprice = -1\n", "price is -1"),
        ("[a]\ncount = 1\npirce = 1\n", "there is no 'pirce' of a machine"),
        ("[a]\ncount = 1\nmemory = 'much'\n", "cannot read the size 'much'"),
        ("[a]\ncount = 1\nwithin = 'fast'\n", "cannot read the network 'fast'"),
        ("[a]\ncount = 1\nwithin = '0 Gbit/s'\n", "0 bytes a second"),
        ("[a]\ncount = 1\nwithin = 25\n", "within is 25"),
        ("[a]\ncount = 2\n", "a has 2 machines, and no network between them"),
    ],
)
def test_catalog_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refusal:
        catalog.read(write(tmp_path, text))
    assert refusal.value.where
    assert refusal.value.fix


def test_catalog_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read machines.toml: No such file"):
        catalog.read(tmp_path / "machines.toml")


@pytest.mark.parametrize(
    ("text", "latency_s", "bytes_per_second"),
    [
        ("10gbit", 1e-4, 1.25e9),
        ("10 Gbit/s, 0.1 ms", 1e-4, 1.25e9),
        ("100mbit,2ms", 2e-3, 1.25e7),
        ("600 GB/s, 5 µs", 5e-6, 6e11),
        ("1.5Gbps", 1e-4, 1.875e8),
        ("1.5 Gb/s", 1e-4, 1.875e8),
        ("1.5 GBit", 1e-4, 1.875e8),
    ],
)
def test_networks_are_read_as_people_write_them(text: str, latency_s: float, bytes_per_second: float) -> None:
    found = Network.parse(text, where="--network")
    assert (found.latency_s, found.bytes_per_second) == (pytest.approx(latency_s), pytest.approx(bytes_per_second))
