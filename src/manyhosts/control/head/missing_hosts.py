"""Hosts that do not come, and hosts that fall silent: how long the head waits for either.

Agents send heartbeats. A host on a quiet network is heard every half second; one that is overloaded, or has a bad
link, now and then has silences of seconds. What counts is the longest of them, for what comes through such a network
has a long tail: no variance describes it, and an average forgets it. A silence is reported that is longer than three
times all others of ten minutes, so that ever longer ones are reported ever more rarely: of silences up to T s, at most
1 + log3(T / LEAST_S) are. Much later the host is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manyhosts.control.head.agents import Agents
from manyhosts.control.head.state import HeadState, Node
from manyhosts.control.session import Session
from manyhosts.errors import LaunchError

LEAST_S = 2.25
"""No silence shorter than this is worth a word."""
_TIMES = 3.0
"""So many times the longest silence that was usual is not."""
_SPAN_S = 30.0
_SPANS = 20


class Rhythm:
    """The silences of one host."""

    def __init__(self) -> None:
        self._longest: deque[tuple[float, float]] = deque()
        """When each span of 30 s began, and the longest silence that ended in it."""

    def note(self, now: float, silence_s: float) -> None:
        """A silence has ended. `now` never goes back."""
        while self._longest and now - self._longest[0][0] > _SPAN_S * _SPANS:
            self._longest.popleft()
        if self._longest and now - self._longest[-1][0] < _SPAN_S:
            began, longest = self._longest[-1]
            self._longest[-1] = began, max(longest, silence_s)
        else:
            self._longest.append((now, silence_s))

    @property
    def overdue_s(self) -> float:
        """From when on a silence is worth a word, in seconds."""
        return max(LEAST_S, _TIMES * max((longest for _, longest in self._longest), default=0.0))


GIVEN_UP_S = 10.0
"""How long an agent may give no sign of life, at least.

A link that is down for 5 s is heard again after up to 7 s: what was sent meanwhile is sent again after ever longer
pauses.
"""
LEAST_GIVEN_UP_S = 3.0
"""The same, where the user is less patient."""
_GIVEN_UP_TIMES = 4.0
"""So many times longer than what is worth a word may a silence last."""
MOST_GIVEN_UP_S = 30.0
"""After so long a host is given up whatever else is known."""
HELD_S = 5.0
"""From when on it is worth a word that an agent lives and does nothing: its log is on a disk that hangs, say."""
HELD_GIVEN_UP_S = 600.0
"""After so long it is given up, where no worker makes progress and the user has set no limit."""
_STILL_S = 3.0
"""What workers report so long after a host was heard last, they have done while it was silent."""


@dataclass(slots=True)
class _Ear:
    """What is known of how a host is heard."""

    rhythm: Rhythm = field(default_factory=Rhythm)
    channel: Session | None = None
    heard: float = 0.0
    """When it was last heard, as of the last check."""
    is_named: bool = False
    held_s: float = 0.0
    """For how long its agent's loop was blocked by the last heartbeat; 0 where it is not."""


