"""What a few steps on one worker showed of a training, and the figures of a network: all that a prediction is made of.

Every value is of one worker that is alone on its device, with nothing exchanged. Seconds and bytes, unless said.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from manyhosts.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A piece of the gradient that is exchanged at once; in the order in which they become ready."""

    bytes: int
    ready: float
    """The share of the backward pass, from 0 to 1, that has run when its last gradient is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """One measured size of a micro-batch: the samples of one forward and one backward pass."""

    samples: int
    forward_s: float
    """Median of one forward pass, the loss included."""
    backward_s: float
    """Median of one backward pass."""
    spread_s: float
    """Standard deviation of forward and backward together, from one pass to another."""
    activation_bytes: int
    """What the forward pass leaves for the backward pass; of a GPU, what both passes hold at most."""
    backward_bytes: int = 0
    """What the backward pass holds at most in addition to these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """What one way to send less makes of this model's gradient."""

    arithmetic_s: float
    """Packing and unpacking the full gradient once."""
    processor_s: float = 0.0
    """Of all cores together, for the same. 0: not known."""
    reduced_bytes: int
    """What is summed over the workers: each sends `2 (W-1)/W` of it. What travels uncompressed counts here too."""
    gathered_bytes: int
    """What each worker sends to every other one: `W-1` times."""
    exchanges: int
    """Collectives in a step."""
    through_owners: bool = False
    """Whether what is summed goes to the owner of each part and from there to all, in full messages, not in a ring."""
    spread: float = 0.0
    """Standard deviation of the arithmetic, over itself. 0: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InParts:
    """What a worker computes more where it holds parts of the model, waiting for others left out."""

    passes_s: float
    """Of a forward and a backward pass: units put in their places and let go of, gradients split and added up."""
    regather_s: float
    """More, where units are put together again for the backward pass."""
    update_s: float
    """Of the optimizer's step, however small this worker's parts are: PyTorch looks at each of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One of the blocks of a model that calls them one after the other."""

    share: float
    """Of the seconds of a forward and a backward pass."""
    parameter_bytes: int
    """Of the parameters that no block before it has."""
    sent_bytes: float
    """That it gives the next one, of each sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutLayers:
    """The layers of a model that can be cut over workers."""

    parameter_bytes: int
    """Of their parameters."""
    exchanges: int
    """Sums and gatherings in a forward and a backward pass."""
    exchanged_bytes: float
    """Of the tensors that are summed or put together in them, of each sample."""


