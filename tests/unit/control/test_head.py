"""The head among agents that behave as they should, or do not: who is let in, who is which rank, what is told."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from manyhosts.control.agent import host_state
from manyhosts.control.head.run import Head
from manyhosts.control.job import Job
from manyhosts.errors import LaunchError, ManyhostsError, RankLost, ScriptError

Message = dict[str, Any]
FACTS = {"session": "s", "heard": 0, "host": "h", "address": "127.0.0.1", "process": 1, "cores": 1, "gpus": 0}
OK = {"code": 0, "signal": 0, "finished": True, "error": None, "out_of_memory": False}
FAILED = {**OK, "code": 1, "finished": False, "error": {"summary": "ValueError: boom", "text": "Traceback\nboom"}}
KILLED = {**OK, "signal": 9, "finished": False}


class HeardDisplay:
    """Remembers what was shown."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, bool]] = []
        self.said: list[str] = []
        self.newest: Mapping[str, Any] = {}

    def line(self, text: str, prefix: str, is_error: bool) -> None:
        self.lines.append((prefix, text, is_error))

    def progress(self, fields: Mapping[str, Any]) -> None:
        self.newest = fields

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        pass


class FakeAgent:
    """Stands for an agent's process, and speaks as one from a thread of its own.

    `play(agent, message)` is called for each message of the head, after the usual answers.
    """

    def __init__(self, node: int, connection: socket.socket, play: Callable[[FakeAgent, Message], None]) -> None:
        self.node, self.socket, self.play = node, connection, play
        self.heard: list[Message] = []
        self.generation = 0
        self.workers: list[dict[str, Any]] = []
        self.over = threading.Event()
        threading.Thread(target=self.live_until_the_head_is_gone, daemon=True).start()

    def begin(self) -> None:
        """What it does before its first word."""

    def send(self, kind: str, /, **fields: Any) -> None:
        if "rank" in fields:
            fields["member"] = next(each["member"] for each in self.workers if each["rank"] == fields["rank"])
        self.socket.sendall(json.dumps({"message": kind, **fields}).encode() + b"\n")

    def live_until_the_head_is_gone(self) -> None:
        with contextlib.suppress(OSError), self.socket:
            self.live()
        self.over.set()

    def live(self) -> None:
        self.begin()
        with self.socket, self.socket.makefile() as lines:
            self.send("hello", node=self.node, **FACTS)
            for line in lines:
                message = json.loads(line)
                self.heard.append(message)
                if message.get("tell_condition"):
                    self.send("condition", reported=host_state.gather("/tmp", {}), port=0)
                if message["message"] == "try_connections":
                    self.send("connections_tried", answers=[])
                if message["message"] == "open_store":
                    self.generation = message["generation"]
                    self.send("store", generation=self.generation, port=4711, shared=True, listens=message["listens"])
                if message["message"] == "start":
                    self.workers = message["workers"]
                if message["message"] == "leave":
                    break
                self.play(self, message)
                if self.over.is_set():
                    break

    def end(self, rank: int, **how: Any) -> None:
        self.send("ended", rank=rank, generation=self.generation, **how)

    # What the head may ask of a process.

    def poll(self) -> int | None:
        return 0 if self.over.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self.over.wait(timeout if timeout is not None else 20):
            raise subprocess.TimeoutExpired("agent", timeout or 20)
        return 0

    def kill(self) -> None:
        self.over.set()

    terminate = kill


def job(tmp_path: Path, **changes: Any) -> Job:
    return Job(**{"program": "train.py", "folder": tmp_path, "run_dir": tmp_path / "run", **changes})


def all_end_well(agent: FakeAgent, message: Message) -> None:
    if message["message"] == "start":
        for worker in message["workers"]:
            agent.end(worker["rank"], **OK)


class Scene:
    """A head and its agents."""

    def __init__(
        self, asked: Job, play: Callable[[FakeAgent, Message], None] = all_end_well, agent: type[FakeAgent] = FakeAgent
    ) -> None:
        self.agents: list[FakeAgent] = []
        self.display = HeardDisplay()
        hosts = [f"n{node}" for node in range(asked.nodes)]

        def start(node: int, connection: socket.socket) -> Any:
            self.agents.append(agent(node, connection.dup(), play))
            return self.agents[-1]

        self.head = Head(asked, hosts, None, self.display, start_here=start)


