"""`manyhosts export`: a run's model in another format, verified on real samples, or nothing at all."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from manyhosts.errors import ConfigError, ManyhostsError, TrainingError, first_line
from manyhosts.export.description import FORMATS, PRECISIONS, Description, Preprocessing, TensorSpec
from manyhosts.export.formats import BY_NAME, answers_of
from manyhosts.export.model_call import ModelCall
from manyhosts.loss.weighing import targets_of
from manyhosts.records import metrics
from manyhosts.records.chosen_run import run_directory
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


def export(request: Request, report: Callable[[str], None] = lambda _: None) -> tuple[Path, Description]:
    """Write the export of a run, compare it with the trained model, and put it in its place when it is complete.

    `report` is called with what is being done. An export that was there before is replaced when the new one has been
    verified.

    Raises:
        ConfigError: there is no such run or snapshot, the model cannot be written so, or a package is missing.
        NotTheSame: what was written answers otherwise; nothing of it is left.
    """
    folder = request.folder.absolute()
    if folder.exists() and not (folder / "export.json").exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("there is something else in its place", where=str(folder), fix="choose another --output DIR")
    writes, reads = BY_NAME[request.format]
    half = folder.with_name(f".{folder.name}.{os.getpid()}.half")
    report("running the script up to fit, and loading the weights")
    with open_run(request.run_dir, snapshot=request.snapshot) as opened:
        run = opened.with_model(request.model)
        call = ModelCall(run)
        batches = list(call.batches())
        wanted = answers_of(call.program(), batches)
        described = replace(describe(run, call, wanted, batches), format=request.format, precision=request.precision)
        try:
            half.mkdir(parents=True)
            report(f"writing {request.format}")
            writes(half, call, request.precision)
            report(f"comparing with the trained model on {sum(len(row[0]) for row in batches)} samples")
            found = reads(half, call, batches, request.precision)
            verified = compare(
                wanted,
                found,
                call.outputs,
                precision=request.precision,
                where=str(run.snapshot),
                numbers=_predicts_numbers(call),
            )
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
        metrics=_metrics_of(run),
    )


def _metrics_of(run: TrainedRun) -> dict[str, dict[str, float]]:
    """What validations and tests have found of the weights of this step; nothing of others."""
    found: dict[str, dict[str, float]] = {}
    for line in metrics.stream(run.directory.metrics):
        step = line.get("weights_step" if line["event"] == "test" else "step", -1)
        if line["event"] in ("validation", "test") and step == run.facts.step:
            found[line["event"]] = dict(line["values"])
    return found


def _training_inputs(call: ModelCall) -> list[tuple[Tensor, ...]]:
    """Inputs of the training set, for its mean and deviation: what a served model was made for."""
    return [] if call.run.data.train is None else [call.of_training(64)]


def _moments(specs: Sequence[TensorSpec], rows: Sequence[tuple[Tensor, ...]]) -> dict[str, dict[str, float]]:
    """Mean and deviation of each tensor over some samples, numbers that are none left out."""
    found = {}
    for place, spec in enumerate(specs):
        values = torch.cat([row[place].detach().double().cpu().reshape(-1) for row in rows])
        finite = values[values.isfinite()]
        values = finite if len(finite) else torch.zeros(1)
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
        if isinstance(cause, ImportError) and getattr(cause, "name", None) not in (module, module.partition(".")[0]):
            what = f"the module {module} cannot be imported: {first_line(cause)}"
            raise ConfigError(what, where="--preprocess", fix="see that what it imports is installed") from cause
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
                f"{word} is in a script that trains as soon as it is imported",
                where="--preprocess",
                fix=f"move it into a file next to the script and name it as module:{word}, or train below "
                'if __name__ == "__main__":',
            )
    name = getattr(function, "__name__", "")
    shutil.copy(source, folder / "preprocess.py")
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, name], cwd=folder, capture_output=True, text=True, env=_without_paths()
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise ConfigError(
            f"{source.name} cannot be loaded away from its folder, as a server does: {why}",
            where=f"--preprocess {word}",
            fix="name a function with a name of its own, in a file that imports installed packages alone",
        )
    return Preprocessing(file="preprocess.py", function=name)


_ALONE = 'import runpy, sys; runpy.run_path("preprocess.py", run_name="manyhosts_preprocess")[sys.argv[1]]'


def _without_paths() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _put_in_place(half: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(half, folder)
    shutil.rmtree(old, ignore_errors=True)


_USE = {
    "safetensors": 'safetensors.torch.load_file("model.safetensors")  # int8: name * name.scale',
    "torch-export": 'torch.export.load("model.pt2").module()(*inputs)',
    "onnx": 'onnxruntime.InferenceSession("model.onnx").run(None, {name: array})',
    "hf": 'transformers.AutoModel.from_pretrained(".")  # or the class that the configuration names',
}


def write_card(folder: Path, described: Description) -> None:
    """Write README.md into `folder`; with the Hub's own header where huggingface_hub is there."""
    text = _text(described)
    try:
        from huggingface_hub import ModelCard, ModelCardData
    except ImportError:
        (folder / "README.md").write_text(text)
        return
    # "other" is the Hub's word for a licence that is not in its list.
    licence = "other" if described.licence == "unknown" else described.licence
    data = ModelCardData(license=licence, library_name="pytorch", tags=["manyhosts", described.format])
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / "README.md")


