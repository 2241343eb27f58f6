"""Failures in words, and which of several is the first cause."""

from __future__ import annotations

from typing import Any

import pytest

from manyhosts.control.head.failures import Failure, first, rebuilt
from manyhosts.errors import ConfigError, ManyhostsError, RankLost, ScriptError


def failed(rank: int, summary: str = "", **changes: Any) -> Failure:
    error = {"summary": summary, "text": f"Traceback\n{summary}"} if summary else None
    return Failure(**{"rank": rank, "host": "n2", "error": error, **changes})


RESET = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
CONSEQUENCES = [
    RESET,
    "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms",
    "torch.distributed.DistBackendError: NCCL communicator was aborted",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
]


@pytest.mark.parametrize("summary", CONSEQUENCES)
def test_lost_connection_is_blamed_on_whoever_failed_otherwise(summary: str) -> None:
    consequence, cause = failed(0, summary), failed(3, "ValueError: boom")
    assert first([consequence, cause]) is cause


@pytest.mark.parametrize("summary", ["ValueError: boom", "KeyError: 'RANK'", "RuntimeError: shapes do not match"])
def test_error_of_the_script_is_no_consequence(summary: str) -> None:
    assert first([failed(0, summary), failed(1, "ValueError: later")]).rank == 0


def test_killed_worker_explains_a_lost_connection() -> None:
    assert first([failed(0, RESET), failed(1, signal=9)]).rank == 1


def test_earliest_is_told_where_nothing_explains_it() -> None:
    assert first([failed(2, RESET), failed(1, RESET)]).rank == 2


@pytest.mark.parametrize(
    ("failure", "others", "what"),
    [
        (failed(3, "ValueError: boom"), 0, "rank 3 on host n2 failed with ValueError: boom"),
        (failed(3, "ValueError: boom"), 1, "rank 3 on host n2 failed with ValueError: boom; 1 other worker was ended"),
        (failed(3, code=3), 2, "rank 3 on host n2 ended with exit code 3; 2 other workers were ended"),
        (failed(3, signal=11), 0, "rank 3 on host n2 was killed by SIGSEGV"),
        (failed(3, signal=40), 0, "rank 3 on host n2 was killed by signal 40"),
    ],
)
def test_failure_is_one_sentence_with_rank_and_host(failure: Failure, others: int, what: str) -> None:
    error = failure.reported(others)
    assert (type(error), error.what, error.exit_code) == (ScriptError, what, 1)


def test_kill_for_want_of_memory_is_told_as_such() -> None:
    assert "for want of memory just then" in failed(0, signal=9, out_of_memory=True).reported(0).fix
    memory = {"killed": True, "peak": 3_100_000_000, "limit": 4_000_000_000, "of_cgroup": True}
    error = failed(0, signal=9, out_of_memory=True, memory=memory).reported(1)
    assert error.what == (
        "rank 0 on host n2 was killed by the kernel for want of memory (it had 3.1 GB, and all of its cgroup may have"
        " 4.0 GB); 1 other worker was ended"
    )
    loader = failed(0, error={"summary": "RuntimeError: DataLoader worker is killed"}, memory=memory).reported(0)
    assert loader.what.endswith("is killed; the kernel has ended a process there for want of memory")
    assert "just then" not in failed(0, signal=9).reported(0).fix


@pytest.mark.parametrize("how", ["it ended the process", "it was raised"])
def test_gloo_that_is_sent_more_than_it_has_room_for_is_told_with_what_the_ranks_may_have_done(how: str) -> None:
    said = "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 144 vs 24."
    aborted, raised = failed(0, signal=6, last_words=said), failed(0, f"RuntimeError: {said}")
    fix = (aborted if how == "it ended the process" else raised).reported(1).fix
    assert "tensors of different shapes or kinds, or one made a call that another did not" in fix


def test_lost_host_is_a_failure_of_communication() -> None:
    error = failed(0, lost="its agent is gone").reported(1)
    assert (type(error), error.exit_code) == (RankLost, 4)
    assert error.what == "rank 0 on host n2 was lost: its agent is gone; 1 other worker was ended"


def words(kind: str, exit_code: int) -> dict[str, Any]:
    return {"what": "no such key", "where": "lr", "fix": "use lr=", "exit_code": exit_code, "type": kind}


def test_error_raised_on_purpose_comes_back_as_it_was() -> None:
    failure = Failure(rank=0, host="n2", error={"summary": "x", "text": "y", "words": words("ConfigError", 2)})
    error = failure.reported(3)
    assert (type(error), error.what, error.where, error.fix) == (ConfigError, "no such key", "lr", "use lr=")
    assert failure.traceback == "", "its words say it all"


def test_error_of_a_kind_that_the_head_does_not_know_keeps_its_exit_code() -> None:
    error = Failure(rank=0, host="n2", error={"words": words("PluginError", 5)}).reported(0)
    assert isinstance(error, ManyhostsError)
    assert (error.what, error.exit_code) == ("no such key", 5)


def test_error_about_what_a_host_reads_names_that_host_and_the_rank() -> None:
    error = Failure(rank=1, host="n2", error={"words": words("DataError", 2)}).reported(0)
    assert error.where == "lr, rank 1 on host n2"
    error = Failure(rank=1, host="n2", error={"words": {**words("DataError", 2), "where": "n2:/data/a"}}).reported(0)
    assert error.where == "n2:/data/a", "the host is named already"


@pytest.mark.parametrize(("said", "code"), [(0, 1), (256, 1), (-1, 1), ("3", 1), (7, 7)])
def test_worker_that_has_failed_does_not_say_that_all_is_well(said: object, code: int) -> None:
    words = {"type": "OfTheScript", "what": "x", "where": "", "fix": "", "exit_code": said}
    assert rebuilt(words).exit_code == code


@pytest.mark.parametrize(
    ("summary", "is_of_exchange"),
    [
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", True),
        ("torch.distributed.DistBackendError: NCCL error", True),
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
        ("ValueError: bad batch", False),
    ],
)
def test_words_of_pytorch_about_an_exchange_are_announced(summary: str, is_of_exchange: bool) -> None:
    shown = Failure(rank=1, host="n2", error={"summary": summary, "text": "Traceback …"}).traceback
    assert shown.endswith("Traceback …")
    announced = "manyhosts: an exchange between the workers failed; what PyTorch said of it in rank 1 on host n2:\n"
    assert shown.startswith(announced) is is_of_exchange


def test_file_that_is_not_there_is_told_with_where_it_is_looked_for() -> None:
    summary = "FileNotFoundError: [Errno 2] No such file or directory: 'data/digits.pt'"
    error = Failure(rank=1, host="n2", error={"summary": summary, "text": "Traceback …"}).reported(0)
    assert error.fix.endswith("is looked for in the folder where the run was started")
