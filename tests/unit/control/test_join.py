"""Joining: the secret that is typed, who must reach whom, and which place a host gets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhosts.cli.main import main
from manyhosts.control import joining
from manyhosts.control.handshake import ANY_NODE, Ask, Hello, Offer
from manyhosts.control.head.state import ExternalAgent, Folder, Joining, Node
from manyhosts.control.job import Job
from manyhosts.control.joining import FINGERPRINT_BYTES, JoinSecret
from manyhosts.errors import ConfigError
from manyhosts.hosts.ways import Place, Ways, is_needed, opens
from manyhosts.launchers.join import Join
from manyhosts.records import run_directory

SECRET = JoinSecret("0123456789abcdef" * 2, bytes(range(16)))


def test_secret_is_read_as_it_was_written_however_it_is_typed() -> None:
    text = str(SECRET)
    assert len(text.split("-")) == 7
    for typed in (text, text.upper(), text.replace("-", ""), f"  {text.replace('-', ' ')}\n", text.replace("o", "0")):
        assert JoinSecret.parse(typed, where="test") == SECRET
    assert "0123" not in repr(SECRET)


@given(st.integers(0, 55), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_one_wrong_letter_is_noticed(place: int, letter: str) -> None:
    letters = str(SECRET).replace("-", "")
    if letters[place] != letter:
        with pytest.raises(ConfigError, match="typed wrongly"):
            JoinSecret.parse(letters[:place] + letter + letters[place + 1 :], where="test")


@given(st.text(max_size=80))
def test_anything_else_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        JoinSecret.parse(text, where="test")


def place(address: str, **more: Any) -> Place:
    return Place(name=address, address=address, port=4000, **more)


def test_larger_address_opens_as_numbers_and_not_as_text() -> None:
    assert opens("192.168.1.2", "10.0.0.1")
    assert not opens("10.0.0.1", "192.168.1.2")
    assert opens("10.0.0.10", "10.0.0.9")
    assert opens("fd00::10", "fd00::9")
    assert is_needed(place("10.0.0.1"), place("192.168.1.2", keeps_store=True))
    assert is_needed(place("10.0.0.1", gpus=1), place("192.168.1.2", gpus=1)), "NCCL opens both ways"
    assert not is_needed(place("10.0.0.1", gpus=1), place("192.168.1.2"))


@pytest.mark.parametrize(("one_way", "expected"), [(True, []), (False, ["host 10.0.0.1 cannot open"])])
def test_way_that_nobody_takes_may_be_closed(one_way: bool, expected: list[str]) -> None:
    ways = Ways(one_way=one_way)
    ways.places = {0: place("10.0.0.1", keeps_store=True), 1: place("192.168.1.2")}
    ways.take(0, [0, 1], ["", "No route to host"])
    ways.take(1, [0, 1], ["", ""])
    assert [finding.what[: len("host 10.0.0.1 cannot open")] for finding in ways.findings()] == expected


def test_pair_without_a_way_is_named_with_both_hosts_and_the_port() -> None:
    ways = Ways(one_way=True)
    ways.places = {1: place("192.168.1.2"), 2: place("192.168.7.2")}
    for one, other in ((1, 2), (2, 1)):
        ways.take(one, [other], ["timed out"])
    [finding] = ways.findings()
    assert (
        finding.what
        == "host 192.168.7.2 cannot open a connection to host 192.168.1.2 at 192.168.1.2 port 4000: timed out"
    )
    assert finding.where == "between 192.168.7.2 and 192.168.1.2"
    ways.take(2, [1], [""])
    assert ways.findings() == [], "the way is open now"


class Session:
    channel: Any = "connected"


def hello(session: str, machine: str = "", host: str = "box", **more: Any) -> Hello:
    reported = {"session": session, "machine": machine, "host": host, "folder": "/home/b", "mark": session, **more}
    return Hello(
        **{"node": ANY_NODE, "address": "10.0.0.2", "heard": 0, "process": 1, "cores": 1, "gpus": 0, **reported}
    )


OFFER = Offer(run="r", script="s", host="box", folder="/p", run_dir="runs/x", files={}, versions={})


def asking(machine: str) -> Ask:
    return Ask(proof="", machine=machine)


class Scene:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.joining = Joining(identity=None, offer=OFFER, mark="head", say=self.said.append)  # type: ignore[arg-type]
        self.nodes = [Node(number, f"node{number}", ExternalAgent()) for number in range(3)]
        self.nodes[0].channel, self.nodes[0].name = Session(), "box"  # type: ignore[assignment]

    def come(self, reported: Hello) -> Node | None:
        node: Node | None = self.joining.place_for(reported, self.nodes)
        if node is not None and node.channel is None:
            node.facts, node.session, node.channel = reported, reported.session, Session()  # type: ignore[assignment]
            self.joining.take_in(node, self.nodes)
        return node


def test_hosts_take_free_places_and_get_names_of_their_own() -> None:
    scene = Scene()
    one, two = scene.come(hello("one", "m1")), scene.come(hello("two", "m2", host="we ird.lan"))
    assert one is scene.nodes[1]
    assert two is scene.nodes[2]
    assert [node.name for node in scene.nodes] == ["box", "box-2", "we_ird"]
    assert scene.come(hello("one", "m1", heard=7)) is one, "it calls again"
    assert scene.come(hello("three", "m3")) is None
    assert "has all of its 3 hosts" in scene.joining.answer(asking("m3"), scene.nodes).refused
    assert "is a host of the run already, as box-2" in scene.joining.answer(asking("m1"), scene.nodes).refused
    assert scene.come(hello("x", mark="")) is None, "it lacks what a host that joins says"


def test_host_sees_by_a_mark_whose_disk_it_has() -> None:
    scene = Scene()
    one = scene.come(hello("one", "m1", marks=["head"]))
    two = scene.come(hello("two", "m2", marks=["strange"]))
    assert one is not None
    assert two is not None
    assert (one.place.disk, two.place.disk) == (0, 1)


def test_paths_of_the_project_are_those_of_the_host() -> None:
    job = Job(program="/home/a/p/train.py", folder=Path("/home/a/p"), run_dir=Path("/home/a/p/runs/x"))
    there = Folder(path=Path("/srv/q"), disk=3).job(job)
    assert (there.program, there.folder, there.run_dir) == ("/srv/q/train.py", Path("/srv/q"), Path("/srv/q/runs/x"))
    assert there.environment[run_directory.DISK] == "3"
    outside = Job(program="train.py", folder=Path("/home/a/p"), run_dir=Path("/scratch/x"))
    assert Folder(path=Path("/srv/q"), disk=0).job(outside).run_dir == Path("/srv/q/runs/x")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"nodes": 1}, "no host is to join"),
        ({"hosts": ("a", "b")}, "hosts join by themselves"),
        ({"options": {"port": "70000"}}, "port is 70000"),
        ({"options": {"prot": "1"}}, "join has no option 'prot'"),
        ({"options": {"wait": "soon"}}, "soon"),
    ],
)
def test_plan_refuses_what_makes_no_sense(more: dict[str, Any], words: str) -> None:
    asked = {"nodes": 2, **more}
    with pytest.raises(ConfigError, match=words):
        Join().plan(Job(program="train.py", folder=Path("/p"), run_dir=Path("/p/runs/x"), **asked))


def test_plan_shows_what_is_typed_on_the_hosts() -> None:
    options = {"bind": "10.0.0.1", "port": "4000"}
    job = Job(program="train.py", folder=Path("/p"), run_dir=Path("/p/runs/x"), nodes=3, options=options)
    plan = Join().plan(job)
    assert plan.agents[1:] == (("manyhosts", "join", "10.0.0.1:4000"),) * 2
    assert len(plan.workers) == 3


def test_detached_run_has_its_secret_in_a_file_and_not_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["run", "--on", "join", "--nodes", "2", "--detach", "train.py"]) == 2
    assert "secret-file=FILE" in capsys.readouterr().err


def test_pipe_or_a_place_outside_where_the_head_names_a_file_is_missing_and_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    for path in ("pipe.py", "/dev/zero", "../outside.py"):
        offer = Offer(run="r", script="s", host="h", folder="/w", run_dir="runs/r", files={path: "0"}, versions={})
        with pytest.raises(ConfigError, match="is missing"):
            joining._see_files(offer, tmp_path)


@pytest.mark.parametrize("head", ["a..b:1", "a\u202eb:1", "a:99999"])
def test_head_that_has_no_such_name_is_refused_before_it_is_looked_for(head: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        joining.join(joining.Wish(head=head, secret=JoinSecret("0" * 32, bytes(FINGERPRINT_BYTES)), folder=tmp_path))
    assert caught.value.where == "ADDRESS"


@pytest.mark.timeout(30)
def test_secret_is_not_read_from_what_never_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "a:1", "--secret-file", "/dev/zero"]) == 2
    assert "this is not the secret of a run" in capsys.readouterr().err
