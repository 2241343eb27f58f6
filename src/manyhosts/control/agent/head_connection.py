"""An agent's connection to its head: nothing is said or heard on it before both have proven who they are.

Where it breaks, the head is called again, and what was lost in between is sent again (`control.session`). Signs of life
come from a thread of their own. Lines of workers never hold a worker up: where the head does not keep up, the oldest
are dropped, and their number is sent to the head; the logs have all of them.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from manyhosts.control.handshake import FROM_CALLED, Call, FromCalled, Hello, Prove, Welcome
from manyhosts.control.loop import Channel, Loop, Message, notice_loss
from manyhosts.control.proof import PROTOCOL, Caller
from manyhosts.control.protocol import FromAgent, LinesDropped, Output
from manyhosts.control.session import Session
from manyhosts.control.wire_format import content_of, read
from manyhosts.hosts import addresses

_INHERITED = "fd:"
_CALL_S = 10.0
"""How long one call may take."""
_PROOF_S = 20.0
"""How long the head may take to prove itself: it may be busy with the start of a hundred agents."""
_PATIENCE_S = 60.0
"""How long a head is called again that closed the connection before it knew this agent."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_HUNG_UP_S = 30.0
_REFUSED_S = 5.0
"""After connections to the head's port were refused for so long, the head is gone: a network interruption does not
refuse connections. Where another head may take over, that decides nothing."""


def inherited(connection: socket.socket) -> str:
    """The address by which an agent on this machine inherits its connection to the head."""
    return f"{_INHERITED}{connection.fileno()}"


def connect(head: str) -> socket.socket:
    """A connection to `head`, host:port; or the one that this process was given, where that is what it says.

    Raises:
        OSError: there is none to be had.
    """
    if head.startswith(_INHERITED):
        given = socket.socket(fileno=int(head.removeprefix(_INHERITED)))
        given.set_inheritable(False)  # it is for no worker
        return given
    connection = socket.create_connection(addresses.address_and_port(head), timeout=_CALL_S)
    notice_loss(connection)
    return connection


