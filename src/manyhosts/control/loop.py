"""One thread that waits for sockets, signals and the clock, and calls back: what the head and the agents run in."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from manyhosts.control.wire_format import WireMessage, content_of
from manyhosts.records.json_text import parsed

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from manyhosts.control.tls import Tls  # loads OpenSSL, which few runs need

T = TypeVar("T")
Message = dict[str, Any]
"""One JSON object on one line; `message` says which kind."""

_SILENCE_S = 10
"""How long the other side's system may be silent before a connection counts as lost."""


_TCP_INFO_BYTES = 60
"""Of Linux's struct tcp_info, up to tcpi_last_ack_recv, in ms."""


def notice_loss(connection: socket.socket) -> None:
    """Have the system end `connection` when the other host is gone without a word: no power, no cable."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": _SILENCE_S // 2 - 1}
    options["TCP_USER_TIMEOUT"] = _SILENCE_S * 1000  # ms, for what was sent and not acknowledged
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Loop:
    """Waits for sockets, signals and the clock, and calls the handlers of what has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._cancelled: set[int] = set()
        self._numbers = itertools.count()
        self._undo: list[Callable[[], None]] = []
        self.before_waiting: Callable[[], None] | None = None
        """Called whenever all that has come was seen to, before the next wait."""

    def watch(self, source: FileDescriptorLike, on_readable: Callable[[], object]) -> None:
        """Call `on_readable` whenever `source` has something to read, or has ended."""
        self._selector.register(source, selectors.EVENT_READ, (on_readable, None))

    def watch_writing(self, source: FileDescriptorLike, on_writable: Callable[[], None] | None) -> None:
        """Call `on_writable` too whenever `source`, which is watched already, takes bytes again; None ends it."""
        on_readable, _ = self._selector.get_key(source).data
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if on_writable else 0)
        self._selector.modify(source, events, (on_readable, on_writable))

    def unwatch(self, source: FileDescriptorLike) -> None:
        """Wait for `source` no longer. It may be unknown or closed already."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def after(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once, `seconds` from now. What comes back cancels that."""
        number = next(self._numbers)
        heapq.heappush(self._timers, (time.monotonic() + seconds, number, callback))
        return lambda: self._cancelled.add(number)

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` again and again."""

        def again() -> None:
            callback()
            self.after(seconds, again)

        self.after(seconds, again)

    def on_signals(self, signals: Iterable[signal.Signals], callback: Callable[[signal.Signals], None]) -> None:
        """Call `callback` for each of `signals` that comes, from the loop.

        Raises:
            ValueError: this is not the main thread, which alone handles signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signals reach the main thread only")
        waiting: list[signal.Signals] = []
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def note(number: int, _: FrameType | None) -> None:
            waiting.append(signal.Signals(number))

        def drain() -> None:
            with contextlib.suppress(BlockingIOError):
                while os.read(reading, 512):
                    pass
            while waiting:
                callback(waiting.pop(0))

        # `nohup` has SIGHUP ignored: what is started so outlives its terminal.
        heard = [each for each in signals if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
        old = {number: signal.signal(number, note) for number in heard}
        self.watch(reading, drain)

        def undo() -> None:
            signal.set_wakeup_fd(before)
            for number, handler in old.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            os.close(reading)
            os.close(writing)

        self._undo.append(undo)

    def run_in_thread(self, work: Callable[[], T], then: Callable[[T], object]) -> None:
        """Do `work` on a thread of its own, for it may take long; the loop then calls `then` with what it gave.

        Where `work` raises, `run` does, with the same error.
        """
        reading, writing = os.pipe()
        found: list[T] = []
        raised: list[BaseException] = []

        def act() -> None:
            try:
                found.append(work())
            except BaseException as error:
                raised.append(error)
            finally:
                os.close(writing)

        def take() -> None:
            self.unwatch(reading)
            os.close(reading)
            if raised:
                raise raised[0]
            then(found[0])

        self.watch(reading, take)
        threading.Thread(target=act, daemon=True).start()

    def run(self, until: Callable[[], bool]) -> None:
        """Call back until `until()` is true."""
        while not until():
            self._call_timers()
            if self.before_waiting is not None:
                self.before_waiting()
            if until():
                return
            for key, events in self._selector.select(self._pause()):
                if self._selector.get_map().get(key.fd) is not key:
                    continue  # an earlier callback of this round has stopped waiting for it, or waits otherwise
                on_readable, on_writable = key.data
                if events & selectors.EVENT_WRITE and on_writable is not None:
                    on_writable()
                if events & selectors.EVENT_READ and self._selector.get_map().get(key.fd) is not None:
                    on_readable()
                if until():
                    return  # what else has come is still there the next time

    def close(self) -> None:
        """Restore the signal handlers of before."""
        self._selector.close()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _call_timers(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            _, number, callback = heapq.heappop(self._timers)
            if number in self._cancelled:
                self._cancelled.discard(number)
            else:
                callback()

    def _pause(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None


class Channel:
    """Messages over a stream socket, both ways, without ever waiting."""

    LONGEST_LINE = 64 << 20
    """Bytes of a message, of one that is known. Longer ones end the channel."""

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        on_message: Callable[[Message], None],
        on_end: Callable[[], None],
        *,
        tls: Tls | None = None,
    ) -> None:
        """Read `connection` from now on; `on_end` is called once when the other side is gone or speaks nonsense.

        `tls` is this end of it, where it is encrypted.
        """
        self._loop, self._socket, self._tls = loop, connection, tls
        self.on_message, self.on_end = on_message, on_end
        self.longest_line = self.LONGEST_LINE
        self.trouble: OSError | None = None
        """What the system said of the connection when it was lost; None where the other side has closed it."""
        self._came = bytearray()
        self._unsent = bytearray()
        self._sending = threading.RLock()
        """Protects TLS and the socket; released before anything is waited for."""
        self._open = True
        connection.setblocking(False)
        loop.watch(connection, self.read)
        self._write_encrypted()  # who calls says the first word

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate that the other side has shown; empty where the connection is not encrypted."""
        return self._tls.fingerprint if self._tls is not None else b""

    @property
    def backlog_bytes(self) -> int:
        """What is still to be sent."""
        return len(self._unsent)

    @property
    def is_open(self) -> bool:
        """Whether nothing is known of its end."""
        return self._open

    @property
    def is_cut(self) -> bool:
        """Whether it has ended because the way to the other side is broken, and not because that side ended it."""
        return self.trouble is not None and not isinstance(self.trouble, ConnectionError)  # ETIMEDOUT, EHOSTUNREACH

    @property
    def unanswered_s(self) -> float | None:
        """For how long the other side's system, which is asked every 2 s, has not answered; None where unknown."""
        try:
            facts = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except (OSError, AttributeError):  # a socket within this machine, or a system that does not report it
            return None
        return int.from_bytes(facts[-4:], sys.byteorder) / 1000 if len(facts) == _TCP_INFO_BYTES else None

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send one message. After the end of the channel it is dropped."""
        self.send_words(json.dumps({"message": kind, **fields}).encode() + b"\n")

    def say(self, message: WireMessage) -> None:
        """Send one message that has a class."""
        self.send(message.NAME, **content_of(message))

    def send_words(self, words: bytes) -> None:
        """Send a line, or several."""
        with self._sending:
            if not self._open:
                return
            if self._tls is None:
                self._add(words)
                return
            self._tls.send(words)
            self._write_encrypted()

    def send_from_thread(self, words: bytes) -> None:
        """Send a line from another thread, unless others still wait to be sent: for when the loop is blocked.

        What the socket does not take of it goes when the loop calls `go_on`.
        """
        with self._sending:
            if not self._open or self._unsent:
                return
            if self._tls is not None:
                self._tls.send(words)
                words = self._tls.take()
            self._unsent += words
            with contextlib.suppress(OSError):  # the end shows itself when the loop reads
                del self._unsent[: self._socket.send(self._unsent)]

    def go_on(self) -> None:
        """Send what `send_from_thread` has left, if anything."""
        with self._sending:
            if self._open and self._unsent:
                self._write()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is sent, for at most `timeout_s` seconds: before a process ends."""
        deadline = time.monotonic() + timeout_s
        while self._open and self._unsent and time.monotonic() < deadline:
            self._write()
            time.sleep(0.001 if self._unsent else 0)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the other side ends it, for at most `timeout_s` seconds; what it says before is not heard."""
        self.on_message, self.on_end = (lambda _: None), (lambda: None)
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline:
            if not self.read():
                time.sleep(0.002)

    def close(self) -> None:
        """End it without a word to `on_end`."""
        with self._sending:
            if self._open:
                self._open = False
                self._loop.unwatch(self._socket)
                self._socket.close()

    def hang_up(self) -> None:
        """End it because the other side sent nonsense: `on_end` is called with that."""
        if self._open:
            self.close()
            self.on_end()

    def read(self) -> bool:
        """Take what has come, if anything has. Returns whether more may be there already."""
        if not self._open:
            return False
        try:
            chunk = self._socket.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError as error:
            self.trouble = error
            chunk = b""
        if not chunk:
            self.hang_up()
            return False
        if self._tls is not None:
            with self._sending:
                try:
                    chunk, is_sound = self._tls.receive(chunk), True
                except OSError:
                    is_sound = False
                self._write_encrypted()  # where it is not sound, TLS says what it thinks of that
            if not is_sound:
                self.hang_up()
                return False
        self._came += chunk
        if b"\n" in chunk:
            self._split()
        if len(self._came) > self.longest_line or (self._tls is not None and self._tls.has_ended):
            self.hang_up()
        return self._open

    def _split(self) -> None:
        """Hand out every complete line that has come."""
        *lines, rest = self._came.split(b"\n")
        self._came = bytearray(rest)
        for line in lines:
            try:
                message = parsed(line) if len(line) <= self.longest_line else None
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.hang_up()
                return
            self.on_message(message)
            if not self._open:
                return

    def _write_encrypted(self) -> None:
        if self._tls is not None and (words := self._tls.take()):
            self._add(words)

    def _add(self, words: bytes) -> None:
        idle = not self._unsent
        self._unsent += words
        if idle:
            self._write()

    def _write(self) -> None:
        with self._sending:
            try:
                while self._unsent:
                    del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                self._loop.watch_writing(self._socket, self._write)
                return
            except OSError as error:
                self.trouble = error
                self._unsent.clear()  # the end shows itself when we read
                return
            self._loop.watch_writing(self._socket, None)
