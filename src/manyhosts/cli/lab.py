"""`manyhosts lab`: a practice cluster on this machine, and what happens to its hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click

from manyhosts.lab import folder
from manyhosts.lab.lab import Control, check, send_order
from manyhosts.lab.lab import lab as make_lab

_trace = click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
_name = click.option(
    "--lab", "name", default="", envvar="MANYHOSTS_LAB", metavar="NAME", help="Which lab, where there are several."
)
_ORDERS = {
    "cut": "Pull the cable of HOST.",
    "mend": "Put the cable of HOST back.",
    "freeze": "Stop everything that runs on HOST.",
    "thaw": "Let HOST continue.",
    "kill": "Cut the power of HOST.",
    "boot": "Switch HOST on again, with an empty disk.",
}


class _Lab(click.Group):
    """A group that runs a command after `--` in a new lab."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            args = [*args[:cut], "with", *args[cut + 1 :]]
        return super().parse_args(ctx, args)


@click.group(cls=_Lab, invoke_without_command=True, context_settings={"allow_interspersed_args": False})
@click.option("--hosts", type=int, default=4, show_default=True, metavar="N", help="How many; lab1, lab2, …")
@click.option("--bandwidth", default="1gbit", show_default=True, metavar="RATE", help="Of every cable: 100mbit, 1gbit.")
@click.option("--dry-run", is_flag=True, help="Say what would be made, and make nothing.")
@_trace
@click.pass_context
def lab(context: click.Context, hosts: int, bandwidth: str, dry_run: bool, trace: bool) -> int:
    """Make a practice cluster of N hosts on this Linux machine, and open a shell in it.

    In the shell, `manyhosts run --hosts lab1,lab2 train.py` works as on real machines, and so does `ssh lab1`. The
    hosts have names, addresses, disks and cables of their own; all is gone when the shell ends. `lab -- COMMAND…`
    runs one command in place of the shell. From a second terminal:

    manyhosts lab cut|mend|freeze|thaw|kill|boot HOST, manyhosts lab slow HOST RATE, manyhosts lab hosts
    """
    if context.invoked_subcommand is not None:
        context.obj = (hosts, bandwidth, dry_run)
        return 0
    return _open(hosts, bandwidth, dry_run, [os.environ.get("SHELL", "/bin/sh")])


@lab.command(
    "with",
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def with_command(wishes: tuple[int, str, bool], command: tuple[str, ...]) -> int:
    """What `lab -- COMMAND…` is: run COMMAND in a new lab, and end with its exit code."""
    return _open(*wishes, list(command))


def _order(order: str, words: str) -> click.Command:
    @_trace
    @_name
    @click.argument("host")
    def command(host: str, name: str, trace: bool) -> int:
        send_order(order, host, name=name)
        return 0

    return click.command(order, help=words)(command)


for _verb, _words in _ORDERS.items():
    lab.add_command(_order(_verb, _words))


@lab.command()
@click.argument("host")
@click.argument("rate")
@_name
@_trace
def slow(host: str, rate: str, name: str, trace: bool) -> int:
    """Make the cable of HOST as fast as RATE says: 100mbit."""
    send_order("slow", host, rate=rate, name=name)
    return 0


@lab.command("hosts")
@_name
@_trace
def list_hosts(name: str, trace: bool) -> int:
    """The hosts of the lab and their addresses."""
    for host, address in send_order("list", name=name)["hosts"].items():
        print(f"{host}  {address}")
    return 0


@lab.command()
@_trace
def clean(trace: bool) -> int:
    """Remove what labs have left whose owner was killed."""
    gone = folder.clean()
    print("\n".join(f"Removed {path}" for path in gone) if gone else "There is nothing to remove.")
    return 0


def _open(hosts: int, bandwidth: str, dry_run: bool, command: list[str]) -> int:
    """Make a lab, run `command` at its desk, and take the lab away."""
    check(hosts, bandwidth)
    here = Path.cwd()
    if dry_run:
        print(f"{hosts} hosts, lab1 to lab{hosts}, each on a cable of {bandwidth}; then: {' '.join(command)}")
        return 0
    own = (str(here).lstrip("/"),) if here != Path("/") else ()
    with make_lab(hosts, bandwidth=bandwidth, empty=own) as made:
        taking_orders = Control(made)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for what runs in the lab
        try:
            up = "are up, each on" if len(made) > 1 else "is up, on"
            print(f"manyhosts: {', '.join(made.names)} {up} {bandwidth}", file=sys.stderr, flush=True)
            variables = {"MANYHOSTS_LAB": made.folder.name, "PS1": r"(lab) \w\$ "}
            words = made.desk.command(command, folder=str(here), env=variables)
            return subprocess.call(words, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        finally:
            signal.signal(signal.SIGINT, before)
            taking_orders.close()
