"""The statistics of predictions: NumPy, SciPy and scikit-learn compute them, this chooses which.

Arrays have a row for each sample, in the dataset's order. Intervals hold 95 %: percentiles of resamples (bootstrap).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Kind = Literal["classes", "numbers", "other"]
LEVEL = 0.05
_BINS = 10
_FEWEST_RESAMPLES, _MOST_DRAWS = 200, 50_000_000
_PERCENT = (100 * LEVEL / 2, 100 - 100 * LEVEL / 2)


def kind_of(outputs: Array, targets: Array) -> Kind:
    """What a model predicts: one of several classes by a row of scores, numbers like the targets, or something else."""
    if targets.ndim == 1 and targets.dtype.kind in "iub" and outputs.ndim == 2 and outputs.shape[1] > 1:
        return "classes"
    if targets.dtype.kind == "f" and outputs.shape == targets.shape:
        return "numbers"
    return "other"


def resamples(samples: int, count: int) -> list[Array]:
    """`count` draws of `samples` out of as many, with replacement, the same each time; fewer of a very large set."""
    count = max(min(count, _MOST_DRAWS // max(samples, 1)), min(count, _FEWEST_RESAMPLES))
    generator = np.random.default_rng(0)
    return [generator.integers(0, samples, samples) for _ in range(count)]


def with_intervals(
    values: Callable[[Array], Mapping[str, float]], samples: int, draws: Sequence[Array]
) -> dict[str, dict[str, float]]:
    """Of each of `values` over given samples: over all of them, and the interval that the draws leave it."""
    found = values(np.arange(samples))
    drawn = [values(draw) for draw in draws]
    reported = {}
    for name, value in found.items():
        low, high = np.percentile([each[name] for each in drawn], _PERCENT)
        reported[name] = {"value": float(value), "low": float(low), "high": float(high)}
    return reported


def probabilities(outputs: Array) -> Array:
    """From scores: as they are where they are shares already, or else their softmax; shape (samples, classes)."""
    if (outputs >= 0).all() and np.allclose(outputs.sum(1), 1, atol=1e-4):
        return outputs.astype(np.float64)
    from scipy.special import softmax

    return np.asarray(softmax(outputs.astype(np.float64), axis=1))


def of_classes(outputs: Array, targets: Array) -> dict[str, Any]:
    """Precision, recall, F1 and count of each class, their confusion, and how far confidence is to be believed."""
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    shares = probabilities(outputs)
    predicted, confidence = shares.argmax(1), shares.max(1)
    labels = list(range(shares.shape[1]))
    columns = precision_recall_fscore_support(targets, predicted, labels=labels, zero_division=0)
    right = predicted == targets
    true, claimed = calibration_curve(right, confidence, n_bins=_BINS)
    # The bins of scikit-learn: a confidence on an edge belongs to the one below it.
    places = np.searchsorted(np.linspace(0, 1, _BINS + 1)[1:-1], confidence)
    counts = np.bincount(places, minlength=_BINS)
    counts = counts[counts > 0]
    return {
        "classes": [
            {"class": label, "precision": float(p), "recall": float(r), "f1": float(f), "samples": int(n)}
            for label, p, r, f, n in zip(labels, *columns, strict=True)
        ],
        "confusion": confusion_matrix(targets, predicted, labels=labels).tolist(),
        "calibration": {
            "expected_error": float((counts * np.abs(true - claimed)).sum() / counts.sum()),
            "bins": [
                {"confidence": float(c), "accuracy": float(t), "samples": int(n)}
                for c, t, n in zip(claimed, true, counts, strict=True)
            ],
        },
    }


def of_numbers(outputs: Array, targets: Array) -> dict[str, float]:
    """Mean absolute and root mean square error, and the share of the variance that is explained."""
    from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

    flat = [each.reshape(len(each), -1) for each in (targets, outputs)]
    return {
        "mean absolute error": float(mean_absolute_error(*flat)),
        "root mean square error": float(root_mean_squared_error(*flat)),
        "r2": float(r2_score(*flat)) if len(targets) > 1 else 0.0,
    }


def of_slices(values: Sequence[Any], right: Array | None, losses: Array) -> list[dict[str, Any]]:
    """Of the samples that share a value: how many, accuracy with Wilson's interval, mean loss; the worst first.

    Numbers of more than ten values are cut into quarters.
    """
    from scipy.stats import binomtest

    column = np.asarray(values)
    column = column.astype(str) if column.dtype.kind == "O" else column
    if column.dtype.kind in "fiu" and len(np.unique(column)) > _BINS:
        edges = np.quantile(column, [0.25, 0.5, 0.75])
        distinct = len(set(edges))
        digits = next((each for each in range(6, 17) if len({f"{edge:.{each}g}" for edge in edges}) == distinct), 17)
        low, middle, high = (f"{edge:.{digits}g}" for edge in edges)
        names = [f"below {low}", f"{low} to {middle}", f"{middle} to {high}", f"from {high}"]
        column = np.array(names)[np.searchsorted(edges, column, side="right")]
    found = []
    for value in np.unique(column):
        chosen = column == value
        reported: dict[str, Any] = {
            "slice": str(value),
            "samples": int(chosen.sum()),
            "loss": float(losses[chosen].mean()),
        }
        if right is not None:
            within = binomtest(int(right[chosen].sum()), int(chosen.sum())).proportion_ci(method="wilson")
            reported |= {"accuracy": float(right[chosen].mean()), "low": float(within.low), "high": float(within.high)}
        found.append(reported)
    return sorted(found, key=lambda each: (each.get("accuracy", 0.0), -each["loss"]))


def paired(
    first: Mapping[str, Array], second: Mapping[str, Array], draws: Sequence[Array], *, names: tuple[str, str]
) -> dict[str, Any]:
    """Whether two models differ on the same samples, and by how much: `losses`, and `right` where there are classes.

    Of right and wrong, McNemar's exact test over the samples that one of them alone gets right; of losses, Wilcoxon's
    signed-rank test. Differences are second less first.
    """
    from scipy.stats import binomtest, rankdata, wilcoxon

    gaps = {"loss": second["losses"] - first["losses"]}
    reported: dict[str, Any] = {"samples": len(gaps["loss"]), "level": LEVEL}
    if "right" in first and "right" in second:
        gaps["accuracy"] = second["right"].astype(float) - first["right"].astype(float)
        alone = int((gaps["accuracy"] < 0).sum()), int((gaps["accuracy"] > 0).sum())
        reported |= {"only_first_right": alone[0], "only_second_right": alone[1]}
        reported["test"], reported["p"] = (
            "McNemar, exact",
            float(binomtest(alone[0], sum(alone)).pvalue) if sum(alone) else 1.0,
        )
    else:
        same = not gaps["loss"].any()
        reported["test"], reported["p"] = (
            "Wilcoxon, signed ranks",
            1.0 if same else float(wilcoxon(gaps["loss"]).pvalue),
        )
        reported["rank_sum"] = float((np.sign(gaps["loss"]) * rankdata(np.abs(gaps["loss"]))).sum())
    reported["differences"] = with_intervals(
        lambda chosen: {name: float(gap[chosen].mean()) for name, gap in gaps.items()}, len(gaps["loss"]), draws
    )
    reported["differ"] = bool(reported["p"] < LEVEL)
    reported["verdict"] = _verdict(reported, names)
    return reported


def _verdict(reported: Mapping[str, Any], names: tuple[str, str]) -> str:
    what = "accuracy" if "accuracy" in reported["differences"] else "loss"
    gap = reported["differences"][what]
    span = f"by {gap['value']:+.4f} ({gap['low']:+.4f} to {gap['high']:+.4f})"
    if not reported["differ"]:
        return (
            f"no difference is shown: {names[1]} departs in {what} {span} on {reported['samples']:,} samples,"
            f" which chance alone does with p = {reported['p']:.2g}"
        )
    if gap["value"] * reported.get("rank_sum", gap["value"]) < 0:
        lower = names[1] if reported["rank_sum"] < 0 else names[0]
        return (
            f"no verdict: {lower} has the lower loss on most samples, p = {reported['p']:.2g} ({reported['test']}), "
            f"and the mean says the opposite: {names[1]} departs {span}, by samples that are far off"
        )
    better = (gap["value"] > 0) == (what == "accuracy")
    verdict = "better" if better else "worse"
    return f"{names[1]} is {verdict}: {what} departs {span}, p = {reported['p']:.2g} ({reported['test']})"
