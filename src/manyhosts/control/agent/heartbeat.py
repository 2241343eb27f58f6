"""An agent's signs of life, from a thread of their own: a loop that waits for a disk is no host that is dead."""

from __future__ import annotations

import threading

from manyhosts.control.agent.head_connection import HeadConnection
from manyhosts.control.loop import Loop

EVERY_S = 0.5


class Heartbeat:
    """Tells the head twice a second that this process lives, and for how long its loop has been held up.

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
        """The loop comes by here, unless it is held up."""
        self._beats = 0
        self._head.go_on()
        self._loop.after(EVERY_S, self._turn)

    def _beat(self) -> None:
        while not self._over.wait(EVERY_S):
            self._head.give_sign_of_life(EVERY_S * max(0, self._beats - 1))
            self._beats += 1
