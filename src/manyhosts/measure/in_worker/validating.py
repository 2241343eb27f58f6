"""What a validation takes for each sample, by one worker, reading included."""

from __future__ import annotations

import copy
import time

from torch import nn

from manyhosts.evaluation.evaluate import Evaluation

_GROWS = 4


def measure(validation: Evaluation, model: nn.Module, *, seconds: float) -> float:
    """Seconds for a sample, by the first samples of the set: as many as `seconds` allow for."""
    passes = validation.passes
    _evaluate(validation, model, passes.batch)
    samples = min(passes.samples, passes.batch)
    spent = _evaluate(validation, model, samples)
    while samples < passes.samples and _GROWS * spent < seconds:
        samples = min(passes.samples, _GROWS * samples)
        spent = _evaluate(validation, model, samples)
    return spent / samples


def _evaluate(validation: Evaluation, model: nn.Module, samples: int) -> float:
    """Seconds that the first `samples` take, in the parts that a set of so many has."""
    part = copy.copy(validation)
    part.passes = copy.copy(validation.passes)
    part.passes.samples = min(samples, validation.passes.samples)
    begin = time.perf_counter()
    part(model)
    return time.perf_counter() - begin
