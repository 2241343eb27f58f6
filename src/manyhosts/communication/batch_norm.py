"""BatchNorm over the global batch, on every backend and device.

The mean and variance of each channel are those of the samples of all workers, so that the number of workers does not
change the model. PyTorch's SyncBatchNorm does the same but refuses CPU tensors. Workers may hold different numbers of
samples; one that holds a ghost (`ghost` set) takes part in the exchange and counts for nothing.

On CPUs, and on GPUs of one host, one exchange of a number per step, in which mode each layer is. Then one of 2 C + 1
numbers per layer in the forward pass, and one of 2 C in the backward pass, for C channels: through shared memory where
all workers are on one host, else over the wire. A backward pass that will be differentiated itself (a gradient penalty)
computes by operations that autograd knows; it has two more exchanges per layer.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from manyhosts.communication.collectives import Collectives
from manyhosts.communication.norm_kernels import kernels_for, wide
from manyhosts.communication.shared_norm import check_values, prepare, running_of
from manyhosts.communication.shared_rows import SharedRows, among
from manyhosts.errors import ConfigError


class GlobalBatch:
    """The samples of all workers: what the layers of one model share."""

    def __init__(
        self, members: Collectives, length: int, layers: Mapping[str, nn.modules.batchnorm._BatchNorm]
    ) -> None:
        """`length`: the most numbers that a layer exchanges; `layers`: all of them, by name."""
        self.members, self.length, self.layers = members, length, layers
        self.is_one_sample = False
        """Whether the global batch of the step is."""
        self.ghost = False
        """Whether the piece that is computed is a ghost, in its forward and in its backward pass."""
        self.exchange_s = 0.0
        """Seconds in exchanges so far; of a GPU, which does not wait in them, what it takes to ask for them."""
        self.exchanges = 0
        """How many there were."""
        self._made_for: object = None
        self._rows: SharedRows | None = None

    def begin_step(self, samples: int) -> None:
        """A step of so many samples begins: see that all workers exchange in the same layers. All of them call this.

        Modes are the host's, so GPUs of one host compare them in its memory. Not those of several: what travels over
        the wire comes by way of a device, for which the host would wait in every step.

        Raises:
            ConfigError: a layer is in evaluation mode on some workers, which the others would wait for.
        """
        self.is_one_sample = samples == 1
        memory, is_on_device = self._shared(), self.members.device.type != "cpu"
        if is_on_device and memory is None:
            return
        modes = [float(layer.training) for layer in self.layers.values()]
        known = torch.tensor([zlib.crc32(bytes(map(int, modes)))], dtype=torch.float64)
        reported = memory.stack(known) if is_on_device and memory is not None else self.stack(known)
        if bool((reported == known).all()):
            return
        rows = self.members.stack(torch.tensor(modes, dtype=torch.float64, device=self.members.device)).tolist()
        place = next(place for place, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1)
        ranks = [rank for rank, row in enumerate(rows) if not row[place]]
        raise ConfigError(
            f"the BatchNorm {list(self.layers)[place]!r} is in evaluation mode on rank {', '.join(map(str, ranks))} "
            "and in training mode on the others, which would wait for it",
            where=f"the model on rank {ranks[0]}",
            fix="call eval() and train() on every worker in the same step: in a callback, not in a listener, which is "
            "called on rank 0 alone",
        )

    def stack(self, row: Tensor) -> Tensor:
        """The rows of all workers, by rank; through shared memory where that can be."""
        begin = time.perf_counter()
        try:
            rows = self._shared() if row.device.type == "cpu" else None
            if rows is None or row.numel() > self.length:
                return self.members.stack(row, confirmed=False)
            found = rows.stack(row)
            self.members.count_waited(time.perf_counter() - begin)
            return found
        finally:
            self.exchange_s += time.perf_counter() - begin
            self.exchanges += 1

    def sum(self, own: Tensor) -> Tensor:
        """The sum of what all workers have, in the order of their ranks on CPUs, however it travels."""
        in_order = self.members.device.type == "cpu"
        return (
            self.stack(own.view(-1)).sum(0).view_as(own) if in_order else self.members.all_reduce(own, confirmed=False)
        )

    def _shared(self) -> SharedRows | None:
        """What these workers share; made again, by all of them together, where they have changed."""
        members = self.members
        if members.size == 1:
            return None
        if self._made_for is not members.group:
            self._rows = None  # its file goes with it, and this worker's lock
            self._rows = among(members, self.length, same_host=members.is_on_one_host, timeout_s=members.timeout_s)
            self._made_for = members.group
        return self._rows

    @property
    def is_shared_memory(self) -> bool:
        """Whether the last exchange went through memory."""
        return self._rows is not None and self.members.device.type == "cpu"

    def normalise(self, layer: nn.modules.batchnorm._BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """See `shared_norm.Batch`.

        Raises:
            ConfigError: see `check_values`.
        """
        if self.is_one_sample:
            check_values(input)
        return normalise_over(self, layer, input, track=track)


class Exchange(Protocol):
    """How workers exchange the statistics of a layer."""

    ghost: bool

    def stack(self, row: Tensor) -> Tensor:
        """The rows of all workers, shape (size, n), of one of shape (n,) from each."""

    def sum(self, own: Tensor) -> Tensor:
        """The sum of what all workers have."""


def normalise_over(exchange: Exchange, layer: nn.modules.batchnorm._BatchNorm, input: Tensor, *, track: bool) -> Tensor:
    """Normalise `input` of shape `(N, C, …)` by the statistics of all workers. `track`: see `shared_norm.Batch`."""
    output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
        input, layer.weight, layer.bias, layer.eps, exchange
    )
    if track:
        _track(layer, mean, variance, count)
    return cast(Tensor, output)


@torch.no_grad()
def _track(layer: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    running_mean, running_var, steps = running_of(layer)
    steps.add_(1)
    unbiased = variance * (count / (count - 1).clamp(min=1))
    for running, value in ((running_mean, mean), (running_var, unbiased)):
        if layer.momentum is not None:
            running.lerp_(value.to(running.dtype), layer.momentum)
        else:  # the mean over all steps; their number is not read, since that would be to wait for a GPU
            running.lerp_(value.to(running.dtype), steps.double().reciprocal().to(running.dtype))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, batch: Exchange
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kernels = kernels_for(x)
        channels = x.shape[1]
        mean, variance = kernels.statistics(x, eps)
        row = torch.cat([mean, variance, mean.new_full((1,), x.numel() // channels)])
        if batch.ghost:
            row.zero_()
        rows = batch.stack(row)
        counts = rows[:, -1:]
        count = counts.sum()
        shares = counts / count
        # Chan, Golub and LeVeque 1983: sums of squares around each worker's own mean lose no digits to cancellation.
        means = rows[:, :channels]
        mean = (means * shares).sum(0)
        variance = ((rows[:, channels:-1] + (means - mean).square()) * shares).sum(0)
        ctx.save_for_backward(x, weight, bias, mean, variance, counts)
        ctx.batch, ctx.ghost, ctx.eps, ctx.kernels = batch, batch.ghost, eps, kernels
        ctx.mark_non_differentiable(mean, variance, count)
        return kernels.output(x, weight, bias, mean, variance, eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, counts = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph: what comes out here is differentiated in its turn
            return *_differentiable(ctx, gradients[0]), None, None
        backward = ctx.kernels.backward(gradients[0], x, weight, mean, variance, ctx.eps)
        own = backward.sums
        to_bias, to_weight = own[0].clone(), own[1].clone()
        own = own.zero_() if ctx.ghost else own
        total = ctx.batch.sum(own)
        return (
            torch.zeros_like(x) if ctx.ghost else backward.to_input(total, counts.view(-1)),
            None if weight is None else to_weight.to(weight.dtype),
            None if bias is None else to_bias.to(bias.dtype),
            None,
            None,
        )


def _differentiable(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """What `backward` gives to x, weight and bias, by operations that can be differentiated again on all workers."""
    inputs = ctx.saved_tensors[:3]
    x, weight, bias = inputs
    count = ctx.saved_tensors[-1].sum()
    dims, shape = [dim for dim in range(x.dim()) if dim != 1], [1, -1, *[1] * (x.dim() - 2)]
    ghost = torch.tensor(ctx.ghost, device=x.device)
    values = wide(x)

    def mean_of(each: Tensor) -> Tensor:
        own = each.sum(dims)
        own = torch.where(ghost, torch.zeros_like(own), own)  # a ghost, too, exchanges in the backward pass of this
        total = cast(Tensor, _SumOverWorkers.apply(own, ctx.batch))  # type: ignore[no-untyped-call]
        mean: Tensor = total / count
        return mean.view(shape)

    centred = values - mean_of(values)
    output = centred * torch.rsqrt(mean_of(centred.square()) + ctx.eps)
    if weight is not None:
        output = output * wide(weight).view(shape)
    if bias is not None:
        output = output + wide(bias).view(shape)
    wanted = [each for each, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(output.to(x.dtype), wanted, gradient, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


class _SumOverWorkers(torch.autograd.Function):
    """The sum over the workers. A change of one worker's values changes the results of all, so gradients are summed."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, batch: Exchange) -> Tensor:
        ctx.batch = batch
        return batch.sum(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _SumOverWorkers.apply(gradients[0], ctx.batch), None  # type: ignore[no-untyped-call]


def make_global(model: nn.Module, members: Collectives) -> GlobalBatch | None:
    """Let every BatchNorm layer of `model` see the batch of all `members`. None where there is no such layer."""
    layers = prepare(model)
    if not layers:
        return None
    named = {name: layer for name, layer in model.named_modules() if layer in layers}
    return GlobalBatch(members, max(2 * layer.num_features + 1 for layer in layers), named)
