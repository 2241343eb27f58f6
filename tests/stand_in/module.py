"""`torch.standin`: the module of the stand-in, with the names of `torch.cuda`."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from stand_in import streams

TOTAL_BYTES = 1 << 34


class Held:
    """Bytes that tensors on the device hold, as its allocator counts them."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, size: int) -> None:
        """A tensor was made."""
        self.now += size
        self.most = max(self.most, self.now)

    def give_back(self, size: int) -> None:
        """Nobody has it any more."""
        self.now -= size


held = Held()


class Module:
    """What torch and its users ask."""

    Event = streams.Event

    def __init__(self, random: torch.Generator) -> None:
        self.is_used, self.random = False, random

    def is_initialized(self) -> bool:
        return self.is_used

    def is_available(self) -> bool:
        return True

    def set_device(self, device: Any) -> None:
        self.is_used = True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 8

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(name="stand-in", total_memory=TOTAL_BYTES)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return TOTAL_BYTES - held.now, TOTAL_BYTES

    def memory_reserved(self, device: Any = None) -> int:
        return held.now

    def memory_allocated(self, device: Any = None) -> int:
        return held.now

    def max_memory_allocated(self, device: Any = None) -> int:
        return held.most

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        held.most = held.now

    def device(self, device: Any) -> Any:
        return nullcontext()

    def Stream(self, device: Any = None, priority: int = 0) -> streams.Stream:  # as torch names it
        return streams.Stream()

    def current_stream(self, device: Any = None) -> streams.Stream:
        return streams.current_stream()

    def stream(self, stream: streams.Stream) -> Any:
        return streams.on(stream)

    def synchronize(self, device: Any = None) -> None:
        streams.synchronize()

    def manual_seed(self, seed: int) -> None:
        self.random.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.random.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.random.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False
