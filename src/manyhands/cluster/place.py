"""Where this process stands among the workers: what `torchrun` and `manyhands run` tell it by environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.errors import ConfigError

REHEARSING = "MANYHANDS_REHEARSING"
"""Set where a script for GPUs runs without them: `torch.cuda` then answers for some that are not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The ranks of one worker. A process that was started by hand is alone: rank 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    head_address: str = ""
    """Where the store is that the workers meet at."""
    head_port: int = 0
    restart: int = 0
    """How often the workers were started anew."""
    run_id: str = ""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Place:
        """Read torchrun's contract.

        Raises:
            ConfigError: some of the variables are set and others that belong to them are not.
        """
        variables = os.environ if variables is None else variables
        if "RANK" not in variables and "WORLD_SIZE" not in variables:
            return cls()
        size = _number(variables, "WORLD_SIZE")
        rank = _number(variables, "RANK")
        if not 0 <= rank < size:
            raise ConfigError(
                f"RANK is {rank}, but WORLD_SIZE is {size}",
                where="environment",
                fix="start it with `manyhands run`, or give ranks from 0 to WORLD_SIZE - 1",
            )
        local_size = _number(variables, "LOCAL_WORLD_SIZE", default=1 if size == 1 else size)
        return cls(
            rank=rank,
            size=size,
            local_rank=_number(variables, "LOCAL_RANK", default=rank % local_size),
            local_size=local_size,
            node_rank=_number(variables, "GROUP_RANK", default=rank // local_size),
            head_address=variables.get("MASTER_ADDR", "") if size == 1 else _text(variables, "MASTER_ADDR"),
            head_port=_number(variables, "MASTER_PORT", default=0 if size == 1 else None),
            restart=_number(variables, "TORCHELASTIC_RESTART_COUNT", default=0),
            run_id=variables.get("TORCHELASTIC_RUN_ID", ""),
        )


def _text(variables: Mapping[str, str], name: str) -> str:
    if name not in variables:
        raise ConfigError(
            f"{name} is not set, so this process does not know its place",
            where="environment",
            fix="start it with `manyhands run`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
        )
    return variables[name]


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in variables and default is not None:
        return default
    text = _text(variables, name)
    try:
        return int(text)
    except ValueError as cause:
        what = f"{name} is {text!r}, which is no number"
        raise ConfigError(what, where="environment", fix=f"unset {name}") from cause
