"""What runs on the hosts: ways that are tried out, likeness of data, GPUs, and all of it as one program."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from manyhosts.control import tls
from manyhosts.control.agent import host_state
from manyhosts.doctor import access, channel, checksum, graphics, probe_server, wires


def test_way_is_measured_there_and_back() -> None:
    listener = wires.Listener("127.0.0.1", "secret")
    found = wires.try_out("127.0.0.1", listener.port, "secret", 0.05)
    listener.close()
    assert found["latency_s"] > 0
    assert found["bandwidth"] > 1e6
    assert found["mtu"] > 1000
    assert found["lost"] == 0.0 if sys.platform == "linux" else found["lost"] is None


def test_whoever_does_not_know_the_secret_is_not_served() -> None:
    listener = wires.Listener("127.0.0.1", "secret")
    found = wires.try_out("127.0.0.1", listener.port, "guess", 0.05)
    listener.close()
    assert found["trouble"]
    assert found["stage"] == "talk", "it came as far as the proof, and no further"


def is_hung_up_on_in_spite_of_a_byte_now_and_then(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    with contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(b"0")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(100):
                    break
    return True


def test_strangers_however_many_and_slow_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "_STRANGER_LIMIT_S", 0.5)
    monkeypatch.setattr(probe_server, "_ADMISSION_S", 0.5)
    listener, desk_ = wires.Listener("127.0.0.1", "secret"), probe_server.ProbeServer("127.0.0.1", 0, "secret")
    host, _, port = desk_.place.rpartition(":")
    with contextlib.ExitStack() as stack:
        for place in (("127.0.0.1", listener.port), (host, int(port))):
            for _ in range(150):
                stack.enter_context(socket.create_connection(place, timeout=20))
            assert is_hung_up_on_in_spite_of_a_byte_now_and_then(stack.enter_context(socket.create_connection(place)))
        assert wires.try_out("127.0.0.1", listener.port, "secret", 0.05)["latency_s"] > 0
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            channel.call(connection, "secret", 20).write("[" * 100_000 + "\n")
            assert desk_.greet(1, lambda hellos: ["h"] * len(hellos), patience_s=20) == [], "a hello is JSON"
    listener.close()
    desk_.close()


def test_secret_itself_is_never_sent() -> None:
    heard: list[bytes] = []

    def listen(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"a challenge of 16"[:16])
            heard.append(connection.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = threading.Thread(target=listen, args=(server,))
        listening.start()
        wires.try_out("127.0.0.1", server.getsockname()[1], "secret", 0.05)
        listening.join()
    assert len(heard[0]) > 16
    assert b"secret" not in heard[0]


def test_fake_listener_is_found_out() -> None:
    """One that plays back what the caller has said, as it knows nothing else."""

    def play_back(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"a challenge of 16"[:16])
            said = wires.receive(connection, 16 + 32)
            connection.sendall(said[16:])
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = threading.Thread(target=play_back, args=(server,))
        listening.start()
        found = wires.try_out("127.0.0.1", server.getsockname()[1], "secret", 0.05)
        listening.join()
    assert "does not know the secret" in found["trouble"]


def test_measurement_that_is_changed_on_the_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = wires._proof

    def of_another_answer(token: str, side: bytes, said: bytes) -> bytes:
        return right(
            token,
            side,
            said.replace(b"bandwidth", b"bandwidtH", 1)
            if threading.main_thread() is threading.current_thread()
            else said,
        )

    listener = wires.Listener("127.0.0.1", "secret")
    monkeypatch.setattr(wires, "_proof", of_another_answer)  # in the caller alone: as if other bytes had come
    found = wires.try_out("127.0.0.1", listener.port, "secret", 0.05)
    listener.close()
    assert found == {"trouble": "what was measured was changed on the way", "stage": "send"}


def test_fake_doctor_is_told_nothing_and_a_recorded_conversation_shows_nothing() -> None:
    """A third one in between carries all bytes: it sees neither token nor questions, and with its own key no proof."""
    desk_ = probe_server.ProbeServer("127.0.0.1", 0, "the-secret-itself")
    host, _, port = desk_.place.rpartition(":")
    seen = bytearray()

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while came := source.recv(4096):
                seen.extend(came)
                target.sendall(came)

    with (
        socket.create_server(("127.0.0.1", 0)) as between,
        socket.create_connection(between.getsockname()) as station_,
        between.accept()[0] as inner,
        socket.create_connection((host, int(port))) as outer,
    ):
        for pair in ((inner, outer), (outer, inner)):
            threading.Thread(target=carry, args=pair, daemon=True).start()
        spoken = channel.call(station_, "the-secret-itself", 20)
        spoken.write(json.dumps({"group_rank": "0", "name": "known-to-us-alone"}) + "\n")
        [reached] = desk_.greet(1, lambda hellos: [str(hello["name"]) for hello in hellos], patience_s=20)
        assert reached.name == "known-to-us-alone"
        assert b"secret" not in seen
        assert b"known-to-us" not in seen
    with socket.create_server(("127.0.0.1", 0)) as fake:
        identity = tls.Identity()

        def pretend() -> None:
            connection, _ = fake.accept()
            with connection, contextlib.suppress(OSError):
                channel.answer(connection, identity, "a guess", 20)

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with socket.create_connection(fake.getsockname()) as connection, pytest.raises(OSError, match="does not know"):
            channel.call(connection, "the-secret-itself", 20)
        pretending.join()
    desk_.close()


def test_listener_is_on_one_address_only_and_gone_when_it_is_closed() -> None:
    listener = wires.Listener("127.0.0.1", "secret")
    tables = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{listener.port:04X} 00000000:0000 0A" in tables
    assert f"00000000:{listener.port:04X}" not in tables
    listener.close()
    assert wires.try_out("127.0.0.1", listener.port, "secret", 0.05)["stage"] == "connect"


def test_equal_folders_are_alike_and_one_other_bit_is_seen(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "file").write_bytes(b"\0" * 1000)
    (tmp_path / "three" / "sub" / "file").write_bytes(b"\0" * 999 + b"\1")
    one, two, three = (checksum.of_path(str(tmp_path / name)) for name in ("one", "two", "three"))
    assert one == two
    assert (one["files"], one["bytes"], one["sampled"]) == (1, 1000, False)
    assert three["sha256"] != one["sha256"]


def test_name_of_a_file_counts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"file-{name}").write_bytes(b"same")
    found = [checksum.of_path(str(tmp_path / name)) for name in ("a", "b")]
    assert found[0]["sha256"] != found[1]["sha256"]


def test_large_file_is_sampled_from_its_beginning_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "MOST_BYTES", 8 << 20)
    path = tmp_path / "large"
    path.write_bytes(bytes(20 << 20))
    before = checksum.of_path(str(path))
    assert before["sampled"]
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    assert checksum.of_path(str(path))["sha256"] != before["sha256"]


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert checksum.of_path(str(tmp_path / "nothing")) is None


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> dict[str, Any]:
    """What is made of a driver that says `text`."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return graphics.probe()


