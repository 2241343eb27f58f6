"""`manyhosts export`: a run's model in another format, verified on real samples, or nothing at all."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from manyhosts.errors import ConfigError, ManyhostsError, first_line
from manyhosts.export.card import write_card
from manyhosts.export.description import FORMATS, PRECISIONS, Description, Preprocessing, TensorSpec
from manyhosts.export.formats import BY_NAME, answers_of
from manyhosts.export.model_call import ModelCall
from manyhosts.export.verify import compare
from manyhosts.records.chosen_run import run_directory
from manyhosts.records.summary import Summary
from manyhosts.training.trained_script import TrainedRun, open_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be exported, and how."""

    run_dir: str
    format: str
    precision: str = "fp32"
    snapshot: str = "best"
    output: Path | None = None  # None: `exports/<format>` in the run directory, with the precision where it is not fp32
    preprocess: str = ""  # `function` of the script, or `module:function`, a file next to it
    licence: str = "unknown"
    model: str = ""  # which one of an mh.Run that has several

    def __post_init__(self) -> None:
        for name, value, known in (("--format", self.format, FORMATS), ("precision", self.precision, PRECISIONS)):
            if value not in known:
                raise ConfigError(f"there is no {value!r}", where=name, fix=f"choose one of: {', '.join(known)}")

    @property
    def folder(self) -> Path:
        """Where the export will be."""
        name = "-".join([*filter(None, [self.model]), self.format, *{self.precision} - {"fp32"}])
        return self.output or run_directory(self.run_dir).path / "exports" / name


def export(request: Request, tell: Callable[[str], None] = lambda _: None) -> tuple[Path, Description]:
    """Write the export of a run, compare it with the trained model, and put it in its place when it is complete.

    `tell` hears what is being done. An export that was there before is replaced when the new one has been verified.

    Raises:
        ConfigError: there is no such run or snapshot, the model cannot be written so, or a package is missing.
        NotTheSame: what was written answers otherwise; nothing of it is left.
    """
    folder = request.folder.absolute()
    if folder.exists() and not (folder / "export.json").exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("there is something else in its place", where=str(folder), fix="choose another --output DIR")
    writes, reads = BY_NAME[request.format]
    half = folder.with_name(f".{folder.name}.{os.getpid()}.half")
    tell("running the script up to fit, and loading the weights")
    with open_run(request.run_dir, snapshot=request.snapshot) as opened:
        run = opened.with_model(request.model)
        call = ModelCall(run)
        batches = list(call.batches())
        wanted = answers_of(call.program(), batches)
        described = replace(describe(run, call, wanted, batches), format=request.format, precision=request.precision)
        try:
            half.mkdir(parents=True)
            tell(f"writing {request.format}")
            writes(half, call, request.precision)
            tell(f"comparing with the trained model on {sum(len(row[0]) for row in batches)} samples")
            found = reads(half, call, batches, request.precision)
            verified = compare(wanted, found, call.outputs, precision=request.precision, where=str(run.snapshot))
            described = replace(
                described,
                verified=verified,
                licence=request.licence,
                preprocessing=_preprocessing(request.preprocess, run, half) if request.preprocess else None,
            )
            write_card(half, described)
            described.write(half)
            _put_in_place(half, folder)
        except ManyhostsError:
            raise
        except OSError as cause:
            raise ConfigError(
                f"cannot write the export: {cause.strerror or cause}", where=str(folder), fix="choose another --output"
            ) from cause
        except Exception as cause:  # of many kinds: whatever the library of the format cannot do with this model
            raise ConfigError(
                f"the model cannot be written as {request.format}, {request.precision}: {first_line(cause)}",
                where=str(run.snapshot),
                fix="choose another format or precision, such as --format safetensors",
            ) from cause
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return folder, Description.read(folder, check=False)


def describe(
    run: TrainedRun, call: ModelCall, answers: Sequence[tuple[Tensor, ...]], batches: Sequence[tuple[Tensor, ...]]
) -> Description:
    """What is known of the model before it is written. Its `format` is `run`: it is served out of its run directory."""
    summary = Summary.read(run.directory.summary) if run.directory.summary.exists() else None
    settings = {key: value for key, value in run.record.settings.items() if value is not None}
    return Description(
        format="run",
        precision="fp32",
        inputs=tuple(call.inputs),
        outputs=tuple(call.outputs),
        source={
            "run": run.directory.path.name,
            **({"model": run.named} if run.named else {}),
            "script": Path(run.record.script).name,
            "arguments": list(run.record.arguments),
            "snapshot": run.snapshot.name,
            "step": run.facts.step,
            "epoch": run.facts.epoch,
            "strategy": run.facts.strategy,
            "workers": run.record.workers,
            "settings": settings,
            "versions": dict(run.record.versions),
            "exported": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        data={
            "sets": {
                name: len(cast(Any, each)) if hasattr(each, "__len__") else None
                for name, each in run.data.sets().items()
            },
            "inputs": _moments(call.inputs, _training_inputs(call) or batches),
            "outputs": _moments(call.outputs, answers),
        },
        metrics={} if summary is None else {"validation": dict(summary.validation), "test": dict(summary.test)},
    )


def _training_inputs(call: ModelCall) -> list[tuple[Tensor, ...]]:
    """Inputs of the training set, for its mean and deviation: what a served model was made for."""
    return [] if call.run.data.train is None else [call.of_training(64)]


def _moments(specs: Sequence[TensorSpec], rows: Sequence[tuple[Tensor, ...]]) -> dict[str, dict[str, float]]:
    """Mean and deviation of each tensor over some samples."""
    found = {}
    for place, spec in enumerate(specs):
        values = torch.cat([row[place].detach().double().cpu().reshape(-1) for row in rows])
        found[spec.name] = {"mean": float(values.mean()), "deviation": float(values.std(correction=0))}
    return found


def named_function(word: str, run: TrainedRun) -> Any:
    """The function that `--preprocess` names.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = word.rpartition(":")
    try:
        function = getattr(importlib.import_module(module), name) if module else run.names[name]
    except (ImportError, AttributeError, KeyError) as cause:
        where = f"the module {module}" if module else f"the script {Path(run.record.script).name}"
        raise ConfigError(
            f"there is no function {name!r} in {where}",
            where="--preprocess",
            fix="name a function of the script, or module:function of a file next to it",
        ) from cause
    return function


def _preprocessing(word: str, run: TrainedRun, folder: Path) -> Preprocessing:
    """The file of the function, copied, after it was seen that it can be loaded from there by itself."""
    function = named_function(word, run)
    source = Path(inspect.getsourcefile(function) or run.record.script)
    if Path(source).resolve() == Path(run.record.script).resolve():
        text = source.read_text()
        if "__main__" not in text:
            raise ConfigError(
                f"{function.__name__} is in a script that trains as soon as it is imported",
                where="--preprocess",
                fix=f"move it into a file next to the script and name it as module:{function.__name__}, or train below "
                'if __name__ == "__main__":',
            )
    shutil.copy(source, folder / "preprocess.py")
    return Preprocessing(file="preprocess.py", function=function.__name__)


def _put_in_place(half: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(half, folder)
    shutil.rmtree(old, ignore_errors=True)