class HeadConnection:
    """Messages to the head and from it, over one connection after another."""

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        *,
        head: str,
        token: str,
        hello: Hello,
        on_message: Callable[[Message], None],
        on_end: Callable[[], None],
        show: Callable[[str], object],
    ) -> None:
        """Say `hello` over `connection`, which leads to `head`, once the other side has proven that it knows `token`.

        Its `proof` and `heard` are filled in.

        Without a token the connection is one that this process was born with: it needs no proof, and when it ends, so
        has the head. `show` prints lines for people.
        """
        self._loop, self._head, self._token, self._show = loop, head, token, show
        self._hello, self._on_end = hello, on_end
        self._session = Session(loop.after, on_message)
        self.patience_s = 0.0
        """How long the head is called again that was lost. The head says it."""
        self.waits_for_another = False
        """Whether another head may take over from one that was killed, so that a refused connection means little."""
        self._is_open = True
        self._lost = time.monotonic()
        """When the head was lost, or first called."""
        self._refused = 0.0
        """Since when connections are refused; 0 where one was accepted, or nothing is known."""
        self._hung_up = 0.0
        """Since when calls are taken and ended, as by a tunnel whose other end is gone; 0 where they are not."""
        self._pause_s = _PAUSE_S
        self._met_a_stranger = False
        self._channel = self._open(connection)

    @property
    def is_known(self) -> bool:
        """Whether the head has taken this agent in."""
        return self._session.heard > 0

    @property
    def is_away(self) -> bool:
        """Whether there is no head to be heard."""
        return self._session.channel is None

    @property
    def backlog_bytes(self) -> int:
        """What the head has not heard yet."""
        return self._session.backlog_bytes

    def say(self, message: FromAgent) -> None:
        """Send one message, now or when the head is there again; after the end it is dropped."""
        self._session.say(message)

    def give_sign_of_life(self, held_s: float) -> None:
        """From another thread: let the head see that this host is alive. Its loop has been blocked for `held_s`.

        Without a connection it is dropped.
        """
        if (channel := self._session.channel) is not None:
            channel.send_from_thread(json.dumps({"message": "alive", "held_s": round(held_s, 1)}).encode() + b"\n")

    def go_on(self) -> None:
        """Send what is left of a sign of life."""
        if self._session.channel is not None:
            self._session.channel.go_on()

    def close(self) -> None:
        """Say and hear no more."""
        self._is_open = False
        self._session.close()
        self._channel.close()

    # Calls.

    def _open(self, connection: socket.socket) -> Channel:
        if not self._token:
            channel = Channel(self._loop, connection, lambda _: None, lambda: self._lose(channel))
            channel.say(self._hello)
            self._session.attach(channel)
            return channel
        from manyhosts.control import tls  # here, for an agent of the head's own machine need not load OpenSSL

        caller = Caller(self._token)
        channel = Channel(
            self._loop,
            connection,
            lambda message: self._see(channel, caller, message),
            lambda: self._lose(channel),
            tls=tls.call(),
        )
        channel.longest_line = 1 << 14
        channel.say(Call(**caller.call()))
        self._loop.after(_PROOF_S, lambda: self._hang_up_unproven(channel))
        return channel

    def _see(self, channel: Channel, caller: Caller, found: Message) -> None:
        """The other side must prove that it is the head before anything is sent to it or done for it."""
        answer = _answer(found)
        proof = caller.proof_for(content_of(answer), channel.fingerprint) if isinstance(answer, Prove) else ""
        if not proof:
            if not self._met_a_stranger:  # it is called again and again
                self._met_a_stranger = True
                self._show(
                    f"manyhosts: what answers at {self._head} does not know the secret of this run; nothing was sent\n"
                )
            self._hang_up_unproven(channel)
            return
        channel.longest_line = Channel.LONGEST_LINE
        channel.on_message = lambda message: self._be_welcomed(channel, message)
        channel.say(replace(self._hello, proof=proof, heard=self._session.heard))
        if caller.protocol != PROTOCOL:  # the head, which has heard ours, ends the run
            self._show(f"manyhosts: {mismatch(caller.protocol, PROTOCOL)}\n")
            self._end()

    def _be_welcomed(self, channel: Channel, message: Message) -> None:
        """The head says how far it has heard, or that it has no use for this agent."""
        welcome = _answer(message)
        if not isinstance(welcome, Welcome):
            self._end()
            return
        if self._session.heard:
            self._show("manyhosts: the head is there again\n")
        self._refused, self._hung_up, self._pause_s = 0.0, 0.0, _PAUSE_S
        self._session.attach(channel, welcome.heard)

    def _hang_up_unproven(self, channel: Channel) -> None:
        if channel.is_open and self._session.channel is not channel:  # else the head was lost, and is being called
            channel.close()
            self._lose(channel)

    def _end(self) -> None:
        if self._is_open:
            self.close()
            self._on_end()

    def _lose(self, channel: Channel | None) -> None:
        """There is no connection, or no longer."""
        if not self._is_open:
            return
        now = time.monotonic()
        if self._session.channel is not None:
            self._session.detach()
            self._lost = now
            if self.patience_s:
                words = f"it is called again for {self.patience_s:.0f} s, and its workers continue meanwhile"
                self._show(f"manyhosts: the connection to the head is lost; {words}\n")
        elif channel is not None and not channel.is_cut:
            self._hung_up = self._hung_up or now
        patience_s = self.patience_s if self._session.heard else _PATIENCE_S
        nobody_listens = bool(self._refused) and now > self._refused + (_REFUSED_S if self._session.heard else 0.0)
        nobody_listens |= bool(self._hung_up) and now > self._hung_up + _HUNG_UP_S
        nobody_listens &= not self.waits_for_another
        if not self._token or now > self._lost + patience_s or nobody_listens:
            if self._token and not self.is_known:
                self._show(f"manyhosts: the head at {self._head} did not take this agent in\n")
            self._end()
            return
        self._loop.after(self._pause_s, self._call)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _call(self) -> None:
        """Open another connection: the head may not answer for long."""

        def call() -> socket.socket | OSError:
            try:
                return connect(self._head)
            except OSError as error:
                return error

        if self._is_open:
            self._loop.run_in_thread(call, self._take)

    def _take(self, found: socket.socket | OSError) -> None:
        if isinstance(found, OSError):
            is_refused = isinstance(found, ConnectionRefusedError)
            self._refused = (self._refused or time.monotonic()) if is_refused else 0.0
            self._lose(None)
        elif self._is_open:
            self._refused = 0.0
            self._channel = self._open(found)
        else:
            found.close()


