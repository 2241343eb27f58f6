"""`manyhosts join`: makes this machine a host of a run that was started on another one."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

import click

from manyhosts.errors import ConfigError

VARIABLE = "MANYHOSTS_JOIN_SECRET"
"""Holds the secret, for scripts."""
_LONGEST_SECRET = 1 << 10
"""Characters that are read of a file: a device may never end."""


@click.command()
@click.option("--secret-file", metavar="FILE", help=f"A file that holds the secret; {VARIABLE} may hold it, too.")
@click.option(
    "--address",
    default="",
    metavar="ADDRESS",
    help="The address of this machine at which workers of other hosts reach those here."
    "  [default: the one that leads to ADDRESS]",
)
@click.option("--folder", metavar="DIR", help="Where the project is on this machine.  [default: this folder]")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("head", metavar="ADDRESS[:PORT]")
def join(secret_file: str | None, address: str, folder: str | None, trace: bool, head: str) -> int:
    """Add this machine to the run whose `manyhosts run --on join` shows this line, until it is over.

    The run's secret is asked for. It lets the run start its workers here, as you; what they print is shown there.
    Ctrl-C takes this machine out of the run.
    """
    from manyhosts.control import joining  # here, for it loads OpenSSL
    from manyhosts.control.joining import JoinSecret

    place = Path(folder or ".").absolute()
    if not place.is_dir():
        raise ConfigError(f"there is no folder {place}", where="--folder", fix="name the one that holds the project")
    text, where = _secret(secret_file)
    secret = JoinSecret.parse(text, where=where)
    return joining.join(joining.Wish(head=head, secret=secret, folder=place, address=address))


def _secret(file: str | None) -> tuple[str, str]:
    """The secret, and where it came from: never from the command line, which all users of a machine can read."""
    if file is not None:
        try:
            with open(file) as opened:
                return opened.read(_LONGEST_SECRET), "--secret-file"
        except (OSError, UnicodeDecodeError) as cause:
            raise ConfigError(
                f"the secret cannot be read from {file}: {getattr(cause, 'strerror', None) or cause}",
                where="--secret-file",
                fix="name the file that holds it, and that only you may read",
            ) from cause
    if found := os.environ.pop(VARIABLE, ""):
        return found, VARIABLE
    if not sys.stdin.isatty():
        raise ConfigError(
            "the secret cannot be asked for, as the standard input is no terminal",
            where="manyhosts join",
            fix=f"give --secret-file FILE, or the variable {VARIABLE}",
        )
    return getpass.getpass("the secret of the run: "), "the secret"