def test_gpus_are_read_from_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVIDIA H200, 550.54, 143771, 12, 33, 5, 0, Not Active\nNVIDIA H200, 550.54, 143771, 0, 91, 0, [N/A], Active"
    found = nvidia_smi(tmp_path, monkeypatch, text)
    assert found["trouble"] == ""
    one, two = found["gpus"]
    assert (one["name"], one["driver"], one["memory"], one["errors"]) == ("NVIDIA H200", "550.54", 143771 << 20, 0)
    assert (two["temperature"], two["errors"], two["slowed"]) == (91, None, True)


def test_driver_that_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = nvidia_smi(tmp_path, monkeypatch, "Failed to initialize NVML: Driver/library version mismatch", 18)
    assert found == {
        "gpus": [],
        "trouble": "nvidia-smi says: Failed to initialize NVML: Driver/library version mismatch",
    }


def test_no_gpu_is_no_trouble(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert graphics.probe() == {"gpus": [], "trouble": ""}


def test_address_of_a_proxy_is_told_to_nobody() -> None:
    reported = host_state.variables(
        {"HTTP_PROXY": "http://user:secret@proxy", "no_proxy": "a", "OTHER": "x", "RANK": "0"}
    )
    assert reported == {"HTTP_PROXY": "set", "no_proxy": "a", "RANK": "0"}


def test_condition_of_a_folder_that_is_yet_to_be_made_is_that_of_the_disk_it_comes_to(tmp_path: Path) -> None:
    found = host_state.disk(str(tmp_path / "not" / "yet"))
    assert found["free"] > 0
    assert found["writable"]
    assert not (tmp_path / "not").exists()


def test_what_hosts_are_sent_is_read_by_python_3_8() -> None:
    for module in access._SENT:
        source = Path(str(module.__file__)).read_text()
        tree = ast.parse(source, str(module.__file__), feature_version=(3, 8))
        later = {keyword.arg for keyword in ast.walk(tree) if isinstance(keyword, ast.keyword)}
        assert not later & {"slots", "kw_only", "strict"}, module.__name__


def test_station_runs_as_one_program_with_the_standard_library_alone(tmp_path: Path) -> None:
    program = access.program()
    questions = [
        {"ask": "look", "run_dir": str(tmp_path / "runs"), "script": ""},
        {"ask": "leave file", "folder": str(tmp_path / "runs"), "name": "left", "text": "here"},
        {"ask": "see file", "folder": str(tmp_path / "runs"), "name": "left"},
        {"ask": "nonsense"},
        {"ask": "loop", "seconds": 0.01},
    ]
    text = "".join(json.dumps(question) + "\n" for question in questions)
    words = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))",
    ]
    done = subprocess.run(
        words,
        input=f"{len(program)}\n".encode() + program + text.encode(),
        capture_output=True,
        timeout=120,
        check=True,
    )
    said = [json.loads(line.removeprefix(b"manyhosts-probe ")) for line in done.stdout.splitlines()]
    hello, look, left, seen, nonsense, loop = said
    assert (hello["manyhosts"], hello["torch"]) == ("", "")
    assert look["answer"]["condition"]["cores"] >= 1
    assert (left["answer"], seen["answer"]) == ("", "here")
    assert nonsense["trouble"] == "'nonsense' is not known here"
    assert loop["answer"]["cpu"] > 0
    assert not (tmp_path / "runs").exists(), "what it made is gone"
