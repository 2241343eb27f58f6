"""What of a model is compiled: its repeated blocks, each by itself, so that gradients come on the way.

A model that is compiled whole has one backward graph, whose gradients all come at its end: nothing of their exchange is
hidden behind computing. Blocks of one class also share their code, so there is less to compile.

Source: "Reducing torch.compile cold start compilation time with regional compilation", PyTorch's recipes.
"""

from __future__ import annotations

from torch import nn

from manyhosts.config.settings import Settings
from manyhosts.strategies.blocks import repeated_blocks
from manyhosts.training.setup.activation_checkpointing import checkpoint_blocks, is_checkpointed


def prepare_blocks(model: nn.Module, settings: Settings) -> list[str]:
    """Have blocks of `model` compiled, and computed again in the backward pass, as `settings` say. What is to be said
    of that.
    """
    asked = settings.activation_checkpointing
    again = checkpoint_blocks(model, asked, compiled=settings.compile)
    if settings.compile:
        compile_model(model)
    return [f"activation_checkpointing={asked!r}: computed again in the backward pass are {again}"] if again else []


def compile_model(model: nn.Module) -> None:
    """Have `model` compiled when it is called first; in place, so that names in snapshots stay the same.

    What is computed again in the backward pass is compiled inside its checkpoint already, and not around it.
    """
    again = any(map(is_checkpointed, model.modules()))
    for block in [block for _, block in repeated_blocks(model)] or ([] if again else [model]):
        if not is_checkpointed(block):
            block.compile()
