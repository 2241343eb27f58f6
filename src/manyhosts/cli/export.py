"""`manyhosts export`: a trained model in a format to use elsewhere, verified."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from manyhosts.errors import ConfigError
from manyhosts.export.description import BATCHES, FORMATS, Description
from manyhosts.launchers.named_runs import directory_of
from manyhosts.records.chosen_run import run_directory


@click.command()
@click.option("--format", "kind", type=click.Choice(FORMATS), required=True, help="What to write.")
@click.option("--bf16", is_flag=True, help="Weights in bfloat16: half the size.")
@click.option("--int8", is_flag=True, help="Weights in int8: a quarter of the size.")
@click.option(
    "--snapshot", default="best", show_default=True, metavar="NAME", help='"best", "last", a step, or a folder.'
)
@click.option("--model", default="", metavar="NAME", help="Which one, of a run of mh.Run with several.")
@click.option(
    "--preprocess", default="", metavar="NAME", help="A function of the script, or module:function next to it."
)
@click.option("--licence", default="unknown", metavar="ID", help="Of the model, for its card, such as apache-2.0.")
@click.option("--output", metavar="DIR", help="Where the export goes.  [default: RUN/exports/FORMAT]")
@click.option("--json", "as_json", is_flag=True, help="Print export.json.")
@click.option("--dry-run", is_flag=True, help="Say what would be written where, and do nothing.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("run", metavar="RUN", callback=lambda *given: str(directory_of(given[-1])))
def export(
    run: str, kind: str, bf16: bool, int8: bool, output: str | None, dry_run: bool, as_json: bool, **words: str
) -> int:
    """Write the model of RUN (a directory, a handle or `last`) in another format, and compare it with the trained one.

    \b
    safetensors    the weights under the model's own names
    torch-export   a program that PyTorch alone loads, without manyhosts and without the script
    onnx           a program for onnxruntime and others
    hf             a folder for from_pretrained, of a transformers model

    The script is run up to its fit, in the working directory; nothing is trained. What was written must answer as the
    trained model on real samples (fp32 within 1e-5, bf16 1e-2, int8 the same first answer in 99 %), or nothing is left.
    """
    from manyhosts.export.export import Request
    from manyhosts.export.export import export as exported

    if bf16 and int8:
        raise ConfigError("both --bf16 and --int8 are given", where="--int8", fix="leave one of them out")
    request = Request(
        run_dir=run,
        format=kind,
        precision="bf16" if bf16 else "int8" if int8 else "fp32",
        snapshot=words["snapshot"],
        output=None if output is None else Path(output),
        preprocess=words["preprocess"],
        licence=words["licence"],
        model=words["model"],
    )
    if dry_run:
        run_directory(run)  # which says where there is none
        print(f"would write {request.format}, {request.precision}, of {request.snapshot} in {run} to {request.folder}")
        return 0
    with contextlib.redirect_stdout(sys.stderr):  # what the script prints is no part of the answer
        folder, described = exported(request, lambda line: print(f"{line} …", file=sys.stderr, flush=True))
    print((folder / "export.json").read_text() if as_json else _reported(folder, described))
    return 0


def _reported(folder: Path, described: Description) -> str:
    seen = described.verified
    sizes = ", ".join(map(str, BATCHES))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    alike = (
        f"the same first answer in {100 * seen['same_first_answers']:.1f} %"
        if "same_first_answers" in seen
        else f"largest difference {seen['largest_difference']:.1g}"
    )
    return "\n".join(
        [
            str(folder),
            f"  {described.format}, {described.precision}, {size / 1e6:.2f} MB, step {described.source['step']}",
            f"  answers as the trained model: {alike}, {seen['samples']} samples, batches of {sizes}",
            *(f"  in   {each}" for each in described.inputs),
            *(f"  out  {each}" for each in described.outputs),
        ]
    )