def test_ranks_follow_the_order_in_which_hosts_were_named_not_that_in_which_they_came(tmp_path: Path) -> None:
    first_may_come = threading.Event()

    class LateFirst(FakeAgent):
        def begin(self) -> None:
            if self.node == 0:
                first_may_come.wait(20)

        def send(self, kind: str, /, **fields: Any) -> None:
            super().send(kind, **fields)
            if self.node == 1:
                first_may_come.set()

    scene = Scene(job(tmp_path, nodes=2, workers_per_node=2), agent=LateFirst)
    assert scene.head.run() == 0
    ranks = {agent.node: [worker["environment"]["RANK"] for worker in agent.workers] for agent in scene.agents}
    assert ranks == {0: ["0", "1"], 1: ["2", "3"]}


def test_store_is_opened_once_by_the_first_host_and_told_to_all(tmp_path: Path) -> None:
    scene = Scene(job(tmp_path, nodes=3))
    assert scene.head.run() == 0
    opened = [agent.node for agent in scene.agents for message in agent.heard if message["message"] == "open_store"]
    assert opened == [0]
    assert {worker["environment"]["MASTER_PORT"] for agent in scene.agents for worker in agent.workers} == {"4711"}


WRONG = (None, True, -1, 0.5, "x", "\ud800", 10**400, [], [[]], {}, {"x": None})
UNREAD = [
    {"message": "what"},
    {"message": ["ended"]},
    {"rank": 0},
    {"message": "ended", "rank": 0, "generation": 0, "member": 0, **OK},
    {"message": "output", "rank": 0, "generation": 0, "member": 0, "stream": "out", "lines": ["a"]},
    {"message": "report", "rank": 0, "generation": 0, "member": 0, "kind": "step", "fields": {"step": 1}},
    {"message": "report", "rank": 0, "generation": 0, "member": 0, "kind": "directory", "fields": {"path": "/p"}},
    {"message": "report", "rank": 0, "generation": 0, "member": 0, "kind": "script_probe", "fields": {"workers": 1}},
    {"message": "report", "rank": 0, "generation": 0, "member": 0, "kind": "fault", "fields": {"fault": "file"}},
    {"message": "member", "member": 0, "kind": "begin", "fields": {"most": 0}},
    {"message": "member", "member": 0, "kind": "regroup", "fields": {"call": 1, "group": 0, "step": 1}},
    {"message": "member", "member": 0, "kind": "accuse", "fields": {"group": 0, "rank": 0, "what": "w"}},
    {"message": "store", "generation": 0, "port": 1, "shared": True, "listens": True},
    {"message": "ask_store", "line": 0, "id": 1, "do": "get", "fields": {"group": [0, 0], "names": ["a"]}},
    {"message": "condition", "reported": {"time_s": 0}, "port": 0},
    {"message": "connections_tried", "answers": []},
    {"message": "seen", "round": 0, "workers": []},
    {"message": "trouble", "text": "t", "where": "w", "early": True},
    {"message": "asked", "signal": 15},
]


def test_agent_that_sends_nonsense_is_told_of_in_a_sentence_that_names_its_host(tmp_path: Path) -> None:
    """Each field of each message is wrong once, by chance (the same each time): never a traceback, never a wait."""
    chance = random.Random(12)
    named = 0
    for number, message in enumerate(UNREAD * 2):
        nonsense = json.loads(json.dumps(message))
        place = nonsense["fields"] if nonsense.get("fields") and chance.random() < 0.7 else nonsense
        place[chance.choice(list(place))] = chance.choice(WRONG)

        def play(agent: FakeAgent, heard: Message, nonsense: Message = nonsense) -> None:
            if heard["message"] == "start":
                agent.socket.sendall(json.dumps(nonsense).encode() + b"\n")
                agent.end(0, **OK)

        try:
            Scene(job(tmp_path, run_dir=tmp_path / f"run-{number}"), play).head.run()
        except ManyhostsError as error:
            named += "n0" in str(error)
    assert named > len(UNREAD), "most of these cannot be followed"


def test_agent_that_ends_without_a_word_is_told_with_its_host(tmp_path: Path) -> None:
    class Dead(FakeAgent):
        def live(self) -> None:
            if self.node == 0:
                super().live()

    with pytest.raises(LaunchError) as caught:
        Scene(job(tmp_path, nodes=2), agent=Dead).head.run()
    assert (caught.value.what, caught.value.where) == ("the agent ended before it said a word", "host n1")