class Silences:
    """Looks at when each host was heard last, several times a second."""

    def __init__(self, say: Callable[[str], None], on_silence: Callable[[Node, float], None]) -> None:
        """`say` prints what the user is to know; `on_silence` of a host that is given up, with the seconds."""
        self._say, self._on_silence = say, on_silence
        self._ears: dict[int, _Ear] = {}

    def check(self, node: Node, now: float, impatience_s: float | None, progress: float) -> None:
        """See how long `node` has been silent. `impatience_s`: a run that gets no further for so long is to end.

        `progress` is when a worker reported a step last. Workers wait for one another: where the others continue, those
        of the silent host do, too, and its agent waits for a slow disk, say.
        """
        ear = self._ears.setdefault(node.number, _Ear())
        if node.channel is None or node.channel is not ear.channel:
            ear.channel, ear.heard, ear.is_named = node.channel, node.heard, False
        if node.channel is None:
            return
        if node.heard > ear.heard:
            self._note_sign(node, ear, now)
        self._look_at_held(node, ear, now, impatience_s, progress)
        silence_s = now - node.heard
        limit_s = MOST_GIVEN_UP_S if progress > node.heard + _STILL_S else self._limit_s(ear)
        if silence_s > (min(limit_s, max(LEAST_GIVEN_UP_S, impatience_s)) if impatience_s else limit_s):
            self._on_silence(node, silence_s)
        elif silence_s > ear.rhythm.overdue_s and not ear.is_named:
            ear.is_named = True
            self._say(f"manyhosts: host {node.name} has not been heard from for {silence_s:.1f} s")

    def forgive(self, node: Node, now: float, seconds: float) -> None:
        """No host could be heard for so long."""
        node.heard = min(now, node.heard + seconds)
        if (ear := self._ears.get(node.number)) is not None:
            ear.heard = min(node.heard, ear.heard + seconds)

    def _note_sign(self, node: Node, ear: _Ear, now: float) -> None:
        silence_s = node.heard - ear.heard
        ear.heard = node.heard
        ear.rhythm.note(now, silence_s)
        if ear.is_named:
            ear.is_named = False
            self._say(f"manyhosts: host {node.name} is back after {silence_s:.1f} s")

    def _look_at_held(self, node: Node, ear: _Ear, now: float, impatience_s: float | None, progress: float) -> None:
        """An agent that waits for its own system is no host that is gone: disks come back, and its workers continue."""
        limit_s = HELD_GIVEN_UP_S if impatience_s is None else impatience_s
        if limit_s and min(node.held_s, now - progress) > limit_s:
            self._on_silence(node, node.held_s)
        elif node.held_s > HELD_S:
            if not ear.held_s:
                what = f"has waited for a disk or the like for {node.held_s:.0f} s; its workers continue if they can"
                self._say(f"manyhosts: host {node.name} is there, but its agent {what}")
            ear.held_s = node.held_s
        elif ear.held_s:
            self._say(f"manyhosts: the agent of host {node.name} continues after {ear.held_s:.0f} s")
            ear.held_s = 0.0

    def _limit_s(self, ear: _Ear) -> float:
        return min(MOST_GIVEN_UP_S, max(GIVEN_UP_S, _GIVEN_UP_TIMES * ear.rhythm.overdue_s))


_GATHER_S = 15.0
"""How long a run that may begin with fewer nodes waits for the others."""
_LOOK_S = 0.2


class Gathering:
    """Looks now and then whether the agents that have not said hello are still on their way."""

    def __init__(self, state: HeadState, agents: Agents) -> None:
        self._state, self._agents = state, agents
        self._goes_without = False
        """Whether the run begins without those that are not here."""
        self._check(0)

    @property
    def is_over(self) -> bool:
        """Whether the workers can start: all agents are here, or enough where the others may come later."""
        return self._agents.all_here or self._goes_without

    def _check(self, waited_s: float) -> None:
        state = self._state
        missing = [node for node in self._agents.nodes if node.channel is None]
        if not missing or state.is_over:
            return
        dead = [node for node in missing if node.agent.poll() is not None]
        if state.job.is_elastic:
            if (len(dead) == len(missing) or waited_s > _GATHER_S) and self._begin_without(missing, waited_s):
                return
        elif dead or waited_s > self._agents.endpoint.patience_s:
            state.result = self._not_here(missing, dead)
        state.loop.after(_LOOK_S, lambda: self._check(waited_s + _LOOK_S))

    def _not_here(self, missing: Sequence[Node], dead: Sequence[Node]) -> LaunchError:
        """Why the run does not begin."""
        endpoint = self._agents.endpoint
        if endpoint.joining is not None and not dead:
            return LaunchError(
                f"{len(missing)} of {len(self._agents.nodes)} hosts have not joined within {endpoint.patience_s:.0f} s",
                where="--on join",
                fix="type the line shown above on each; -o wait=8h waits longer, and with --nodes MIN:MAX the run"
                " begins without the others",
            )
        why = "ended before it said a word" if dead else f"did not report within {endpoint.patience_s:.0f} s"
        return LaunchError(
            f"the agent {why}",
            where="host " + ", ".join(node.name for node in dead or missing),
            fix=f"see what it printed above, and that it can open a connection to {self._agents.address}",
        )

    def _begin_without(self, missing: Sequence[Node], waited_s: float) -> bool:
        """Begin with the nodes that are here, if they are enough; the others may come later."""
        present, least = len(self._agents.present()), self._state.job.least_nodes
        if present < (least or len(self._agents.nodes)):
            if waited_s > self._agents.endpoint.patience_s or all(node.agent.poll() is not None for node in missing):
                names = ", ".join(node.name for node in missing)
                self._state.result = LaunchError(
                    f"only {present} of at least {least} nodes are here",
                    where=f"not here: {names}",
                    fix="see what their agents printed above",
                )
            return False
        self._goes_without = True
        for node in missing:
            self._agents.call_again(node)
        return True
