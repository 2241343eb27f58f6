"""Who continues when a worker is lost, in which order, and when that makes no sense any more."""

from __future__ import annotations

import pytest

from manyhosts.control.head.group_state import MOST_WITHOUT_PROGRESS, GroupState, Member, places


def group_state(workers: int, *, per_node: int = 1, most: int = 0) -> GroupState:
    """Workers 0, 1, … that all train."""
    made = GroupState()
    for number in range(workers):
        node, local_rank = divmod(number, per_node)
        made.add(Member(number=number, node=node, local_rank=local_rank, rank=number, enrolled=True, most=most))
    return made


def late(number: int, node: int = 0, local_rank: int = 0) -> Member:
    return Member(number=number, node=node, local_rank=local_rank, rank=0, late=True)


def ask_all(who: GroupState, step: int) -> None:
    for member in who.trained():
        who.ask(member.number, step, group=who.group)


def numbers(members: list[Member]) -> list[int]:
    return [member.number for member in members]


def test_group_is_due_when_all_that_are_left_and_the_replacement_have_asked() -> None:
    who = group_state(3)
    assert who.lose(1, "it was killed")
    who.add(late(3, node=1))
    assert not who.due
    ask_all(who, 7)
    assert not who.due, "the replacement is not there yet"
    who.ask(3, -1, group=0)
    assert who.due
    assert numbers(who.form()) == [0, 2, 3]


def test_replacement_is_not_waited_for_where_the_number_of_workers_changes_no_bit() -> None:
    who = group_state(3, most=8)
    who.lose(1, "it was killed")
    who.add(late(3))
    ask_all(who, 7)
    assert who.due
    assert numbers(who.form()) == [0, 2]
    who.ask(3, -1, group=1)
    ask_all(who, 9)
    assert numbers(who.form()) == [0, 3, 2], "side by side with its host, and behind those that have trained there"


def test_worker_for_whom_there_is_no_part_stays_idle_until_another_is_lost() -> None:
    who = group_state(2, most=2)
    who.add(late(2, node=2))
    who.members[2].most = 2
    who.ask(2, -1, group=0)
    assert not who.wants_change()
    assert not who.due
    who.lose(1, "it was killed")
    ask_all(who, 7)
    assert who.due
    assert numbers(who.form()) == [0, 2]


def test_of_several_that_come_as_many_join_as_there_is_room_for() -> None:
    who = group_state(2, most=3)
    for number in (2, 3):
        who.add(late(number, node=number))
        who.ask(number, -1, group=0)
    ask_all(who, 7)
    assert numbers(who.form()) == [0, 1, 2]
    assert not who.wants_change(), "the fourth waits"


def test_leader_is_one_that_has_trained_before() -> None:
    who = group_state(2)
    who.lose(0, "it was killed")
    who.add(late(2))
    ask_all(who, 7)
    who.ask(2, -1, group=0)
    assert [(member.number, member.rank) for member in who.form()] == [(1, 0), (2, 1)]


def test_workers_of_a_host_have_ranks_side_by_side() -> None:
    who = group_state(4, per_node=2)
    who.lose(1, "it was killed")
    who.add(late(4, node=0, local_rank=1))
    ask_all(who, 7)
    who.ask(4, -1, group=0)
    formed = who.form()
    assert numbers(formed) == [0, 4, 2, 3]
    assert places(formed) == [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]


def test_nobody_goes_on_where_one_has_not_begun_to_train() -> None:
    who = group_state(3)
    who.members[2].enrolled = False
    assert not who.lose(1, "it was killed")


def test_nobody_goes_on_where_nobody_is_left() -> None:
    who = group_state(1)
    assert not who.lose(0, "it was killed")


def lose_and_go_on(who: GroupState, step: int, *, asks_first: bool) -> bool:
    """Lose the newest of two workers after a step, and form a group with another in its place, if that goes on.

    `asks_first`: the one that is left asks for a new group before it is known that the other one is lost.
    """
    [first, lost] = numbers(who.trained())
    if asks_first:
        who.ask(first, step, group=who.group)
    goes_on = who.lose(lost, "it was killed")
    if not asks_first:
        who.ask(first, step, group=who.group)
        goes_on = goes_on and not who.makes_no_progress
    if goes_on:
        who.add(late(lost + 1, node=1))
        who.ask(lost + 1, -1, group=who.group)
        who.form()
    return goes_on


ORDERS = pytest.mark.parametrize("asks_first", [False, True])


@ORDERS
def test_failures_one_upon_the_other_come_to_an_end(asks_first: bool) -> None:
    who = group_state(2)
    gone_on = [lose_and_go_on(who, 7, asks_first=asks_first) for _ in range(MOST_WITHOUT_PROGRESS + 2)]
    # The first comes after steps that were finished.
    assert gone_on == [True] * (MOST_WITHOUT_PROGRESS + 1) + [False]
    assert who.makes_no_progress


@ORDERS
def test_failures_between_which_steps_are_finished_never_end_it(asks_first: bool) -> None:
    who = group_state(2)
    assert all(lose_and_go_on(who, step, asks_first=asks_first) for step in range(50))


@ORDERS
def test_failure_that_comes_after_more_steps_is_not_added_to_those_before(asks_first: bool) -> None:
    who = group_state(2)
    steps = [step for step in range(7, 20) for _ in range(MOST_WITHOUT_PROGRESS + 1)]
    assert all(lose_and_go_on(who, step, asks_first=asks_first) for step in steps)


