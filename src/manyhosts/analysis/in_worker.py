"""Passes a model over held-out data, shared out over the workers, and has the first one write what comes of it.

manyhosts run --workers N -m manyhosts.analysis.in_worker REQUEST.json
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from manyhosts.analysis import statistics
from manyhosts.errors import ConfigError
from manyhosts.evaluation.metrics import scalars
from manyhosts.loss.weighing import class_mean, counted
from manyhosts.records import first_batch
from manyhosts.records.atomic_file import write_json
from manyhosts.records.numbers import to_words
from manyhosts.training.trained_script import TrainedRun, open_run

SCHEMA_VERSION = 1


def main(words: list[str] | None = None) -> None:
    """Do what the file of the first argument asks.

    Raises:
        ConfigError: the run has no such data, or its model gives nothing that can be looked at by sample.
    """
    asked = json.loads(Path((sys.argv[1:] if words is None else words)[0]).read_text())
    sys.argv = sys.argv[:1]
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    with open_run(asked["run"], snapshot=asked["snapshot"], strategy="ddp" if several else "single") as run:
        sets = run.data.sets()
        dataset = sets.get(asked["data"])
        if dataset is None:
            fix = f"--data takes what the script has: {', '.join(reversed(sets))}"
            raise ConfigError(f"the script gives no {asked['data']} data", where="mh.Data", fix=fix)
        found = run.trainer.predict(dataset, forward=_Forward(run), weights="last")
    # The workers part here: metrics that still saw a group would exchange their states with those that are gone.
    if run.trainer.is_main:
        _write(run, dataset, found, asked)


class _Forward:
    """What is kept of each sample: the model's outputs, its targets, its loss."""

    def __init__(self, run: TrainedRun) -> None:
        self._step, self._loss, self._where = run.trainer.user_step, run.trainer.loss, run.trainer.called_in
        self._has_counts, weighing = run.trainer.has_counts, run.trainer.components.weighing
        self._rule = weighing.rule or weighing.classes

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if self._step is None:
            inputs, targets = batch
            outputs = model(inputs)
        else:
            result = self._step(model, batch)
            if not isinstance(result, Mapping) or not {"outputs", "targets"} <= result.keys():
                raise ConfigError(
                    "it returns no 'outputs' and 'targets', so nothing is known of single samples",
                    where=self._where,
                    fix='return {"loss": loss, "outputs": outputs, "targets": targets}',
                )
            outputs, targets = result["outputs"], result["targets"]
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            raise ConfigError(
                f"the model gives a {type(outputs).__name__} for a {type(targets).__name__} of targets",
                where="the model",
                fix="give mh.Trainer a step that returns tensors as 'outputs' and 'targets'",
            )
        losses, counts = self._losses(batch, outputs, targets)
        found = {"outputs": outputs.float(), "targets": targets, "losses": losses, "counts": counts.double()}
        return (
            found if self._step is None else {**found, **self._of_step(batch, cast(Mapping[str, Any], result), losses)}
        )

    def _of_step(self, batch: Any, result: Mapping[str, Any], losses: Tensor) -> dict[str, Tensor]:
        """Of each sample the loss of its batch by the script's step, or each of several, and what it counts; and
        whether `losses` are the loss.
        """
        given = result["loss"]
        terms = {name: float(each) for name, each in (given if isinstance(given, Mapping) else {"": given}).items()}
        if self._has_counts and "count" in result:
            counts = {"": float(result["count"])}
        else:
            counts = counted(self._rule, batch) if self._rule is not None else {"": float(len(losses))}
        if "" in counts:
            terms = {"": sum(terms.values())}
        even = self._rule is None and len(terms) == 1
        same = even and math.isclose(float(losses.double().mean()), sum(terms.values()), rel_tol=1e-4, abs_tol=1e-8)
        whole = torch.ones(len(losses), dtype=torch.float64)
        by_term = {f"of_batch {name}": whole * each for name, each in terms.items()}
        shares = {f"share {name}": whole * counts[name] / len(losses) for name in terms}
        return {**by_term, **shares, "same": whole * same}

    def _losses(self, batch: Any, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each sample, and what it counts in the mean, as in training; both of shape (samples,)."""
        loss: Any = self._loss
        rule = class_mean(loss)
        if rule is None:
            counts = torch.ones(len(outputs), dtype=torch.float64)
            if loss is not None and self._rule is not None:  # the script's own weight
                ones = [tree_map(itemgetter(slice(k, k + 1)), batch) for k in range(len(outputs))]
                counts = torch.tensor([sum(counted(self._rule, one).values()) for one in ones], dtype=torch.float64)
            return self._of_samples(outputs, targets), counts
        counts = torch.tensor([rule((None, targets[k : k + 1])) for k in range(len(targets))], dtype=torch.float64)
        if isinstance(loss, nn.Module):
            loss = copy.copy(loss)
            loss.reduction = "none"  # one of PyTorch's, whose reduction is a text
        else:
            loss = functools.partial(loss, reduction="none")
        rows: Tensor = loss(outputs, targets)
        sums = rows.double().flatten(1).sum(1) if rows.dim() > 1 else rows.double()
        return torch.where(counts > 0, sums.cpu() / counts, 0.0).to(outputs.dtype), counts

    def _of_samples(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Any = self._loss
        if loss is None:  # a step has its own: what its outputs say of classes is used instead
            return _of_outputs(outputs, targets)
        if getattr(loss, "reduction", "") == "mean" and getattr(loss, "weight", None) is None:
            each = copy.copy(loss)
            each.reduction = "none"
            rows: Tensor = each(outputs, targets)
            if rows.shape[:1] == outputs.shape[:1]:
                return rows.flatten(1).mean(1) if rows.dim() > 1 else rows
        return torch.stack([loss(outputs[k : k + 1], targets[k : k + 1]).reshape(()) for k in range(len(outputs))])


def _of_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each sample the cross-entropy of its classes, or the squared error of its numbers, shape (samples,).

    Raises:
        ConfigError: they are neither scores of classes nor numbers in pairs.
    """
    classes = not targets.is_floating_point() and outputs.dim() == targets.dim() + 1
    if classes and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape):
        rows = nn.functional.cross_entropy(outputs, targets.long(), reduction="none")
    elif classes and outputs.shape[:-1] == targets.shape:  # a row of scores at each place, as language models give
        rows = nn.functional.cross_entropy(outputs.movedim(-1, 1), targets.long(), reduction="none")
    elif outputs.numel() == targets.numel():
        rows = (outputs - targets.reshape(outputs.shape)).square()
    else:
        raise ConfigError(
            f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)} are no pairs",
            where="step",
            fix='return as "outputs" and "targets" numbers of one shape, or scores of classes and their numbers',
        )
    return rows.reshape(len(rows), -1).mean(1)


