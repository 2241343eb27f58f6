"""Parameters that are not trained for a part of a run."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from manyhosts.callbacks.callback import Callback, Moment, counted
from manyhosts.errors import ConfigError


class Freeze(Callback):
    """Parameters that one of `names` fits are frozen from `start` on, and trained from `until` on.

    `mh.Freeze("backbone", until="3 epochs")` trains the rest alone for three epochs. `start=None`: from the beginning;
    `until=None`: to the end. BatchNorm layers keep following their batches: only parameters are frozen.
    """

    def __init__(self, *names: str, start: str | None = None, until: str | None = None) -> None:
        """`names`: `"backbone"` (all below it), or a pattern such as `"*.bias"`.

        Raises:
            ConfigError: there are none, or it would never freeze.
        """
        if not names or (wrong := [each for each in names if not isinstance(each, str)]):
            raise ConfigError(
                f"mh.Freeze is given a {type(wrong[0]).__name__}, no name"
                if names
                else "mh.Freeze is given no name, and freezes nothing",
                where="mh.Freeze(…)",
                fix='name what is frozen, each by itself: mh.Freeze("backbone", "neck", until="3 epochs")',
            )
        first, last = (None if text is None else counted(text) for text in (start, until))
        for unit in ("epochs", "steps"):
            begin, end = getattr(first, unit, None), getattr(last, unit, None)
            if begin is not None and end is not None and end <= begin:
                raise ConfigError(
                    f"it freezes from {start!r} until {until!r}, which is never",
                    where="mh.Freeze(…)",
                    fix="until= is when the parameters are trained again, counted from the run's start",
                )
        self.patterns, self.start, self.until = names, start, until
        self.name = (
            f"freeze {', '.join(names)}" + (f" from {start}" if start else "") + (f" until {until}" if until else "")
        )
        self.found: list[str] = []

    def prepare(self, model: nn.Module) -> Sequence[str]:
        """Find the parameters, and freeze them.

        Raises:
            ConfigError: a name fits none.
        """
        known = [name for name, each in model.named_parameters() if each.requires_grad]
        for pattern in self.patterns:
            if not any(matches(name, pattern) for name in known):
                if any(matches(name, pattern) for name, _ in model.named_parameters()):
                    raise ConfigError(
                        f"what is called {pattern!r}, or is below it, is frozen already",
                        where=f"mh.Freeze({pattern!r})",
                        fix="leave it out here, or where it is frozen: in the model, or by another mh.Freeze",
                    )
                raise ConfigError(
                    f"no trained parameter of the model is called {pattern!r}, or is below it",
                    where=f"mh.Freeze({pattern!r})",
                    fix=f"known: {', '.join(dict.fromkeys(name.partition('.')[0] for name in known))}, and below",
                )
        self.found = [name for name in known if any(matches(name, pattern) for pattern in self.patterns)]
        if len(self.found) == len(known) and self.start is None:
            raise ConfigError(
                "it freezes every parameter of the model, and nothing is left to train",
                where="mh.Freeze(…)",
                fix="name a part of the model, or say from when on: start=…",
            )
        if self.start is not None:
            return ()
        for name, parameter in model.named_parameters():
            if name in self.found:
                parameter.requires_grad_(False)
        return self.found if self.until is not None else ()

    def frozen_for_a_while(self) -> Sequence[str]:
        """All that it finds, where it freezes later or thaws."""
        return self.found if self.start is not None or self.until is not None else ()

    def begin(self, moment: Moment) -> None:
        """Freeze or thaw as it is to be at this moment."""
        freeze = self.start is None or moment.reached(self.start)
        thaw = self.until is not None and moment.reached(self.until)
        for name, parameter in moment.model.named_parameters():
            if name in self.found and parameter.requires_grad is not (wanted := not freeze or thaw):
                parameter.requires_grad_(wanted)
                parameter.grad = None

    def after_step(self, moment: Moment) -> None:
        """The same after each step."""
        self.begin(moment)


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter's name is `pattern`, is below it, or fits it as a file's name fits `*.txt`."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
