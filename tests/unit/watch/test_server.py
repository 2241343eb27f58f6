"""Who is served the live page, and who is not."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from manyhosts.errors import ConfigError
from manyhosts.watch.server import Content, Server


class Counted:
    """What is served, and how often it was made."""

    def __init__(self) -> None:
        self.made = 0

    def page(self) -> str:
        return "<p>page</p>"

    def state(self) -> dict[str, object]:
        self.made += 1
        return {"title": "t", "parts": {}}


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def server(counted: Counted) -> Iterator[Server]:
    with Server(Content(counted.page, counted.state)) as found:
        yield found


def asked(server: Server, path: str, **headers: str) -> tuple[http.client.HTTPResponse, str]:
    place = urlsplit(server.address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_who_knows_the_token_gets_page_and_state(server: Server) -> None:
    path = urlsplit(server.address).path
    answer, text = asked(server, path)
    assert (answer.status, text) == (200, "<p>page</p>")
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    answer, text = asked(server, path + "state")
    assert (answer.status, json.loads(text)) == (200, {"title": "t", "parts": {}})
    assert asked(server, path + "else")[0].status == 404


@pytest.mark.parametrize(
    "path", ["/", "/state", "//state", "/wrong/", "/wrong/state", "/%C3%A9/", "/../etc/passwd", "/?token"]
)
def test_who_does_not_know_it_gets_nothing(path: str, server: Server, counted: Counted) -> None:
    answer, text = asked(server, path)
    assert answer.status == 403
    assert server.token not in text
    assert counted.made == 0


def test_a_part_of_the_token_is_not_enough(server: Server) -> None:
    for given in (server.token[:-1], server.token + "x", server.token.swapcase(), ""):
        assert asked(server, f"/{given}/state")[0].status == 403


@pytest.mark.parametrize("name", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_page_elsewhere_whose_name_leads_here_is_refused(name: str, server: Server) -> None:
    assert asked(server, f"/{server.token}/state", Host=name)[0].status == 403
    assert asked(server, f"/{server.token}/state", Host="localhost:9000")[0].status == 200  # through a tunnel of ssh


def test_nothing_but_get_is_answered(server: Server) -> None:
    place = urlsplit(server.address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=20)
    connection.request("POST", place.path, body="x")
    assert connection.getresponse().status == 501
    connection.close()


def test_only_this_machine_is_listened_to(server: Server) -> None:
    place = urlsplit(server.address)
    assert place.hostname == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with socket.socket() as wire:
            wire.settimeout(5)
            assert wire.connect_ex((address, place.port)) != 0 or address.startswith("127.")


def test_many_who_ask_at_once_share_an_answer(server: Server, counted: Counted) -> None:
    for _ in range(5):
        asked(server, f"/{server.token}/state")
    assert counted.made < 5


def test_client_that_says_nothing_holds_nobody_up(server: Server) -> None:
    place = urlsplit(server.address)
    with socket.create_connection((str(place.hostname), place.port)):
        assert asked(server, place.path)[0].status == 200


def test_port_that_is_taken_is_refused(server: Server) -> None:
    port = urlsplit(server.address).port
    assert port is not None
    with pytest.raises(ConfigError, match=f"cannot serve a page at port {port}"):
        Server(Content(str, dict), port)


def test_page_that_is_closed_while_it_is_answered_is_not_told(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    place = urlsplit(server.address)
    before = threading.active_count()
    for words in (b"GET /", f"GET {place.path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()):
        for _ in range(5):
            with socket.create_connection((str(place.hostname), place.port or 0)) as connection:
                connection.sendall(words)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    while threading.active_count() > before:
        time.sleep(0.01)
    assert asked(server, place.path)[0].status == 200
    assert capfd.readouterr() == ("", "")
