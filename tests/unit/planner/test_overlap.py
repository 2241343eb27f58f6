"""When the last exchange of a step is over: by hand, and against a simulation that moves a clock tick by tick."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from manyhosts.planner.overlap import Transfer, last_end


def test_each_exchange_begins_when_it_is_ready_and_the_one_before_is_over() -> None:
    first, second, third = Transfer(ready=1, wire=5), Transfer(ready=2, wire=1), Transfer(ready=10, wire=2)
    assert last_end([first]) == 6
    assert last_end([first, second]) == 7
    assert last_end([first, second, third]) == 12


def test_one_queue_computes_while_the_bytes_of_another_travel() -> None:
    one = Transfer(ready=0, wire=4, before=2, after=2)
    assert last_end([one, one], queues=1) == 16
    assert last_end([one, one], queues=2) == 12  # 2 packing, 4 + 4 on the wire, 2 unpacking


def test_nothing_is_over_at_once() -> None:
    assert last_end([]) == 0


class Simulated:
    """The same rules, played: every tick each queue and the wire do what they can."""

    def __init__(self, transfers: Sequence[Transfer], queues: int) -> None:
        self.transfers = transfers
        self.left = [[each.before, each.wire, each.after] for each in transfers]
        self.queues = [list(range(number, len(transfers), queues)) for number in range(queues)]
        self.wire = list(range(len(transfers)))
        self.clock = 0

    def moves(self) -> list[tuple[int, int]]:
        """Which phase of which transfer could continue now."""
        found = []
        for queue in self.queues:
            if queue and self.transfers[queue[0]].ready <= self.clock:
                before, wire, after = self.left[queue[0]]
                if before:
                    found.append((queue[0], 0))
                elif not wire and queue[0] not in self.wire and after:
                    found.append((queue[0], 2))
        if self.wire:
            at = next((queue[0] for queue in self.queues if queue and queue[0] == self.wire[0]), None)
            if at is not None and self.transfers[at].ready <= self.clock and not self.left[at][0] and self.left[at][1]:
                found.append((at, 1))
        return found

    def settle(self) -> bool:
        """Let go of what has nothing left to do; whether anything was."""
        if self.wire:
            first = self.wire[0]
            reached = any(queue and queue[0] == first for queue in self.queues)
            if reached and self.transfers[first].ready <= self.clock and self.left[first][:2] == [0, 0]:
                self.wire.pop(0)
                return True
        for queue in self.queues:
            if queue and queue[0] not in self.wire and self.left[queue[0]] == [0, 0, 0]:
                queue.pop(0)
                return True
        return False

    def run(self) -> int:
        while any(self.queues):
            while self.settle():
                pass
            if not any(self.queues):
                break
            for number, phase in self.moves():
                self.left[number][phase] -= 1
            self.clock += 1
        return self.clock


whole = st.integers(0, 6)


@given(st.lists(st.tuples(whole, whole, whole, whole), min_size=1, max_size=7), st.integers(1, 3))
def test_schedule_equals_a_simulation_of_it(drawn: list[tuple[int, int, int, int]], queues: int) -> None:
    ready = 0
    transfers = []
    for later, before, wire, after in drawn:
        ready += later
        transfers.append(Transfer(ready=ready, wire=wire, before=before, after=after))
    assert last_end(transfers, queues=queues) == Simulated(transfers, queues).run()