def _text(described: Description) -> str:
    source = described.source
    metrics = [
        f"| {which} | {name} | {value:.6g} |"
        for which, values in described.metrics.items()
        for name, value in values.items()
        if isinstance(value, int | float)
    ]
    return "\n".join(
        [
            f"# {source['script']}, step {source['step']}",
            "",
            f"Format {described.format}, {described.precision}. Licence: {described.licence}.",
            "",
            *_section("Use", ["```python", _USE.get(described.format, ""), "```"]),
            *_section("Inputs", [f"* {each}" for each in described.inputs]),
            *_section("Outputs", [f"* {each}" for each in described.outputs]),
            *_section("Metrics", ["| set | metric | value |", "|---|---|---:|", *metrics] if metrics else ["none"]),
            *_section("Data", [f"* {name}: {count} samples" for name, count in described.data["sets"].items()]),
            *_section("Preprocessing", [described.preprocessing.function if described.preprocessing else "none"]),
            *_section("Training", _lines({key: source[key] for key in ("run", "snapshot", "strategy", "workers")})),
            *_section("Versions", _lines(source["versions"])),
            *_section("Compared with the trained model", _lines(described.verified)),
        ]
    )


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""]


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"* {key}: {value}" for key, value in values.items()]


# Largest difference of an output, as a share of the largest value of that output, or of 1 where that is smaller
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
SAME_ANSWERS = 0.99
# The same, for an int8 model whose outputs are no scores to take the highest of
_INT8_NUMBERS = 5e-2


class NotTheSame(TrainingError):
    """What was written does not answer as the trained model."""


def compare(
    wanted: Sequence[tuple[Tensor, ...]],
    found: Sequence[tuple[Tensor, ...]],
    outputs: Sequence[TensorSpec],
    *,
    precision: str,
    where: str,
    numbers: bool = False,
) -> dict[str, Any]:
    """Compare answers batch by batch. Returns what was seen. `numbers`: they are no scores of classes.

    Raises:
        NotTheSame: they differ by more than `precision` allows.
    """
    gaps, same = [0.0], torch.zeros(0, dtype=torch.bool)
    for rows, others in zip(wanted, found, strict=True):
        for spec, one, other in zip(outputs, rows, others, strict=True):
            place = f"{spec.name}, batch of {len(one)}"
            gap = _gap(one, other, place, where)
            dim = None if numbers else _scores(one, spec)
            if precision != "int8" or dim is None:
                allowed = TOLERANCE.get(precision, _INT8_NUMBERS)
                if gap > allowed:
                    raise _wrong(f"a difference of {gap:.2g}, and {allowed:g} is allowed", place, where)
            else:
                same = torch.cat([same, (one.argmax(dim) == other.argmax(dim)).reshape(-1)])
            gaps.append(gap)
    reported: dict[str, Any] = {"samples": sum(len(row[0]) for row in wanted), "largest_difference": max(gaps)}
    if not len(same):
        return reported
    share = float(same.double().mean())
    if share < SAME_ANSWERS:
        raise _wrong(f"the same first answer in {share:.1%} of {len(same)} cases, and 99 % are wanted", "int8", where)
    return reported | {"same_first_answers": share}


def _predicts_numbers(call: ModelCall) -> bool:
    """Whether the targets are numbers, so that the highest of several outputs says nothing."""
    targets = targets_of(call.samples(2))
    return targets is not None and targets.is_floating_point()


def _gap(one: Tensor, other: Tensor, place: str, where: str) -> float:
    """The largest difference, as a share of the largest value or of 1; integers that differ are infinitely far.

    Raises:
        NotTheSame: the shapes differ, or one has NaN or infinity where the other has a number.
    """
    if one.shape != other.shape:
        raise _wrong(f"shape {tuple(other.shape)} in place of {tuple(one.shape)}", place, where)
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        raise _wrong("NaN or infinity in the place of numbers", place, where)
    wanted, found = one[finite].double(), other[finite].double()
    return float((wanted - found).abs().max() / max(1.0, float(wanted.abs().max()))) if len(wanted) else 0.0


def _scores(output: Tensor, spec: TensorSpec) -> int | None:
    """The dim of the classes; None for an output that has none. CrossEntropyLoss wants them in the second one.

    With more dims the one whose size never changes is taken, the last of them for transformers' `logits`.
    """
    if output.dim() < 2 or output.shape[1:].numel() < 2:
        return None
    return output.dim() - 1 if spec.name in ("logits", "last_hidden_state") else 1


def _wrong(what: str, place: str, where: str) -> NotTheSame:
    return NotTheSame(
        f"the export does not answer as the trained model: {what} ({place}); nothing was kept",
        where=where,
        fix="choose another format or precision, such as --format safetensors in fp32",
    )
