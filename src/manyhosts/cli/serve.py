"""`manyhosts serve`: serve a trained model over HTTP."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from manyhosts.cli.progress import Progress
from manyhosts.errors import ConfigError
from manyhosts.launchers.named_runs import directory_of
from manyhosts.records.chosen_run import no_run

_LIBRARIES = "pip install starlette uvicorn prometheus_client"

TOKEN = "MANYHOSTS_SERVE_TOKEN"  # noqa: S105  # the name of a variable
_SENDABLE = re.compile(r"[\x21-\x7e]{8,}")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, metavar="H", help="Address to listen on.")
@click.option(
    "--port", default=8000, type=click.IntRange(0, 65535), show_default=True, metavar="P", help="0 takes a free one."
)
@click.option(
    "--snapshot", default="best", show_default=True, metavar="NAME", help='"best", "last", or a step, of a run.'
)
@click.option("--model", default="", metavar="NAME", help="Which one, of a run of mh.Run with several.")
@click.option("--follow", is_flag=True, help="Take over new snapshots of the run as they appear.")
@click.option(
    "--preprocess", default="", metavar="NAME", help="A function of the script, or module:function, of a run."
)
@click.option(
    "--workers", default=1, show_default=True, metavar="N", help="Processes that the model is cut over, of a run."
)
@click.option("--threads", default=0, metavar="N", help="Of each process.  [default: as PyTorch chooses]")
@click.option("--batch", default=32, show_default=True, metavar="N", help="Most samples computed at once.")
@click.option("--batch-wait", default=2.0, show_default=True, metavar="MS", help="How long a request waits for others.")
@click.option("--queue", default=256, show_default=True, metavar="N", help="Most requests that wait; others get a 503.")
@click.option("--max-body", default=8.0, show_default=True, metavar="MB", help="Largest request.")
@click.option("--max-samples", default=256, show_default=True, metavar="N", help="Most samples in a request.")
@click.option("--body-timeout", default=10.0, show_default=True, metavar="S", help="For a request to arrive.")
@click.option("--timeout", default=60.0, show_default=True, metavar="S", help="For the model to compute a batch.")
@click.option("--grace", default=30.0, show_default=True, metavar="S", help="For requests under way at the end.")
@click.option("--keep", metavar="FOLDER", help="Keep some of what is served there, for the next training.")
@click.option("--keep-share", default=0.01, show_default=True, metavar="F", help="Share of the samples that is kept.")
@click.option("--keep-mb", default=100.0, show_default=True, metavar="MB", help="Size of that folder; the oldest go.")
@click.option("--behind-sagemaker", is_flag=True, help="In a container of SageMaker, which checks who asks before.")
@click.option("--dry-run", is_flag=True, help="Say what would be served where, and start nothing.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("folder", metavar="RUN|EXPORT", callback=lambda *given: str(directory_of(given[-1])))
def serve(folder: str, dry_run: bool, trace: bool, **words: Any) -> int:
    """Serve a model until Ctrl-C or SIGTERM: an export (torch-export, onnx) or a run (its directory, a handle, `last`).

    POST /predict takes {"inputs": [...]} and answers {"outputs": [...]}, one for each sample, in JSON or safetensors.
    /docs says what the model takes; /healthz, /readyz and /metrics are for monitoring.

    Off this machine every request must have the token of MANYHOSTS_SERVE_TOKEN; where that is not set, one is made
    and printed.
    """
    path = Path(folder).absolute()
    _check_numbers(words)
    _check_what(path, words)
    if dry_run:
        print(f"would serve {path} on {words['host']} port {words['port']}")
        return 0
    progress = Progress(sys.stderr, silent=False)
    progress.doing("opening the model")
    try:
        from manyhosts.serve.app import Limits, Options, is_loopback
        from manyhosts.serve.serve import serve as served
        from manyhosts.serve.workers import Served
    except ModuleNotFoundError as cause:
        progress.close()
        raise ConfigError(
            f"serving takes {cause.name}, which is not installed",
            where="serve",
            fix="in a clone of manyhosts: pip install '.[serve]'",
        ) from cause
    token, made = _token(is_loopback(words["host"]) or words["behind_sagemaker"])
    options = Options(
        served=Served(
            folder=path,
            snapshot=words["snapshot"],
            model=words["model"],
            preprocess=words["preprocess"],
            workers=words["workers"],
            threads=words["threads"],
            answer_s=words["timeout"],
        ),
        host=words["host"],
        port=words["port"],
        token=token,
        follow=words["follow"],
        behind_sagemaker=words["behind_sagemaker"],
        limits=Limits(
            body_bytes=round(words["max_body"] * 1e6),
            samples=words["max_samples"],
            body_s=words["body_timeout"],
            queue=words["queue"],
            batch=words["batch"],
            batch_wait_s=words["batch_wait"] / 1000,
        ),
        keep=Path(words["keep"]) if words["keep"] else None,
        keep_share=words["keep_share"],
        keep_bytes=round(words["keep_mb"] * 1e6),
        grace_s=words["grace"],
    )

    def announce(address: str) -> None:
        progress.close()
        print(f"serving {path} at {address}", file=sys.stderr)
        if made:
            print(f"token: {token}", file=sys.stderr)
        shown = token if made else f"${TOKEN}"
        header = f'-H "Authorization: Bearer {shown}" ' if token else ""
        print(f"  curl {header}{address}/readyz", file=sys.stderr)
        print(f"  requests go to {address}/predict; {address}/docs says what they hold", file=sys.stderr)
        sys.stderr.flush()

    with contextlib.closing(progress):
        served(options, announce)
    return 0


_FROM = {
    **dict.fromkeys(("workers", "batch", "queue", "max_samples"), "1"),
    **dict.fromkeys(("batch_wait", "grace", "threads"), "0"),
    **dict.fromkeys(("max_body", "body_timeout", "timeout", "keep_share", "keep_mb"), "above 0"),
}
"""What each number is at least."""


def _check_numbers(words: Mapping[str, Any]) -> None:
    """See that each number is one that it can be.

    Raises:
        ConfigError: one is not.
    """
    for key, least in _FROM.items():
        value, bound = words[key], float(least.removeprefix("above "))
        if not bound <= value < math.inf or (value == bound and least.startswith("above")):
            option = f"--{key.replace('_', '-')}"
            fix = f"give a number {least}" if least.startswith("above") else f"give a number from {least} on"
            raise ConfigError(f"{option} is {value}", where=option, fix=fix)


def _check_what(path: Path, words: Mapping[str, Any]) -> None:
    """See that `path` is a run or an export, and that what is asked goes with it.

    Raises:
        ConfigError: it is neither, or it does not.
    """
    source = click.get_current_context().get_parameter_source
    typed = [key for key in words if source(key) is ParameterSource.COMMANDLINE]
    if not words["keep"] and (idle := [key for key in ("keep_share", "keep_mb") if key in typed]):
        option = f"--{idle[0].replace('_', '-')}"
        what = f"{option} says how much is kept, and nothing is"
        raise ConfigError(what, where=option, fix="give --keep FOLDER, too")
    if (path / "run.json").exists():
        return
    if not (path / "export.json").exists():
        fix = "give a run directory, or a folder that `manyhosts export` has made"
        raise no_run(path, "this is neither an export nor a run", fix=fix)
    for key in ("follow", "preprocess", "model", "snapshot"):
        if key in typed:
            what = f"--{key} is for a run, and this is an export, of one model and one snapshot"
            raise ConfigError(what, where=f"--{key}", fix="leave it out, or serve the run")
    if words["workers"] > 1:
        raise ConfigError("an export is not cut over workers", where="--workers", fix="serve the run")


def _token(is_free: bool) -> tuple[str, bool]:
    """The token that clients must know, and whether it was made now; none where only this machine may ask.

    Raises:
        ConfigError: that of the environment is none that a header can carry.
    """
    given = os.environ.get(TOKEN, "")
    if given and not _SENDABLE.fullmatch(given):
        raise ConfigError(
            "the token must be at least 8 characters without spaces", where=TOKEN, fix="leave it out to have one made"
        )
    if given or is_free:
        return given, False
    return secrets.token_urlsafe(24), True
