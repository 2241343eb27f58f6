"""`manyhosts deploy`: what serves an export elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from manyhosts.errors import ConfigError
from manyhosts.export.description import Description

_TARGETS = ("docker", "apptainer", "kubernetes", "sagemaker", "ray")


@click.command()
@click.option("--to", type=click.Choice(_TARGETS), required=True, help="What is to serve it.")
@click.option("--name", default="model", show_default=True, metavar="NAME", help="Of the service.")
@click.option(
    "-o", "options", multiple=True, metavar="KEY=VALUE", help="An option of that target; an unknown one lists all."
)
@click.option("--output", metavar="DIR", help="Where it is written.  [default: next to EXPORT]")
@click.option("--apply", "applies", is_flag=True, help="Then build it, or hand it over.")
@click.option("--dry-run", is_flag=True, help="Say what would be written where, and do nothing.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("export", metavar="EXPORT")
def deploy(
    export: str,
    to: str,
    name: str,
    options: tuple[str, ...],
    output: str | None,
    applies: bool,
    dry_run: bool,
    trace: bool,
) -> int:
    """Write what serves EXPORT, a folder that `manyhosts export` made of format torch-export or onnx.

    \b
    docker, apptainer    a container recipe, with the model and everything that it needs
    kubernetes           Deployment, Service, autoscaler, and a Secret with the token
    sagemaker            a container recipe, and the requests for an endpoint with autoscaling
    ray                  an application of Ray Serve, with autoscaling
    """
    from manyhosts.deploy.deploy import Request, apply
    from manyhosts.deploy.deploy import deploy as deployed

    pairs = dict(_pair(word) for word in options)
    request = Request(
        export=Path(export).absolute(), to=to, name=name, output=Path(output) if output else None, options=pairs
    )
    if dry_run:
        Description.read(request.export)  # which says where there is none
        print(f"would write what serves {export} with {to} to {request.folder}")
        return 0
    folder, follows = deployed(request)
    print(folder)
    for line in follows:
        print(f"  {line}")
    if applies:
        apply(request, folder, follows)
    return 0


def _pair(word: str) -> tuple[str, str]:
    key, sign, value = word.partition("=")
    if not sign or not value:
        raise ConfigError(f"cannot read {word!r}", where="-o", fix="write it as -o key=value")
    return key, value
