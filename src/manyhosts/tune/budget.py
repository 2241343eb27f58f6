"""What a search may cost: time, workers' time, money, trials; what it has cost, and the warnings before it is gone."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.planner import catalog
from manyhosts.units import Duration, seconds_in_words

LEVELS = (50, 80, 95)
"""Percent of the budget at which a warning is given."""
_EXAMPLES = "write it as '2h', '3 worker-hours', '$5' or '20 trials', or several with or between them: '2h or $5'"
_PATIENCE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a search has cost, up to now."""

    seconds: float = 0.0
    """Of the search, on the wall; not the time between one that was ended and the next."""
    worker_seconds: float = 0.0
    """Of all workers together, from the start of each run to its end."""
    money: float | None = None
    """In the price's currency; None: no price is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits, of which the first that is reached ends the search. None: no such limit."""

    text: str = ""
    seconds: float | None = None
    worker_seconds: float | None = None
    money: float | None = None
    trials: int | None = None

    @classmethod
    def parse(cls, text: str | None, trials: int | None, *, priced: bool) -> Budget:
        """Read `--budget`, and `--trials` next to it. `priced`: it is known what a worker costs.

        Raises:
            ConfigError: it cannot be read, or there is no limit at all, or no price for one of money.
        """
        limits: dict[str, Any] = {} if trials is None else {"trials": trials}
        for part in (text or "").split(" or ") if text else ():
            if not part.strip():
                what = (
                    f"the budget {text!r} has an empty limit: between double quotes the shell takes $5 for a variable"
                )
                raise ConfigError(what, where="--budget", fix="put it between single quotes: --budget '2h or $5'")
            kind, amount = _limit(part.strip())
            if kind in limits:
                raise ConfigError(f"the budget {text!r} limits one thing twice", where="--budget", fix=_EXAMPLES)
            limits[kind] = amount
        price = "say what a worker costs: --price 0.53/worker-hour, or --price CATALOG:NAME"
        for is_wrong, what, fix in (
            (not limits, "nothing says when the search ends", _EXAMPLES),
            (any(amount <= 0 for amount in limits.values()), "a budget of nothing", _EXAMPLES),
            ("money" in limits and not priced, "the budget is in money, and no price is given", price),
        ):
            if is_wrong:
                raise ConfigError(what, where="--budget", fix=fix)
        said = [*([text] if text else []), *([] if trials is None else [f"{trials} trials"])]
        return cls(text=" or ".join(said), **limits)

    def share(self, spent: Spent, trials: int) -> float:
        """How much of it is gone, of the limit that is nearest: 1 is all."""
        limits = (
            (self.seconds, spent.seconds),
            (self.worker_seconds, spent.worker_seconds),
            (self.money, spent.money or 0.0),
            (self.trials, trials),
        )
        return max([amount / limit for limit, amount in limits if limit is not None], default=0.0)

    def seconds_left(self, spent: Spent, workers: int, price_s: float) -> float:
        """How long `workers` may train on at once. `price_s`: what one costs in a second."""
        at_once = max(1, workers)
        limits = (
            (self.seconds, spent.seconds, 1.0),
            (self.worker_seconds, spent.worker_seconds, at_once),
            (self.money, spent.money or 0.0, price_s * at_once),
        )
        left = [(limit - gone) / rate for limit, gone, rate in limits if limit is not None and rate > 0]
        return min(left, default=math.inf)


def _limit(part: str) -> tuple[str, float]:
    """One limit: what it is of, and its amount."""
    if found := re.fullmatch(r"[$€£]\s*(\d+(?:\.\d+)?)|(\d+(?:\.\d+)?)\s*[$€£]", part):
        return "money", float(found[1] or found[2])
    if found := re.fullmatch(r"(\d+)\s*trials?", part):
        return "trials", int(found[1])
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*worker-?\s?(\w+)", part):
        return "worker_seconds", _seconds(f"{found[1]} {found[2]}")
    return "seconds", _seconds(part)


def _seconds(text: str) -> float:
    try:
        seconds = Duration.parse(text, where="--budget").seconds
    except ConfigError as error:
        raise ConfigError(error.what.replace("duration", "budget"), where="--budget", fix=_EXAMPLES) from error
    if seconds is None:
        raise ConfigError(f"the budget {text!r} is no time", where="--budget", fix=_EXAMPLES)
    return seconds


def price_of(text: str | None, workers_per_host: int) -> float | None:
    """What one worker costs in a second, of `--price 0.53/worker-hour`, `0.53/host-hour` or `CATALOG:NAME`.

    Raises:
        ConfigError: it cannot be read, or the catalog does not say it.
    """
    if text is None:
        return None
    if found := re.fullmatch(r"[$€£]?\s*(\d+(?:\.\d+)?)(?:\s*/\s*(worker|host)-hour)?", text.strip()):
        return float(found[1]) / 3600 / (1 if found[2] == "worker" else workers_per_host)
    file, _, name = text.rpartition(":") if ".toml:" in text else (text, "", "")
    if not file.endswith(".toml"):
        fix = "write it as 0.53/worker-hour, 0.53/host-hour or CATALOG.toml:NAME"
        raise ConfigError(f"cannot read the price {text!r}", where="--price", fix=fix)
    kinds = {kind.name: kind for kind in catalog.read(Path(file))}
    kind = kinds.get(name or next(iter(kinds)))
    if kind is None or kind.price is None:
        priced = [each.name for each in kinds.values() if each.price is not None]
        what = f"{file} has no price of {name or next(iter(kinds))}"
        raise ConfigError(what, where="--price", fix=f"with a price: {', '.join(priced) or 'none'}")
    return kind.price / 3600 / kind.workers


def in_words(spent: Spent) -> str:
    """For people."""
    words = [seconds_in_words(spent.seconds), f"{seconds_in_words(spent.worker_seconds)} of workers' time"]
    return ", ".join([*words, *([] if spent.money is None else [f"{spent.money:.2f} in money"])])


class Alarm:
    """Gives a warning wherever the user wants to hear of it."""

    def __init__(self, to: str | None, log: Path, say: Callable[[str], None]) -> None:
        """`to`: a command, which gets the sentence as its last word, or a URL, which gets it as JSON by POST."""
        self._to, self._log, self._say = to, log, say
        self._threads: list[threading.Thread] = []

    def give(self, level: int, budget: Budget, spent: Spent) -> None:
        """Say that `level` percent are gone; what is slow runs next to the search."""
        text = f"{level} % of the budget {budget.text} is spent, or needed to end in order: {in_words(spent)}"
        self._say(f"warning: {text}")
        record = {"event": "budget", "level": level, "text": text, "spent": asdict(spent)}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            log.write(json.dumps(record) + "\n")
        if self._to is not None:
            thread = threading.Thread(target=self._pass_on, args=(text, record), daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wait until everything is delivered, or has failed."""
        for thread in self._threads:
            thread.join(_PATIENCE_S)

    def _pass_on(self, text: str, record: dict[str, Any]) -> None:
        assert self._to is not None, "without an address nothing is passed on"
        try:
            if self._to.startswith(("http://", "https://")):
                request = urllib.request.Request(  # noqa: S310  # the user's own address
                    self._to, json.dumps(record).encode(), {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=_PATIENCE_S / 3):  # noqa: S310
                    return
            subprocess.run(
                [*shlex.split(self._to), text], check=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL, text=True
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._say(f"the warning has not reached {self._to}: {error}")
