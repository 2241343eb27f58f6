"""A Ray of two nodes, both this machine: tasks run when they are waited for, and what it was asked is kept."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeRay(ModuleType):
    """As much of the module `ray` as the launcher calls."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.asked: dict[str, Any] = {"tasks": []}
        self.util = ModuleType("ray.util")
        self.util.placement_group = self._group  # type: ignore[attr-defined]
        self.util.placement_group_table = lambda group: {"bundles_to_node_id": {0: "a", 1: "b"}}  # type: ignore[attr-defined]
        self.util.remove_placement_group = lambda group: None  # type: ignore[attr-defined]
        self.strategies = ModuleType("ray.util.scheduling_strategies")
        self.strategies.PlacementGroupSchedulingStrategy = lambda group, **more: more  # type: ignore[attr-defined]

    def modules(self) -> dict[str, ModuleType]:
        """What `import` is to find."""
        return {"ray": self, "ray.util": self.util, "ray.util.scheduling_strategies": self.strategies}

    def init(self, **words: Any) -> None:
        """The cluster is there."""
        self.asked["ray.init"] = words

    def shutdown(self) -> None:
        """Nothing is left."""

    def nodes(self) -> list[dict[str, Any]]:
        """Both, at addresses of this machine."""
        places = {"a": "127.0.0.1", "b": "127.0.0.2"}
        return [
            {"NodeID": name, "NodeManagerAddress": place, "NodeManagerHostname": name, "Alive": True}
            for name, place in places.items()
        ]

    def remote(self, function: Callable[..., Iterator[Any]]) -> Any:
        """What is done when somebody asks for what it yields."""

        def options(**words: Any) -> Any:
            def start(*given: Any) -> Any:
                self.asked["tasks"].append((words, given))
                assert words["num_returns"] == "streaming"
                return function(*given)

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def wait(self, tasks: list[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        """Those that are done, and the others."""
        return (tasks, []) if tasks[0].done.wait(timeout) else ([], tasks)

    def get(self, found: Any) -> Any:
        """What a task has yielded."""
        return found

    def cancel(self, task: Any, force: bool = False) -> None:
        """Agents end by themselves when the head has gone."""

    def _group(self, **words: Any) -> Any:
        self.asked["ray.util.placement_group"] = words
        ready = SimpleNamespace(done=threading.Event())
        ready.done.set()
        return SimpleNamespace(ready=lambda: ready)


def install(monkeypatch: Any) -> FakeRay:
    """Have `import ray` find it."""
    made = FakeRay()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return made