def _answer(found: Message) -> FromCalled | None:
    try:
        return read(found, FROM_CALLED)
    except ValueError:
        return None


def mismatch(head: int, agent: int) -> str:
    """What it means that head and agent speak different versions."""
    return f"the head speaks version {head} of the protocol between head and agents, and this agent version {agent}"


EVERY_S = 0.5


class Heartbeat:
    """Sends the head a heartbeat twice a second, with how long this process's loop has been blocked.

    Whatever the loop does may take long on a host that is in trouble: a log on a disk that does not answer, the end of
    a process that the kernel does not let go. A process that is stopped, or a host that is frozen, has no thread that
    runs.
    """

    def __init__(self, loop: Loop, head: HeadConnection) -> None:
        """Begin at once."""
        self._loop, self._head = loop, head
        self._beats = 0
        """How often there was a sign of life since the loop came by: a host that was frozen has not counted."""
        self._over = threading.Event()
        self._turn()
        threading.Thread(target=self._beat, name="manyhosts-heartbeat", daemon=True).start()

    def close(self) -> None:
        """Give no more signs. Safe to call twice."""
        self._over.set()

    def _turn(self) -> None:
        """Called by the loop, unless it is blocked."""
        self._beats = 0
        self._head.go_on()
        self._loop.after(EVERY_S, self._turn)

    def _beat(self) -> None:
        while not self._over.wait(EVERY_S):
            self._head.give_sign_of_life(EVERY_S * max(0, self._beats - 1))
            self._beats += 1


MOST_WAITING_BYTES = 16 << 20
_ON_THE_WAY_BYTES = 1 << 20
"""How much may wait in the channel: heartbeats queue after it."""
_AGAIN_S = 0.02

After = Callable[[float, Callable[[], None]], object]


class Outbox:
    """What waits for room in `channel`."""

    def __init__(self, channel: HeadConnection, after: After) -> None:
        """`after` calls back after so many seconds."""
        self._channel, self._after = channel, after
        self._waiting: deque[tuple[int, Output]] = deque()
        """The size of each message, and the message."""
        self._size = 0
        self._missed: dict[int, LinesDropped] = {}
        """By member: how many of its lines were left out."""
        self._calls_again = False

    def put(self, output: Output) -> None:
        """Send it when there is room."""
        size = sum(map(len, output.lines)) + len(output.lines)
        self._waiting.append((size, output))
        self._size += size
        if self._size > MOST_WAITING_BYTES:
            self._leave_out()
        self._pump()

    def flush(self) -> None:
        """Hand everything to the channel, so that what is sent next follows it."""
        while self._waiting or self._missed:
            self._send_next()

    def _leave_out(self) -> None:
        while self._size > MOST_WAITING_BYTES // 2:
            size, output = self._waiting.popleft()
            self._size -= size
            before = self._missed.get(output.member)
            self._missed[output.member] = LinesDropped(
                rank=output.rank,
                generation=output.generation,
                member=output.member,
                lines=len(output.lines) + (before.lines if before else 0),
            )

    def _send_next(self) -> None:
        for missed in self._missed.values():
            self._channel.say(missed)
        self._missed.clear()
        if self._waiting:
            size, output = self._waiting.popleft()
            self._size -= size
            self._channel.say(output)

    def _pump(self) -> None:
        while self._waiting and self._channel.backlog_bytes < _ON_THE_WAY_BYTES:
            self._send_next()
        if self._waiting and not self._calls_again:
            self._calls_again = True
            self._after(_AGAIN_S, self._again)

    def _again(self) -> None:
        self._calls_again = False
        self._pump()
