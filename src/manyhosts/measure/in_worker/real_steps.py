"""Real steps of several workers at once, from the passes to the update, gradients sent in one way after another.

What their parts say of them leaves out what only shows when all of it happens at once: threads that wait for cores,
memory that is got again in each step, workers that wait for each other in the midst of a pass.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from manyhosts.communication import volume
from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.communication.probe import Network
from manyhosts.communication.shared_norm import acting
from manyhosts.config.settings import Settings
from manyhosts.measure.in_worker.passes import Passes
from manyhosts.strategies.ddp import DataParallel
from manyhosts.strategies.strategy import Piece

WAYS = ("powersgd", "bf16", "none", "topk")
"""As far as there is time, first those whose steps wait for cores, which less is known of than of a network. Others
send as one of these does."""
_WARM, _FEWEST, _MOST = 2, 2, 12
"""Steps of each way that are not timed, in which memory is got and the order of gradients found; and those that are."""


def measure(
    passes: Passes, settings: Settings, *, samples: int, pass_s: float, network: Network, seconds: float
) -> dict[str, float]:
    """Compression → seconds of a step of `samples` samples of each worker, whose passes take `pass_s` seconds.

    All workers call this. A way is left out whose steps `seconds` are too few for, by what `network` carries, and all
    are where gradients are not summed in each step, or on a device that the host does not wait for.
    """
    components, strategy = passes.components, passes.components.strategy
    world = components.world
    if not isinstance(strategy, DataParallel) or world.device.type != "cpu" or settings.virtual_workers is not None:
        return {}
    sent = volume.all_reduce_bytes(sum(each.nbytes for each in components.trained.parameters()), world.size)
    shares = {"none": network.seconds(sent), "bf16": network.seconds(sent / 2)}
    own = strategy.config.compression
    own = own if isinstance(own, str) and own != "auto" else "none"
    names = [*([] if own in WAYS else [own]), *WAYS]
    step, until = step_of(passes, settings, samples), time.perf_counter() + seconds
    strategy.revocable = True  # as in a run, whose workers survive each other
    strategy.steps = max(strategy.steps, strategy.config.compression_warmup)  # steps before that send all as it is
    for group in components.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.0
    found = {}
    for number, name in enumerate(names):
        left = world.agree(until - time.perf_counter())
        if (_WARM + _FEWEST) * (pass_s + shares.get(name, 0.0)) > left:
            continue
        strategy.settle_on(name)  # the script's own way, too: it was made without that
        warm_s = world.agree(min(_timed(step) for _ in range(_WARM)))
        left = world.agree(until - time.perf_counter()) / (len(names) - number)
        count = max(_FEWEST, min(_MOST, math.floor(left / warm_s)))
        found[name] = statistics.median(_timed(step) for _ in range(count))
    if strategy.config.compression != own:
        strategy.settle_on(own)  # the loop may follow
    return found


def step_of(passes: Passes, settings: Settings, samples: int) -> Callable[[], None]:
    """What takes a step, as the loop does: passes over as many samples as a worker has, sums, clipping, the update."""
    components, batch = passes.components, passes.batches.of(samples)
    share = (
        components.batches.size if settings.batch_size is None else -(-components.batches.size // components.world.size)
    )
    count = max(1, round(share / samples))
    piece = Piece(bring=lambda: batch, samples=samples, weight=1 / (count * components.world.size), address=(0, 0, 0))

    def step() -> None:
        if isinstance(components.batch_norm, GlobalBatch):
            components.batch_norm.begin_step(count * samples * components.world.size)
        with acting(components.batch_norm):
            components.strategy.forward_backward(
                components.trained, [piece] * count, components.compute, components.precision.scale, [0.0]
            )
        if settings.clip_gradients is not None:
            components.precision.unscale(components.optimizer)
            components.strategy.clip_gradients(components.trained, settings.clip_gradients)
        components.strategy.update(components.trained, components.precision.stepper(components.optimizer))

    return step


def _timed(act: Callable[[], None]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin
