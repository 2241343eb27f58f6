"""What the trainer must know of a strategy besides what it can do. Each class says it; no one asks for the class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What holds for every run of a strategy."""

    synchronous: bool = True
    """Whether all workers make each step by one gradient, so that between two steps they hold one model. Where not,
    they synchronise in `Strategy.exchange`."""
    communicates_in_forward: bool = False
    """Whether workers exchange something in every forward pass, so that all must make equally many."""
    holds_full_model: bool = True
    """Whether each worker holds every tensor in full. Where not, `Strategy.holding` says what it holds."""
    survives_loss: bool = True
    """Whether the workers that are left can continue without one that is lost. Where several workers make one copy of
    the model they can where there are copies: see `Strategy.why_all_end`."""
    takes_sparse_gradients: bool = False
    """Whether the workers exchange gradients of `torch.nn.Embedding(sparse=True)` as the rows that they are."""
