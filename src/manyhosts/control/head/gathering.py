"""Waits for the agents of a run before its workers start."""

from __future__ import annotations

from collections.abc import Sequence

from manyhosts.control.head.agents import Agents
from manyhosts.control.head.state import HeadState, Node
from manyhosts.errors import LaunchError

_GATHER_S = 15.0
"""How long a run that may begin with fewer nodes waits for the others."""
_LOOK_S = 0.2


class Gathering:
    """Looks now and then whether the agents that have not said hello are still on their way."""

    def __init__(self, state: HeadState, agents: Agents) -> None:
        self._state, self._agents = state, agents
        self._goes_without = False
        """Whether the run begins without those that are not here."""
        self._look(0)

    @property
    def is_over(self) -> bool:
        """Whether the workers can start: all agents are here, or enough where the others may come later."""
        return self._agents.all_here or self._goes_without

    def _look(self, waited_s: float) -> None:
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
        state.loop.after(_LOOK_S, lambda: self._look(waited_s + _LOOK_S))

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
