"""Faults of scripts, told from what several workers report."""

from __future__ import annotations

from typing import Any

from manyhosts.control.head.output import ScriptFaults, on_one_gpu


class Told:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.faults = ScriptFaults(self.words.append)

    def add_report(self, rank: int, fault: str, generation: int = 0, **fields: Any) -> None:
        known = {"fault": fault, "host": "a", "workers": 2, "world": 2, "apart": False}
        self.faults.add_report(generation, rank, {**known, **fields})


def test_file_that_two_ranks_of_a_host_write_is_told_once_and_of_two_hosts_never() -> None:
    reported = Told()
    reported.add_report(0, "file", path="/x/best.pt")
    reported.add_report(1, "file", path="/x/best.pt", host="b")
    reported.add_report(1, "file", path="/x/last-1.pt")
    assert reported.words == []
    for _ in range(2):
        reported.add_report(1, "file", path="/x/best.pt")
    [words] = reported.words
    assert words.startswith("manyhosts: ranks 0 and 1 all write best.pt, each over the others: /x/best.pt; fix: ")


def test_validation_is_told_where_all_go_through_the_same_samples() -> None:
    for second, count in (
        ({"fingerprint": "a"}, 1),
        ({"fingerprint": "b"}, 0),
        ({"apart": True}, 0),
        ({"world": 1}, 0),
    ):
        reported = Told()
        whole = {"samples": 100, "batches": 4, "fingerprint": "a", "train_mode": False}
        reported.add_report(0, "validation", **whole)
        reported.add_report(1, "validation", **(whole | second))
        assert len(reported.words) == count, (second, reported.words)


def test_epoch_that_was_over_and_is_trained_again_is_told() -> None:
    for epoch, whole, count in ((3, True, 1), (4, True, 0), (3, False, 0)):
        reported = Told()
        reported.add_report(0, "saved", path="/x/s.pt", epoch=3, whole=whole)
        reported.add_report(0, "began", 1, epoch=epoch, loaded=["/x/s.pt"], other_ways=False)
        assert len(reported.words) == count, (epoch, whole)


def test_restart_that_finds_nothing_of_what_was_saved_is_told() -> None:
    for loaded, other_ways, count in (([], False, 1), ([], True, 0), (["/x/other.pt"], False, 0)):
        reported = Told()
        reported.add_report(0, "began", 0, epoch=0, loaded=[], other_ways=False)
        assert reported.words == [], "the first start has nothing to load"
        reported.add_report(0, "saved", path="/x/s.pt", epoch=0, whole=True)
        reported.add_report(0, "began", 1, epoch=0, loaded=loaded, other_ways=other_ways)
        assert len(reported.words) == count, (loaded, other_ways)


def test_workers_of_a_host_on_one_of_its_gpus_are_told() -> None:
    def account(host: str, gpu: str | None, count: int = 4) -> dict[str, Any]:
        return {"host": host, "gpu": None if gpu is None else (gpu, count)}

    alike = on_one_gpu({0: account("a", "0"), 1: account("a", "0")})
    assert alike.startswith("all 2 workers of host a are on GPU 0, one of 4")
    for good in (
        {0: account("a", "0"), 1: account("a", "1")},
        {0: account("a", "0"), 1: account("b", "0")},
        {0: account("a", "0", 1), 1: account("a", "0", 1)},
        {0: account("a", None), 1: account("a", None)},
        {0: account("a", "0")},
    ):
        assert on_one_gpu(good) == "", good