@ORDERS
def test_host_that_takes_many_workers_with_it_is_one_failure(asks_first: bool) -> None:
    who = group_state(8, per_node=4)
    ask_all(who, 7)
    who.form()
    if asks_first:
        who.ask(0, 7, group=who.group)
    assert all(who.lose(number, "its host is gone") for number in range(4, 8))
    ask_all(who, 7)
    assert not who.makes_no_progress


def test_replacements_that_are_lost_one_upon_the_other_come_to_an_end_where_they_are_waited_for() -> None:
    who = group_state(2)
    assert lose_and_go_on(who, 7, asks_first=False)
    who.lose(2, "it was killed")
    ask_all(who, 7)
    gone_on = []
    for number in range(3, 3 + MOST_WITHOUT_PROGRESS):
        who.add(late(number, node=1))
        gone_on.append(who.lose(number, "so was the one in its place"))
    assert gone_on == [True] * (MOST_WITHOUT_PROGRESS - 1) + [False]


def test_replacements_that_are_lost_while_the_others_train_break_nothing() -> None:
    who = group_state(3, most=3)
    who.lose(2, "it was killed")
    ask_all(who, 7)
    who.form()
    for number in range(3, 20):
        who.add(late(number))
        assert who.lose(number, "so was the one in its place")
    assert who.lose(1, "it was killed")
    ask_all(who, 7)
    assert not who.makes_no_progress


def test_group_that_cannot_reach_one_another_is_formed_anew_with_the_same_members() -> None:
    who = group_state(2)
    who.ask(0, 7, group=0)
    assert not who.due
    who.ask(1, 7, group=0)
    assert who.due
    assert numbers(who.form()) == [0, 1]


@pytest.mark.parametrize("asks_first", [True, False])
def test_replacement_that_is_lost_too_is_not_waited_for(asks_first: bool) -> None:
    who = group_state(3)
    who.lose(1, "it was killed")
    who.add(late(3))
    if asks_first:
        who.ask(3, -1, group=0)
    ask_all(who, 7)
    who.lose(3, "it was killed, too")
    assert who.due
    assert numbers(who.form()) == [0, 2]


def test_group_that_breaks_at_one_step_again_and_again_without_a_loss_makes_no_progress() -> None:
    who = group_state(2)
    ask_all(who, 5)  # the first time it has come so far
    who.form()
    for _ in range(MOST_WITHOUT_PROGRESS):
        ask_all(who, 5)
        assert not who.makes_no_progress
        who.form()
    who.ask(0, 5, group=who.group)
    assert not who.makes_no_progress, "the other one may have finished a step"
    who.ask(1, 5, group=who.group)
    assert who.makes_no_progress
    who.ask(1, 6, group=who.group)
    assert not who.makes_no_progress, "a step was finished"


def copies(workers: int, parts: int, *, parts_first: bool = True) -> GroupState:
    """Workers of which `parts` make one copy of a model; part and copy of each follow from its number."""
    who = group_state(workers)
    for number in range(workers):
        part = number // (workers // parts) if parts_first else number % parts
        who.lay_out(number, {"part": part, "parts": parts, "parts_first": parts_first, "plan": {}})
    return who


def replacement(number: int, part: int) -> Member:
    return Member(number=number, node=0, local_rank=0, rank=0, late=True, part=part)


def test_other_copies_go_on_at_once_and_the_rest_of_a_broken_one_waits() -> None:
    who = copies(4, 2)  # 0 and 1 have part 0, 2 and 3 part 1
    assert who.lose(3, "it was killed")
    who.add(replacement(4, part=1))
    ask_all(who, 7)
    assert who.due, "nobody waits for the new one"
    assert numbers(who.form()) == [0, 2]
    assert who.members[1].late, "it has nobody to make a copy with"
    assert not who.wants_change()
    who.ask(4, -1, group=1)
    ask_all(who, 9)
    assert numbers(who.form()) == [0, 1, 2, 4], "each part has its place among the ranks"


def test_copies_are_made_of_whoever_has_the_parts() -> None:
    who = copies(4, 2, parts_first=False)  # 0 and 2 have part 0, 1 and 3 part 1
    assert who.lose(0, "it was killed")
    assert who.lose(3, "so was it")
    ask_all(who, 7)
    assert numbers(who.form()) == [2, 1]


def test_workers_end_that_have_not_all_parts_left() -> None:
    who = copies(4, 2)
    assert who.lose(2, "it was killed")
    assert not who.lose(3, "so was the last one of that part")


def test_waiting_worker_is_of_no_use_to_others_that_lose_their_last_one_of_its_part() -> None:
    who = copies(4, 2)
    who.lose(3, "it was killed")
    ask_all(who, 7)
    who.form()
    assert not who.lose(0, "it was killed"), "worker 1 has part 0 of a step before"


def test_worker_of_a_host_that_comes_gets_the_part_of_which_there_are_fewest() -> None:
    who = copies(4, 2)
    who.lose(2, "its host is gone")
    ask_all(who, 7)
    who.form()
    for number in (4, 5):
        who.add(late(number, node=7))
    assert [who.members[number].part for number in (4, 5)] == [1, 0]
