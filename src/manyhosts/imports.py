"""Calls back when a module has been imported, now or later, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Call = Callable[[ModuleType], None]


def when_imported(name: str, call: Call) -> None:
    """Call `call` with the module `name`: at once if it is loaded, else right after its code has run, if ever."""
    module = sys.modules.get(name)
    if module is not None:
        call(module)
        return
    waiting = next((each for each in sys.meta_path if isinstance(each, _Waiting) and each.name == name), None)
    if waiting is None:
        sys.meta_path.insert(0, waiting := _Waiting(name))
    waiting.calls.append(call)


class _Waiting(MetaPathFinder):
    """Comes before the finders that find modules, until the one that is awaited is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Call] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the one module as Python itself would, and have the calls come after its code; leave others alone."""
        if name != self.name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for call in self.calls:
                call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader is for this module alone
        return spec