_NETWORK = re.compile(r"""
    \s* (?P<amount> \d+ (?:\.\d+)? ) \s* (?P<prefix> [kKmMgGtT]? ) (?P<unit> [bB]it | b | B ) (?: /s | ps )? \s*
    (?: , \s* (?P<latency> \d+ (?:\.\d+)? ) \s* (?P<scale> s | ms | us | µs ) \s* )?
""", re.VERBOSE)  # fmt: skip
"""A `B` is a byte, a `b` a bit, as network and memory makers write."""
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_LATENCY_S = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A connection: between machines, or between the workers of one."""

    latency_s: float
    """Of one message of next to nothing, from one worker to another."""
    bytes_per_second: float
    """Of one machine's connection in one direction; within a machine, of what its workers share."""
    owners_bytes_per_second: float = 0.0
    """The same where each worker sends every other one its part in one message, as sums through owners do. TCP keeps
    up with those less well than with the small pieces of a ring. 0: not known, so as well."""
    processor_s_per_message: float = 0.0
    """That a message keeps a core of its sender busy, to send one and to take one in. 0: not known."""
    processor_s_per_byte: float = 0.0
    """The same for each byte."""
    spread: float = 0.0
    """Standard deviation of what messages took, over itself. 0: not known."""

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_number(each.name, getattr(self, each.name))
        if not self.bytes_per_second:
            raise ConfigError("a network of 0 bytes a second carries nothing", where="bytes_per_second", fix=_AGAIN)

    @classmethod
    def parse(cls, text: str, *, where: str) -> Network:
        """Read `10 Gbit/s, 0.1 ms` or `600 GB/s`; without a latency it is that of Ethernet within a room, 0.1 ms.

        Raises:
            ConfigError: the text is no network.
        """
        found = _NETWORK.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"cannot read the network {text!r}", where=where, fix='write it as "10 Gbit/s, 0.1 ms" or "600 GB/s"'
            )
        size = float(found["amount"]) * 1000.0 ** " kmgt".index(found["prefix"].lower() or " ")
        latency = found["latency"]
        return cls(
            latency_s=_LATENCY_S if latency is None else float(latency) * _SECONDS[found["scale"]],
            bytes_per_second=size if found["unit"] == "B" else size / 8,
        )

    def slower(self, times: float) -> Network:
        """One on which everything takes so many times as long."""
        return replace(
            self,
            latency_s=self.latency_s * times,
            bytes_per_second=self.bytes_per_second / times,
            owners_bytes_per_second=self.owners_bytes_per_second / times,
            processor_s_per_message=self.processor_s_per_message * times,
            processor_s_per_byte=self.processor_s_per_byte * times,
        )

    def __str__(self) -> str:
        return f"{self.bytes_per_second * 8 / 1e9:.3g} Gbit/s, {self.latency_s * 1e3:.2g} ms"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """Several workers at once, as many as will train, for some seconds."""

    nodes: int
    workers_per_node: int
    hosts_per_machine: int = 1
    """See `Group`."""
    network: Network
    """Between them."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """Compression → seconds of a real step of theirs, from its passes to its update: without its samples and what is
    between two steps. Of those that there was time for."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Compression → how many times as long that is as its parts make it: see `planner.strategies.ddp.compared`."""
    full_step_s: float = 0.0
    """Of a step of the script's own with everything in it. 0: not timed, for no loader shares the cores with it."""
    full_times: float = 0.0
    """How many times as long that is as its parts make it. 0: not known."""

    @property
    def workers(self) -> int:
        """All of them."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One training, as one worker of it showed it."""

    compute: tuple[Compute, ...]
    """By samples, the smallest first; at least one."""
    update_s: float
    """Clipping and the optimizer's step."""
    step_other_s: float
    """What a step takes besides data, compute, exchange and update."""
    full_step_s: float = 0.0
    """Of one of several steps in a row, with everything in it. 0: too few were timed, or loader processes had begun
    before them."""
    full_times: float = 1.0
    """How many times as long that is as its parts make it: see `planner.strategies.ddp.compared`."""
    buckets: tuple[Bucket, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    update_bytes: int = 0
    """What the optimizer's step holds for a while in addition to what it keeps."""
    unit_bytes: tuple[int, ...] = ()
    """Of the parameters of each unit that the model can be cut into, in the order of the forward pass; last of what no
    unit holds. Empty: it cannot be cut into units."""
    tail_bytes: int = 0
    """Of the parameters after the last unit, whose gradients come first."""
    blocks: tuple[Block, ...] = ()
    """In their order; what is before the first one and after the last one counts as theirs. Empty: the model is
    no chain of blocks."""
    cut_layers: CutLayers | None = None
    """None: there are none, or they were not found."""
    loader_samples_per_second: float
    """That one worker's loader gives when nothing waits for it, on a machine of its own. Infinite: JSON `null`."""
    loader_processes: int
    """That fetch for one worker; 0: it fetches for itself, between its steps."""
    loader_processor_s: float | None = None
    """That a sample keeps cores busy, those of all these processes together; None: not known, so all the while."""
    samples: int
    """Of one epoch."""
    global_batch: int
    """Samples of one optimizer step, over all workers; where `batch_grows`: of one worker."""
    batch_grows: bool = False
    """Whether each worker adds a batch of its own (`batch_size_per_worker`)."""
    micro_batch: int | None = None
    """Most samples in one forward pass; None: all that a worker has in a step."""
    virtual_workers: int | None = None
    """Parts of a batch that are computed one by one, where the run has such."""
    batch_norm_layers: int = 0
    """That exchange their statistics in the forward and the backward pass; 0 where they are each worker's own."""
    batch_norm_bytes: int = 0
    """That all these layers exchange in one forward pass."""
    validation_samples: int = 0
    validation_parts: int = 16
    """Into how many parts, which workers share, a validation is cut."""
    validation_s_per_sample: float = 0.0
    """By one worker, reading included."""
    validate_every_steps: int | None = None
    """None: once at the end of each epoch."""
    epoch_other_s: float = 0.0
    """What every worker does once an epoch, however many they are: writing a snapshot, say."""
    copy_s_per_byte: float = 0.0
    """Of copying, into memory that was just got, in pieces as large as a unit. 0: not known."""
    in_parts: InParts | None = None
    """None: not measured, as on a device whose host computes meanwhile."""
    device: str = "cpu"
    """Its type: `cpu`, `cuda`."""
    cores: int = 1
    """Of the machine."""
    threads: int = 1
    """That computed, where `device` is `cpu`."""
    pass_cores: float | None = None
    """That its passes kept busy on average, where `device` is `cpu`; None: not known, so all its threads did."""
    load: float = 0.0
    """Processes that ran or waited for a core in the minute before: `os.getloadavg`. 0: not known."""
    device_memory_bytes: int = 0
    """That one worker can have: its GPU's, or the machine's. 0: not known."""
    contention: Mapping[int, float] = field(default_factory=dict)
    """Workers at once on this machine → how many times as long compute takes as for one alone, where measured."""
    contention_of_hosts: Mapping[int, float] = field(default_factory=dict)
    """The same for workers of hosts that are one machine, each alone on its host."""
    contention_spread: float = 0.0
    """Standard deviation of what passes of workers at once took, over itself. 0: not known."""
    process_bytes: int = 0
    """Memory of a worker's process without its tensors: the interpreter, torch, the data set, loader processes; what is
    shared with others by its share. 0: not known, or of a device whose host computes meanwhile."""
    compression: Mapping[str, Compression] = field(default_factory=dict)
    """By name; `none` needs no entry."""
    tried: tuple[Tried, ...] = ()
    """What several workers at once took, and carried, in each number of them that was tried."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float):
                _check_number(each.name, value, endless=each.name == "loader_samples_per_second")
        if not self.compute:
            raise ConfigError("no size of a micro-batch was measured", where="compute", fix=_AGAIN)
        sizes = [each.samples for each in self.compute]
        if sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ConfigError(f"the measured sizes {sizes} do not rise from 1 or more", where="compute", fix=_AGAIN)
        for name in ("samples", "global_batch", "loader_samples_per_second"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is 0", where=name, fix=_AGAIN)
        ready = [bucket.ready for bucket in self.buckets]
        if ready != sorted(ready) or any(not 0 <= share <= 1 for share in ready):
            raise ConfigError(
                f"buckets are ready at {ready}, which does not rise from 0 to 1", where="buckets", fix=_AGAIN
            )
        if self.unit_bytes and sum(self.unit_bytes) != self.parameter_bytes:
            raise ConfigError(
                f"parameter_bytes is {self.parameter_bytes}, but the units hold {sum(self.unit_bytes)}",
                where="unit_bytes",
                fix=_AGAIN,
            )
        if sum(bucket.bytes for bucket in self.buckets) != self.gradient_bytes:
            raise ConfigError(
                f"gradient_bytes is {self.gradient_bytes}, but the buckets hold "
                f"{sum(bucket.bytes for bucket in self.buckets)}",
                where="buckets",
                fix=_AGAIN,
            )

    def slower(self, *, compute: float = 1.0, communication: float = 1.0) -> Measured:
        """The same, where computing, and what a worker computes for exchanges, takes so many times as long."""
        return replace(
            self,
            compute=tuple(
                replace(
                    each,
                    forward_s=each.forward_s * compute,
                    backward_s=each.backward_s * compute,
                    spread_s=each.spread_s * compute,
                )
                for each in self.compute
            ),
            update_s=self.update_s * compute,
            step_other_s=self.step_other_s * compute,
            validation_s_per_sample=self.validation_s_per_sample * compute,
            compression={
                name: replace(
                    each,
                    arithmetic_s=each.arithmetic_s * communication,
                    processor_s=each.processor_s * communication,
                )
                for name, each in self.compression.items()
            },
            copy_s_per_byte=self.copy_s_per_byte * communication,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`."""
        value = asdict(self)
        if math.isinf(self.loader_samples_per_second):
            value["loader_samples_per_second"] = None
        for name in ("contention", "contention_of_hosts"):
            value[name] = {str(workers): times for workers, times in getattr(self, name).items()}
        return value

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """What `to_json` gave.

        Raises:
            ConfigError: it is something else.
        """
        if isinstance(value, dict) and value.get("loader_samples_per_second", 0) is None:
            value = {**value, "loader_samples_per_second": math.inf}
        found: Self = _read(cls, value, "measured")
        return found


_AGAIN = "measure again with manyhosts plan"


def _check_number(name: str, value: float, *, endless: bool = False) -> None:
    if math.isnan(value) or value < 0 or (math.isinf(value) and not endless):
        raise ConfigError(f"{name} is {value}, which cannot be", where=name, fix=_AGAIN)


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gave it, as the type `kind`."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(next(one for one in inside if one is not type(None)), value, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_read(inside[0], each, f"{where}[{number}]") for number, each in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {
            (int(name) if inside[0] is int else name): _read(inside[1], each, f"{where}.{name}")
            for name, each in value.items()
        }
    if isinstance(kind, type) and isinstance(value, dict):
        return _read_fields(kind, value, where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ConfigError(f"{value!r} is where {kind} should", where=where, fix=_AGAIN)


def _read_fields(kind: type, value: dict[str, Any], where: str) -> Any:
    known = get_type_hints(kind)
    if unknown := sorted(value.keys() - known.keys()):
        raise ConfigError(f"there is no {', '.join(unknown)}", where=where, fix=_AGAIN)
    try:
        return kind(**{name: _read(known[name], each, f"{where}.{name}") for name, each in value.items()})
    except TypeError as cause:
        raise ConfigError(str(cause).rpartition(") ")[2], where=where, fix=_AGAIN) from cause