def _write(run: TrainedRun, dataset: Any, found: Mapping[str, Tensor], asked: Mapping[str, Any]) -> None:
    """`analysis.json`, the numbers of each sample next to it, and pictures of the worst where they are pictures."""
    outputs, targets, losses = (found[name] for name in ("outputs", "targets", "losses"))
    if wrong := outputs.reshape(len(outputs), -1).isnan().any(1).nonzero().flatten().tolist():
        raise ConfigError(
            f"{len(wrong)} of {len(losses)} samples have an answer that is no number (nan)",
            where=f"{asked['data']} data, sample {', '.join(map(str, wrong[:5]))}",
            fix="see what the model makes of them, or leave them out of the set",
        )
    scores, labels = _of_two_classes(run.trainer.loss, outputs, targets) or (outputs, targets)
    arrays = {"outputs": scores.numpy(), "targets": labels.numpy(), "losses": losses.double().numpy()}
    samples, kind = len(losses), statistics.kind_of(arrays["outputs"], arrays["targets"])
    if kind == "numbers" and _is_of_classes(run.trainer.loss):
        kind = "other"  # several labels at once, or shares of them
    draws = statistics.resamples(samples, asked["resamples"])
    reported: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run": asked["run"],
        "data": asked["data"],
        "snapshot": str(run.snapshot),
        "step": run.facts.step,
        "time": time.time(),
        "samples": samples,
        "kind": kind,
        "resamples": len(draws),
        "values": _with_loss(found, statistics.with_intervals(_values(run, found, arrays, kind), samples, draws)),
    }
    kept: dict[str, Any] = {
        "losses": arrays["losses"],
        "targets": arrays["targets"],
        "loss": {"classes": "cross-entropy", "numbers": "squared error"}.get(kind, "")
        if run.trainer.loss is None
        else _name_of(run.trainer.loss),
    }
    right = None
    if kind == "classes":
        reported |= statistics.of_classes(arrays["outputs"], arrays["targets"])
        shares = statistics.probabilities(arrays["outputs"])
        right = shares.argmax(1) == arrays["targets"]
        kept |= {"predicted": shares.argmax(1), "confidence": shares.max(1), "right": right}
    elif kind == "numbers":
        kept["predicted"] = arrays["outputs"]
    worst = np.argsort(-arrays["losses"], kind="stable")[: asked["worst"]]
    reported["worst"] = [_sample(kept, int(index), kind) for index in worst]
    reported["slices"] = {name: _sliced(run, dataset, name, right, arrays["losses"]) for name in asked["slices"]}
    folder = Path(asked["to"])
    _keep_pictures(folder / "analysis-worst.npz", dataset, reported["worst"])
    with (folder / ".analysis.npz.half").open("wb") as file:
        np.savez_compressed(file, **kept)
    os.replace(folder / ".analysis.npz.half", folder / "analysis.npz")
    write_json(folder / "analysis.json", to_words(reported))


def _name_of(loss: Any) -> str:
    """What `loss` is and was made with: losses of another are not compared with it. Empty where no one can say."""
    if isinstance(loss, nn.Module):
        plain = {name: each for name, each in vars(loss).items() if isinstance(each, bool | int | float | str)}
        tensors = {name: each.tolist() for name, each in loss.state_dict().items()}
        return f"{type(loss).__qualname__} {sorted(plain.items())} {tensors}"
    if isinstance(loss, functools.partial):
        inner = _name_of(loss.func)
        return f"{inner} {sorted(loss.keywords.items())}" if inner and not loss.args else ""
    code = getattr(loss, "__code__", None)
    return f"{loss.__qualname__} {code.co_code.hex()} {code.co_consts}" if code and not loss.__closure__ else ""


