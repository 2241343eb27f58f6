"""What Prometheus fetches from a run, read by its own parser."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import free_port
from stories import BEGIN, ended, record, started, stepped, validated

from manyhosts.config.metrics_port import MetricsPort
from manyhosts.errors import ConfigError
from manyhosts.events import Recovered, Slowdown, WorkersTimed, WorkerTimes
from manyhosts.listeners.broadcast import Broadcast
from manyhosts.listeners.prometheus import ServeMetrics
from manyhosts.listeners.standard import standard
from manyhosts.listeners.terminal import Fields
from manyhosts.records.metrics import MetricsFile
from manyhosts.records.run_directory import RunDirectory

parser = pytest.importorskip("prometheus_client.parser")


class Silent:
    def say(self, text: str) -> None: ...
    def progress(self, fields: Fields) -> None: ...
    def close(self) -> None: ...


Serve = Callable[..., ServeMetrics]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made = []

    def make(place: MetricsPort, **more: int) -> ServeMetrics:
        made.append(ServeMetrics(place, record(), **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def fetched(place: MetricsPort) -> dict[tuple[str, ...], float]:
    """By name and the values of its labels, in the order of their names."""
    with urllib.request.urlopen(f"http://{place.address}:{place.port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def worker(rank: int, host: str, compute: float) -> WorkerTimes:
    return WorkerTimes(
        rank=rank, host=host, samples=4, total=1.0, compute=compute, communication_exposed=1 - compute, data_wait=0.0,
        snapshot_stall=0.0,
    )  # fmt: skip


def test_every_figure_of_a_run_is_there_as_it_goes_on(serve: Serve) -> None:
    place = MetricsPort(free_port())
    tell = serve(place, restarts=2)
    before = fetched(place)
    assert (before["manyhosts_training",], before["manyhosts_steps_total",]) == (0, 0)
    assert ("manyhosts_loss",) not in before, "nobody knows it yet"

    for event in (started(), stepped(1, seconds=0.5), stepped(2, loss=0.25, seconds=0.5), validated(2, loss=0.5)):
        tell(event)
    found = fetched(place)
    assert found["manyhosts_training",] == 1
    assert found["manyhosts_steps_total",] == 2
    assert found["manyhosts_samples_total",] == 16
    assert found["manyhosts_samples_per_second",] == pytest.approx(16)
    assert found["manyhosts_loss",] == 0.25
    assert found["manyhosts_learning_rate",] == pytest.approx(0.1)
    assert found["manyhosts_restarts_total",] == 2
    assert found["manyhosts_workers",] == record().workers
    assert found["manyhosts_validation", "loss"] == 0.5
    assert found["manyhosts_step_seconds", socket.gethostname(), "compute", "0"] == pytest.approx(0.25)

    times = (worker(0, "a", 0.25), worker(1, "b", 0.75), worker(2, "c", 0.25))
    tell(WorkersTimed(step=2, steps=1, workers=times, communication=0.25, time=BEGIN))
    slow = {"step": 2, "text": "slow", "what": "worker", "who": "host b", "time": BEGIN}
    tell(Slowdown(**slow, factor=3.0, cause="compute"))
    tell(Recovered(step=2, reason="rank 3 died", how="without it", steps_redone=0, seconds_lost=0.1, time=BEGIN))
    found = fetched(place)
    assert found["manyhosts_workers",] == 3
    assert found["manyhosts_step_seconds", "b", "compute", "1"] == 0.75
    assert found["manyhosts_step_seconds", "b", "communication_exposed", "1"] == 0.25
    assert found["manyhosts_slow", "compute", "host b"] == 3.0
    assert found["manyhosts_restarts_total",] == 3

    tell(Slowdown(**slow, factor=1.0))
    tell(ended(2))
    found = fetched(place)
    assert not [key for key in found if key[0] == "manyhosts_slow"], "it is slow no more"
    assert found["manyhosts_training",] == 0


def test_the_next_trainer_of_a_script_is_served_in_place_of_the_last_one(serve: Serve) -> None:
    place = MetricsPort(free_port())
    first = serve(place)
    first(stepped(7))
    second = serve(place)
    second(stepped(1))
    first.close()
    assert fetched(place)["manyhosts_steps_total",] == 1
    second.close()
    with pytest.raises(urllib.error.URLError):
        fetched(place)


def test_leader_that_takes_over_counts_on_from_the_restarts_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, place = RunDirectory(tmp_path), MetricsPort(free_port())
    lost = Recovered(step=2, reason="", how="", steps_redone=0, seconds_lost=0.1, time=BEGIN)
    first = MetricsFile(run.metrics)
    for event in (started(), stepped(1), lost, stepped(2), lost, stepped(3)):
        first.add(event)
    first.close()
    for name, value in place.to_environment().items():
        monkeypatch.setenv(name, value)
    tell = Broadcast(standard(run, record(), Silent(), metrics=MetricsFile(run.metrics), started=started()))
    tell(lost)
    assert fetched(place)["manyhosts_restarts_total",] == 3
    tell.close()


def test_port_that_is_taken_is_refused_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = MetricsPort(server.getsockname()[1])
        with pytest.raises(ConfigError, match=r"cannot listen at 127\.0\.0\.1:"):
            ServeMetrics(place, record())


def test_library_that_is_missing_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="not installed on host") as refused:
        ServeMetrics(MetricsPort(free_port()), record())
    assert "pip install prometheus_client" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("9400", MetricsPort(9400, "127.0.0.1")),
        ("0.0.0.0:9400", MetricsPort(9400, "0.0.0.0")),
        ("[::]:65535", MetricsPort(65535, "::")),
    ],
)
def test_port_is_that_of_this_host_unless_an_address_is_given(text: str, place: MetricsPort) -> None:
    assert MetricsPort.parse(text) == place
    assert MetricsPort.parse(next(iter(place.to_environment().values()))) == place


@pytest.mark.parametrize("text", ["", "0", "65536", ":9400", "-1", "host", "9400/tcp"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="as a port"):
        MetricsPort.parse(text)


def test_figures_of_a_run_that_was_resumed_or_taken_over_are_those_of_the_run(serve: Serve) -> None:
    place = MetricsPort(free_port())
    tell = serve(place, started=started(40))
    assert fetched(place)["manyhosts_training",] == 1
    tell(started(40))
    assert fetched(place)["manyhosts_steps_total",] == 40
    times = (worker(0, "a", 0.25), worker(1, "b", 0.75))
    tell(WorkersTimed(step=41, steps=1, workers=times, communication=0.25, time=BEGIN))
    lost = {"step": 41, "reason": "rank 1 died", "how": "without it", "steps_redone": 0, "seconds_lost": 0.1}
    tell(Recovered(**lost, time=BEGIN, workers=1))
    found = fetched(place)
    assert found["manyhosts_workers",] == 1
    assert ("manyhosts_step_seconds", "b", "compute", "1") not in found
