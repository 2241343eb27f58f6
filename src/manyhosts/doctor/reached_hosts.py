"""The hosts that are asked, many at a time. One that stops answering is named once, and left out from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from manyhosts.cluster.findings import Finding
from manyhosts.doctor.probe_server import Reached, unreachable
from manyhosts.errors import LaunchError

T = TypeVar("T")
Facts = dict[str, Any]


class ReachedHosts:
    """Those that still answer, and what is to be said of the others."""

    def __init__(self, reached: Sequence[Reached]) -> None:
        self.there = list(reached)
        self.lost: list[Finding] = []

    def of_all(self, question: str, **details: Any) -> dict[str, Any]:
        """What every host answers, by name."""
        return self.each(lambda each: each.asked.ask(question, **details))

    def each(self, ask: Callable[[Reached], T], asked: Sequence[Reached] | None = None) -> dict[str, T]:
        """What `ask` gives for every host, all at the same time, by name."""
        asked = [each for each in (self.there if asked is None else asked) if each in self.there]
        if not asked:
            return {}
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda each: self._safely(each, ask), asked))
        found = {}
        for each, answer in zip(asked, answers, strict=True):
            if isinstance(answer, LaunchError):
                self._lose(each, answer)
            else:
                found[each.name] = answer
        return found

    @staticmethod
    def at_once(act: Callable[[Facts], None], each: Sequence[Facts]) -> None:
        """Do it for all at the same time."""
        if each:
            with ThreadPoolExecutor(len(each)) as pool:
                list(pool.map(act, each))

    def ask(self, each: Reached, question: str, **details: Any) -> Any:
        """What one host answers; None where it is gone."""
        return self.each(lambda one: one.asked.ask(question, **details), [each]).get(each.name)

    @staticmethod
    def _safely(each: Reached, ask: Callable[[Reached], T]) -> T | LaunchError:
        try:
            return ask(each)
        except LaunchError as error:
            return error

    def _lose(self, each: Reached, error: LaunchError) -> None:
        if each in self.there:
            self.there.remove(each)
            self.lost.append(unreachable(error, each.name))
