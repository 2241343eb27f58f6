"""`--cluster NAME|FILE`: the words of a table in `manyhosts.toml` count as if they had been typed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from manyhosts.config import clusters
from manyhosts.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])
_NEVER = {"cluster", "help", "trace", "dry-run", "json"}
"""Options that say nothing about a cluster."""
_PAIRS = ("o", "env", "set")
"""Options that are a table in the table."""
_TABLE = "manyhosts.cluster"


def cluster_option(command: Command) -> Command:
    """Add `--cluster`. Other options override it; of `-o`, `--env` and `--set` both count."""
    return click.option(
        "--cluster",
        metavar="NAME|FILE",
        is_eager=True,  # before the options whose defaults it says
        expose_value=False,
        callback=_take,
        help="A table of manyhosts.toml, or a file, that holds any of these options.",
    )(command)


def with_table(context: click.Context, option: click.Parameter, typed: tuple[str, ...]) -> tuple[str, ...]:
    """The callback of an option that may be given several times: what the table says, then what is typed."""
    return (*context.meta.get(_TABLE, {}).get(option.name, ()), *typed)


def typed_first(words: Mapping[str, Any]) -> dict[str, Any]:
    """`words` without what a table says in another way than what was typed."""
    source = click.get_current_context().get_parameter_source
    typed = {name for name in words if source(name) is ParameterSource.COMMANDLINE}
    other = set()
    for names in (("hosts", "hostfile", "nodes"), ("workers", "workers_per_node")):
        if typed & set(names[:2]):
            other |= set(names)
    return {name: None if name in other - typed else value for name, value in words.items()}


def target_options(help: str) -> Callable[[Command], Command]:
    """`-o`: options of the target, where the command line has options of its own."""
    return click.option("-o", "options", multiple=True, metavar="K=V", callback=with_table, help=help)


def _take(context: click.Context, _: click.Parameter, wanted: str | None) -> None:
    if wanted is None:
        return
    path, table = clusters.read(wanted, Path.cwd())
    where = str(path) if wanted.endswith(".toml") else f"{path}, table {wanted}"
    options = {_name(option): option for option in _options_of(context.command)}
    known = {_name(option) for command in _family(context) for option in _options_of(command)} - _NEVER
    several = {name for name, option in options.items() if option.multiple}
    said = clusters.words(table, where, known, _PAIRS, several)
    here = {name: value for name, value in said.items() if name in options}
    context.meta[_TABLE] = {
        options[name].name: value if isinstance(value, tuple) else (str(value),)
        for name, value in here.items()
        if options[name].multiple
    }
    context.default_map = {
        str(options[name].name): _checked(options[name], value, context, where)
        for name, value in here.items()
        if not options[name].multiple
    }


def _options_of(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def _family(context: click.Context) -> list[click.Command]:
    """The verbs that share a table with this one: what is for another one is no slip of the pen here."""
    group = context.find_root().command
    found = [group.get_command(context, name) for name in ("run", "doctor")] if isinstance(group, click.Group) else []
    return [command for command in found if command is not None] or [context.command]


def _name(option: click.Option) -> str:
    return max(option.opts, key=len).lstrip("-")


def _checked(option: click.Option, value: Any, context: click.Context, where: str) -> Any:
    try:
        return option.type_cast_value(context, value)
    except click.BadParameter as wrong:
        raise ConfigError(f"{_name(option)} is {value!r}: {wrong.message}", where=where, fix="mend it there") from wrong