def test_host_that_is_lost_is_told_and_the_others_are_ended(tmp_path: Path) -> None:
    def lose_the_second(agent: FakeAgent, message: Message) -> None:
        if message["message"] == "start" and agent.node == 1:
            agent.over.set()
        if message["message"] == "end":
            agent.end(0, **KILLED)

    scene = Scene(job(tmp_path, nodes=2), lose_the_second)
    with pytest.raises(RankLost) as caught:
        scene.head.run()
    assert (
        caught.value.what
        == "rank 1 on host n1 was lost: its agent is gone: it ended with exit code 0; 1 other worker was ended"
    )


def test_failure_is_told_once_with_how_many_were_ended_for_it(tmp_path: Path) -> None:
    def fail(agent: FakeAgent, message: Message) -> None:
        if message["message"] == "start":
            agent.end(2, **FAILED)
        if message["message"] == "end":
            for rank in (0, 1):
                agent.end(rank, **KILLED)

    scene = Scene(job(tmp_path, workers_per_node=3), fail)
    with pytest.raises(ScriptError) as caught:
        scene.head.run()
    assert caught.value.what == "rank 2 on host n0 failed with ValueError: boom; 2 other workers were ended"
    assert scene.display.lines == [("", "Traceback", True), ("", "boom", True)]


def test_workers_that_had_ended_well_are_not_among_those_that_were_ended(tmp_path: Path) -> None:
    def fail(agent: FakeAgent, message: Message) -> None:
        if message["message"] == "start":
            agent.end(0, **OK)
            agent.end(1, **FAILED)

    with pytest.raises(ScriptError) as caught:
        Scene(job(tmp_path, workers_per_node=2), fail).head.run()
    assert caught.value.what == "rank 1 on host n0 failed with ValueError: boom"


def test_restart_begins_only_when_every_worker_has_ended(tmp_path: Path) -> None:
    order: list[str] = []

    def fail_once(agent: FakeAgent, message: Message) -> None:
        order.append(message["message"])
        if message["message"] == "start" and agent.generation == 0:
            agent.end(0, **FAILED)
        elif message["message"] == "start":
            all_end_well(agent, message)
        elif message["message"] == "end":
            agent.end(1, **KILLED)

    scene = Scene(job(tmp_path, workers_per_node=2, restarts=1), fail_once)
    assert scene.head.run() == 0
    assert order == ["prepare", "open_store", "start", "end", "close_store", "open_store", "start"]
    assert [worker["environment"]["TORCHELASTIC_RESTART_COUNT"] for worker in scene.agents[0].workers] == ["1", "1"]


@pytest.mark.parametrize(
    ("summaries", "steps", "starts"),
    [
        (["ValueError: boom"] * 9, [7] * 9, 2),
        (["ValueError: boom"] * 9, [7, 9, 9, 9, 9], 3),
        (["ValueError: 1", "ValueError: 2", "ValueError: 1", "ValueError: 2", "ValueError: 1"], [7] * 5, 5),
        (["ConnectionResetError: [Errno 104] reset by peer"] * 5, [7] * 5, 5),
        (["torch.OutOfMemoryError: CUDA out of memory"] * 5, [7] * 5, 5),
    ],
    ids=["same", "further", "others", "network", "memory"],
)
def test_error_that_comes_twice_at_one_step_is_the_end(
    summaries: list[str], steps: list[int], starts: int, tmp_path: Path
) -> None:
    started: list[int] = []

    def fail(agent: FakeAgent, message: Message) -> None:
        if message["message"] == "start":
            number = len(started)
            started.append(number)
            agent.end(0, **(FAILED | {"error": {"summary": summaries[number], "text": "", "step": steps[number]}}))

    with pytest.raises(ScriptError):
        Scene(job(tmp_path, restarts=4), fail).head.run()
    assert len(started) == starts


def test_news_of_workers_that_were_given_up_is_not_heard(tmp_path: Path) -> None:
    def speak_of_the_past(agent: FakeAgent, message: Message) -> None:
        if message["message"] == "start" and agent.generation == 0:
            agent.end(0, **FAILED)
        elif message["message"] == "start":
            agent.send("output", rank=0, generation=0, stream="out", lines=["from the past"])
            agent.send("ended", rank=0, generation=0, **FAILED)
            all_end_well(agent, message)

    scene = Scene(job(tmp_path, restarts=1), speak_of_the_past)
    assert scene.head.run() == 0
    assert "from the past" not in [text for _, text, _ in scene.display.lines]


def test_lines_carry_host_and_rank_and_native_frames_are_left_out(tmp_path: Path) -> None:
    def talk(agent: FakeAgent, message: Message) -> None:
        if message["message"] == "start":
            rank = message["workers"][0]["rank"]
            lines = ["hello", "frame #0: c10::Error + 0x1 (0x2 in c.so)"]
            agent.send("output", rank=rank, generation=0, stream="err", lines=lines)
            all_end_well(agent, message)

    scene = Scene(job(tmp_path, nodes=2), talk)
    assert scene.head.run() == 0
    assert sorted(scene.display.lines) == [("[n0 0] ", "hello", True), ("[n1 1] ", "hello", True)]


