"""What the trainer must know of a strategy besides what it can do. Each class says it; no one asks for the class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What holds for every run of a strategy."""

    synchronous: bool = True
    """Whether all workers make each step by one gradient, so that between two steps they hold one model. Where not, the
    strategy has the calls of `LocalUpdates`."""
    communicates_in_forward: bool = False
    """Whether workers exchange something in every forward pass, so that all must make equally many."""
    computes_in_stages: bool = False
    """Whether a worker computes a stage of each forward pass, so that the others wait where it fails."""
    holds_full_model: bool = True
    """Whether each worker holds every tensor in full. Where not, `Strategy.holding` says what it holds."""
    survives_loss: bool = True
    """Whether the workers that are left can continue without one that is lost. Then it has the calls of `Elastic`;
    where several workers make one copy of the model, those of `InCopies`, and they can where there are copies."""
    computes_fixed_parts: bool = False
    """Whether each batch is cut into parts that do not depend on the number of workers. Then it has those of
    `FixedParts`."""
    takes_sparse_gradients: bool = False
    """Whether the workers exchange gradients of `torch.nn.Embedding(sparse=True)` as the rows that they are."""
