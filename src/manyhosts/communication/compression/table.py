"""The module of each compression, by its name."""

from __future__ import annotations

from collections.abc import Callable

from manyhosts.communication.compression.between_nodes import between_nodes
from manyhosts.communication.compression.exchange import Compression
from manyhosts.config.compression import GROUP, OWN
from manyhosts.config.strategies import DDP
from manyhosts.table import Table

_PLACES = {
    "bf16": "codecs:Bf16Codec",
    "fp16": "codecs:Fp16Codec",
    "int8": "codecs:Int8Codec",
    "powersgd": "powersgd:PowerSGD",
    "topk": "topk:TopK",
}
COMPRESSIONS: Table[Callable[[DDP], Compression]] = Table(
    kind="compression",
    group=GROUP,
    own={name: f"manyhosts.communication.compression.{_PLACES[name]}" for name in OWN},
)


def make_compression(config: DDP) -> Compression | None:
    """The compression that `config` asks for; None for none, and where it is yet to be chosen."""
    if config.compression in ("none", "auto"):
        return None
    if callable(config.compression):
        compression: Compression = config.compression
    else:
        compression = COMPRESSIONS.load(config.compression)(config)
    return between_nodes(compression) if config.inside_node == "exact" else compression