def test_progress_of_the_leader_is_shown_and_that_of_others_is_not(tmp_path: Path) -> None:
    def talk(agent: FakeAgent, message: Message) -> None:
        if message["message"] == "start":
            agent.send("report", rank=0, generation=0, kind="progress", fields={"step": 7})
            agent.send("report", rank=1, generation=0, kind="progress", fields={"step": 8})
            agent.send("report", rank=1, generation=0, kind="say", fields={"text": "hello"})
            all_end_well(agent, message)

    scene = Scene(job(tmp_path, workers_per_node=2), talk)
    assert scene.head.run() == 0
    assert (scene.display.newest, scene.display.said) == ({"step": 7}, ["hello"])


@pytest.mark.parametrize(("heard", "said"), [(True, 0), (False, 1)])
def test_set_without_a_trainer_is_noticed(tmp_path: Path, heard: bool, said: int) -> None:
    def talk(agent: FakeAgent, message: Message) -> None:
        if message["message"] == "start":
            if heard:
                agent.send("report", rank=0, generation=0, kind="trainer", fields={})
            all_end_well(agent, message)

    scene = Scene(job(tmp_path, overrides={"lr": "1"}, for_trainer=("--profile",)), talk)
    assert scene.head.run() == 0
    for option in ("--set", "--profile"):
        assert len([text for text in scene.display.said if f"{option} had no effect" in text]) == said


def test_elastic_run_waits_for_a_host_that_is_coming_and_for_none_that_has_failed(tmp_path: Path) -> None:
    """It begins on that one, at its address, though it is not the first that was named."""
    begun = threading.Event()

    class FirstFails(FakeAgent):
        def live(self) -> None:
            if self.node == 0:
                begun.set()
            elif begun.wait(20):
                threading.Event().wait(0.5)  # the head looks several times meanwhile
                super().live()

        def send(self, kind: str, /, **fields: Any) -> None:
            super().send(kind, **{**fields, **({"address": "10.0.0.1"} if kind == "hello" else {})})

    scene = Scene(job(tmp_path, nodes=2, least_nodes=1), agent=FirstFails)
    assert scene.head.run() == 0
    [worker] = scene.agents[1].workers
    assert (worker["environment"]["WORLD_SIZE"], worker["environment"]["MASTER_ADDR"]) == ("1", "10.0.0.1")


def test_comer_that_can_start_no_worker_stays_outside_and_is_told_of_once(tmp_path: Path) -> None:
    """The others train on, and it is called again."""
    calls: list[FakeAgent] = []

    class SecondIsUnfit(FakeAgent):
        def live(self) -> None:
            if self.node == 1:
                calls.append(self)
            if len(calls) != 1 or self.node == 0:
                super().live()

    def play(agent: FakeAgent, message: Message) -> None:
        if agent.node == 1 and message["message"] == "prepare":
            agent.send("trouble", text="no folder", where="/here", early=True)
        if agent.node == 1 and len(calls) == 3:
            scene.agents[0].end(0, **OK)

    scene = Scene(job(tmp_path, nodes=2, least_nodes=1), play, agent=SecondIsUnfit)
    assert scene.head.run() == 0
    said = "\n".join(scene.display.said)
    assert said.count("no folder") == 1, said
    assert "the run continues without host n1" in said


def test_host_that_can_start_no_worker_at_the_start_ends_the_run(tmp_path: Path) -> None:
    def play(agent: FakeAgent, message: Message) -> None:
        if agent.node == 1 and message["message"] == "prepare":
            agent.send("trouble", text="no folder", where="/here", early=True)

    with pytest.raises(LaunchError, match="no folder"):
        Scene(job(tmp_path, nodes=2, least_nodes=1), play).head.run()


@pytest.mark.parametrize(("gpus", "chosen", "reported"), [(1, "29500-29600", 1), (0, "29500-29600", 0), (1, "", 0)])
def test_ports_that_nccl_takes_elsewhere_are_told_at_the_start(
    gpus: int, chosen: str, reported: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FACTS, "gpus", gpus)
    scene = Scene(job(tmp_path, nodes=2, ports=chosen))
    assert scene.head.run() == 0
    assert sum("NCCL takes ports that the system chooses" in text for text in scene.display.said) == reported