def _is_of_classes(loss: Any) -> bool:
    """Whether `loss` takes each of its outputs for how sure a yes is."""
    kinds, functions = (
        (nn.BCEWithLogitsLoss, nn.BCELoss),
        (functional.binary_cross_entropy_with_logits, functional.binary_cross_entropy),
    )
    return isinstance(loss, kinds) or loss in functions


def _of_two_classes(loss: Any, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scores (samples, 2) and classes (samples,), where a number for each sample says which of two classes it is."""
    if not _is_of_classes(loss) or outputs[0].numel() != 1 or not ((targets == 0) | (targets == 1)).all():
        return None
    yes = outputs.reshape(-1, 1).double()
    are_shares = isinstance(loss, nn.BCELoss) or loss is functional.binary_cross_entropy
    no = 1 - yes if are_shares else torch.zeros_like(yes)
    return torch.cat([no, yes], dim=1), targets.reshape(-1).long()


def _values(run: TrainedRun, found: Mapping[str, Tensor], arrays: Mapping[str, Any], kind: str) -> Any:
    """The loss and every metric of the script over chosen samples."""
    outputs, targets, losses = (found[name] for name in ("outputs", "targets", "losses"))
    metrics = {name: copy.deepcopy(metric).cpu() for name, metric in run.trainer.metrics.items()}

    def values(chosen: Any) -> dict[str, float]:
        rows = torch.from_numpy(chosen)
        counts = found["counts"][rows]
        mean = (losses[rows].double() * counts).sum() / counts.sum()
        reported = {_name_of_losses(found): float(mean)}
        for name, metric in metrics.items():
            metric.reset()
            metric.update(outputs[rows], targets[rows])
            reported |= scalars(name, metric.compute())
        if kind == "numbers":
            reported |= statistics.of_numbers(outputs[rows].numpy(), targets[rows].numpy())
        elif kind == "classes" and "accuracy" not in reported:
            reported["accuracy"] = float((arrays["outputs"][chosen].argmax(1) == arrays["targets"][chosen]).mean())
        return reported

    return values


def _name_of_losses(found: Mapping[str, Tensor]) -> str:
    """What the losses of samples are: the script's, or what its outputs and targets say where a step has its own."""
    return "loss" if "same" not in found or bool(found["same"].all()) else "error of outputs"


def _with_loss(found: Mapping[str, Tensor], values: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """`values` with the script's own loss before them, where samples have another one: its interval is not known."""
    if "loss" in values:
        return values
    names = [name.removeprefix("share ") for name in found if name.startswith("share ")]
    sums = {name: (found[f"of_batch {name}"] * found[f"share {name}"]).sum() for name in names}
    means = [float(sums[name] / total) for name in names if (total := found[f"share {name}"].sum()) > 0]
    return {"loss": {"value": sum(means)}, **values}


def _sample(kept: Mapping[str, Any], index: int, kind: str) -> dict[str, Any]:
    reported: dict[str, Any] = {"index": index, "loss": float(kept["losses"][index])}
    if kind == "classes":
        reported |= {name: int(kept[key][index]) for name, key in (("target", "targets"), ("predicted", "predicted"))}
        reported["confidence"] = float(kept["confidence"][index])
    return reported


def _sliced(run: TrainedRun, dataset: Any, name: str, right: Any, losses: Any) -> list[dict[str, Any]]:
    rule = run.names.get(name)
    if rule is None:
        raise ConfigError(
            f"the script has no {name!r}",
            where="--slice",
            fix="name a function of a sample, or a list with a value each",
        )
    values = [rule(dataset[index]) for index in range(len(dataset))] if callable(rule) else list(rule)
    if len(values) != len(losses):
        raise ConfigError(
            f"{name} has {len(values)} values, and there are {len(losses)} samples",
            where="--slice",
            fix="give one each",
        )
    plain = [value.item() if isinstance(value, Tensor) else value for value in values]
    return statistics.of_slices(plain, right, losses)


def _keep_pictures(path: Path, dataset: Any, worst: list[dict[str, Any]]) -> None:
    path.unlink(missing_ok=True)
    inputs = [dataset[each["index"]] for each in worst]
    tensors = [each[0] if isinstance(each, tuple | list) else each for each in inputs]
    if tensors and all(isinstance(each, Tensor) and each.shape == tensors[0].shape for each in tensors):
        found = first_batch.pictures_of(torch.stack(tensors).float().numpy(), None, len(tensors))
        if found is not None:
            labels = tuple(
                f"{each['index']}: {each['predicted']} for {each['target']}" if "target" in each else str(each["index"])
                for each in worst
            )
            first_batch.write(path, first_batch.FirstBatch(found.pixels, labels))


if __name__ == "__main__":
    main()
