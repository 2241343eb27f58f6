"""Messages of head and agent to each other, in order and each once, over one connection after another.

Each message has a number (`n`) and is kept until the other side says that it has heard it (`heard`). Where a
connection breaks, both sides say on the next how far they have heard, and what was lost in between is sent again.
Messages without a number (signs of life, and those of `control.proof`) are never sent again.

A side that writes down how far it is (`head.takeover`) holds its messages back until that is done. So another process
can continue with the conversation: nothing was said that it does not know of.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from manyhosts.control.loop import Channel, Message
from manyhosts.control.wire_format import WireMessage, content_of

_ANSWER_S = 0.02
"""So soon what has come is answered for; until then the other side keeps it."""

After = Callable[[float, Callable[[], None]], object]


class Session:
    """One side of a conversation that outlives its connections."""

    def __init__(self, after: After, on_message: Callable[[Message], None], *, holds_back: bool = False) -> None:
        """`after` calls back after so many seconds. `holds_back`: what is sent waits for `release`."""
        self._after, self._on_message = after, on_message
        self.channel: Channel | None = None
        """The connection, where there is one at present."""
        self._holds_back = holds_back
        self._sent = 0
        self._released = 0
        """How many of our messages may leave this process."""
        self.heard = 0
        """How many messages of the other side have come."""
        self._follows = False
        """Whether a message has come over this connection. Before the first one a process may be another: what it had
        answered for needs not have been written down, where nothing followed from it."""
        self._will_answer = False
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._is_open = True

    @property
    def backlog_bytes(self) -> int:
        """What the other side has not yet said that it has heard."""
        return self._kept_bytes

    @property
    def holds_some_back(self) -> bool:
        """Whether a message waits for `release`."""
        return self._released < self._sent

    def has_sent(self, number: int) -> bool:
        """Whether there are as many messages of ours as the other side says that it has heard."""
        return number <= self._sent

    def to_dict(self) -> dict[str, Any]:
        """All that another process needs to continue with this conversation."""
        return {"sent": self._sent, "heard": self.heard, "kept": [[n, words.decode()] for n, words in self._kept]}

    def restore(self, written: Mapping[str, Any]) -> None:
        """Be the session that was written down. What was not heard of it goes out over the next connection."""
        self._sent = self._released = int(written["sent"])
        self.heard = int(written["heard"])
        self._kept = deque((int(number), str(words).encode()) for number, words in written["kept"])
        self._kept_bytes = sum(len(words) for _, words in self._kept)

    def attach(self, channel: Channel, heard: int = 0) -> None:
        """Continue over `channel`. `heard` is how many of our messages the other side has."""
        if self.channel is not None:
            self.channel.close()
        self.channel, channel.on_message, self._follows = channel, self._take, False
        self._forget(heard)
        for number, words in self._kept:
            if number <= self._released:
                channel.send_words(words)

    def detach(self) -> None:
        """The connection is gone; another may come."""
        if self.channel is not None:
            self.channel.close()
        self.channel = None

    def say(self, message: WireMessage) -> None:
        """Send one message, now or as soon as there is a connection. After the end it is dropped."""
        if not self._is_open:
            return
        self._sent += 1
        words = json.dumps({"message": message.NAME, "n": self._sent, **content_of(message)}).encode() + b"\n"
        self._kept.append((self._sent, words))
        self._kept_bytes += len(words)
        if not self._holds_back:
            self.release()

    def release(self) -> None:
        """Send the messages that waited."""
        waiting, self._released = self._sent - self._released, self._sent
        if self.channel is not None:
            for place in range(-waiting, 0):  # the last ones, of perhaps many that were not heard yet
                self.channel.send_words(self._kept[place][1])

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is on its way, for at most `timeout_s` seconds: before a process ends."""
        self.release()
        if self.channel is not None:
            self.channel.flush(timeout_s)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the other side has ended the connection, for at most `timeout_s` seconds."""
        if self.channel is not None:
            self.channel.wait_for_end(timeout_s)

    def close(self) -> None:
        """Say and hear no more."""
        self._is_open = False
        self.detach()
        self._kept.clear()
        self._kept_bytes = 0

    def _take(self, message: Message) -> None:
        number = message.pop("n", None)
        if message.get("message") == "heard":
            if isinstance(count := message.get("count"), int):
                self._forget(count)
            self._on_message({"message": "alive", "held_s": 0.0})
            return
        if isinstance(number, int):
            if number <= self.heard:
                return  # it came on an earlier connection
            if number > self.heard + 1 and self._follows and self.channel is not None:
                self.channel.hang_up()  # one between is missing: over the next connection it is sent again
                return
            self._follows = True
            self.heard = number
            if not self._will_answer:
                self._will_answer = True
                self._after(_ANSWER_S, self._answer)
        self._on_message(message)

    def _answer(self) -> None:
        self._will_answer = False
        if self.channel is not None:
            self.channel.send("heard", count=self.heard)

    def _forget(self, heard: int) -> None:
        while self._kept and self._kept[0][0] <= heard:
            self._kept_bytes -= len(self._kept.popleft()[1])
