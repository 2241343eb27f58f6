"""Options of `manyhosts run` that look closer at a training: a profile, and metrics to fetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from manyhosts.config import metrics_port, profile
from manyhosts.config.metrics_port import MetricsPort
from manyhosts.config.profile import ProfileRequest

OPTION_OF = {profile.VARIABLE: "--profile", metrics_port.VARIABLE: "--metrics-port"}
"""The option for each variable."""
_OPTIONS = (
    click.option(
        "--profile",
        metavar='"N steps"',
        help="Keep a trace of so many steps of rank 0, and what it says, in DIR/profile; 20 steps@0,3: of these ranks.",
    ),
    click.option(
        "--metrics-port",
        metavar="PORT",
        help="Serve metrics for Prometheus on rank 0's host, to that host alone; 0.0.0.0:PORT: to every host.",
    ),
)


def measuring_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add them to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def environment(steps: str | None, port: str | None) -> dict[str, str]:
    """The variables that carry them to the workers: the words of `--profile` and `--metrics-port`, None if not given.

    Raises:
        ConfigError: one cannot be read.
    """
    return {
        **({} if steps is None else ProfileRequest.parse(steps).to_environment()),
        **({} if port is None else MetricsPort.parse(port).to_environment()),
    }
