"""What is computed again in the backward pass: no bit differs, less is held, and what cannot be so is refused."""

from __future__ import annotations

import copy
import io
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhosts.data import randomness
from manyhosts.errors import ConfigError
from manyhosts.model.activation_checkpointing import checkpoint_blocks, is_checkpointed
from manyhosts.strategies.blocks import modules_of_layers


class Chancy(nn.Module):
    """Draws from every generator, and has running values."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.Dropout(0.3), nn.GELU())
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if random.random() < 0.5:
            return x + scale * self.back(self.layers(x))
        return x + float(np.random.rand()) * self.back(self.layers(x))


def net(block: Callable[[], nn.Module] = Chancy, count: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(block() for _ in range(count))), nn.Linear(16, 3))


def passes(model: nn.Module, count: int = 3) -> list[Tensor]:
    """Some forward and backward passes, whose gradients add up; then all that the model holds."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for step in range(count):
        randomness.seed_compute(5, step)
        model(x).square().mean().backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [*gradients, *(buffer.detach() for buffer in model.buffers())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("asked", ["blocks", "all", 0.5])
def test_gradients_and_buffers_are_the_same_bits(asked: Any) -> None:
    plain, again = net(), net()
    checkpoint_blocks(again, asked)
    assert same(passes(plain), passes(again))


class Following(nn.Module):
    """Follows its inputs with a buffer that decides its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return self.inner(x - self.mean)


class Rebinding(Following):
    """Its buffer is another tensor after each pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.inner(x - self.mean)


class ByData(Following):
    """Its buffer changes behind autograd's back."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.5).add_(x.detach().mean(0))
        return self.inner(x - self.mean)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.InstanceNorm1d(4, track_running_stats=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[1](self.inner[0](x).view(-1, 4, 4)).view(-1, 16)


@pytest.mark.parametrize("block", [Following, Rebinding, ByData, Spectral, Instances])
def test_buffers_that_a_pass_changes_are_for_the_second_what_they_were_for_the_first(block: type[nn.Module]) -> None:
    plain, again = net(block), net(block)
    checkpoint_blocks(again, "blocks")
    assert same(passes(plain), passes(again))


def test_random_numbers_that_are_drawn_afterwards_are_the_same() -> None:
    drawn = []
    for asked in (None, "blocks"):
        model = net()
        checkpoint_blocks(model, asked)
        passes(model)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_each_block_computes_twice_where_gradients_are_wanted_and_else_once() -> None:
    model = net()
    checkpoint_blocks(model, 0.5)
    calls: list[int] = []
    for number, block in enumerate(model[0]):  # type: ignore[arg-type]
        block.layers[0].register_forward_hook(lambda *_, number=number: calls.append(number))
    passes(model, 1)
    assert calls == [0, 1, 2, 3, 1, 0], "the first half again, the last of it first"
    calls.clear()
    model.eval()(torch.zeros(2, 16))
    assert calls == [0, 1, 2, 3]


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were there at once, of those that came to be within."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self.known:
                self._enter(storage)
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        self.known.add(place)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self.known.discard(place)
            self.now -= size

        weakref.finalize(storage, gone)


def peak(asked: Any) -> int:
    """Bytes of a forward and backward pass of eight blocks, gradients left out."""
    model = net(lambda: nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh()))), count=8)
    checkpoint_blocks(model, asked)
    x = torch.randn(4096, 16)
    model(x[:8]).mean().backward()  # gradients are there from now on
    with Peak() as seen:
        model(x).mean().backward()
    return seen.most


def test_blocks_that_compute_again_hold_a_fraction_of_the_memory() -> None:
    """Of 8 blocks with 16 tensors each to save: 8 inputs and one block's 16, in place of 128."""
    everything, half, least = peak(None), peak(0.5), peak("blocks")
    assert least < 0.3 * everything
    assert least < half < 0.7 * everything


def test_names_hooks_copies_and_files_are_those_of_the_plain_model() -> None:
    model = net()
    names = list(model.state_dict())
    seen: list[Any] = []
    model[0][1].register_forward_hook(lambda module, _, output: seen.append(module))  # type: ignore[index]
    checkpoint_blocks(model, "blocks")
    assert list(model.state_dict()) == names
    assert isinstance(model[0][1], Chancy)  # type: ignore[index]
    assert type(model[0][1]).__name__ == "Chancy"  # type: ignore[index]
    passes(model, 1)
    assert seen == [model[0][1]], "once, though the block computes twice"  # type: ignore[index]
    stream = io.BytesIO()
    del model[0][1]._forward_hooks  # type: ignore[index]  # a function of a test cannot be written
    model[0][1]._forward_hooks = {}  # type: ignore[index]
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert not any(map(is_checkpointed, other.modules()))
        assert type(other[0][1]) is Chancy
        assert other[0][1].back.weight is not model[0][1].back.weight  # type: ignore[index]


def test_another_trainer_of_the_same_model_chooses_anew() -> None:
    model = net()
    checkpoint_blocks(model, "blocks")
    assert checkpoint_blocks(model, 0.3) == "2 of 4 blocks, 0.0 to 0.1"
    assert [is_checkpointed(block) for block in model[0]] == [True, True, False, False]  # type: ignore[arg-type]
    assert checkpoint_blocks(model, None) == ""
    assert not any(map(is_checkpointed, model.modules()))


def test_all_are_the_blocks_and_every_other_module_of_several_layers() -> None:
    model = nn.Module()
    model.stem = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    model.body = net()[0]  # type: ignore[index]
    model.heads = nn.ModuleDict({"one": Chancy()})
    model.last = nn.Linear(16, 3)
    names = [name for name, _ in modules_of_layers(model)]
    assert names == ["stem", "body.0", "body.1", "body.2", "body.3", "heads.one"]


class OwnGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.generator = torch.Generator()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(super().forward(x) * torch.rand(16, generator=self.generator))


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.inner, self.count = nn.Identity(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.inner(super().forward(x)) / self.count


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (OwnGenerator, "computes something else"),
        (Counting, "computes something else"),
        (InPlace, "input was changed in place"),
    ],
)
def test_block_that_cannot_be_computed_again_is_refused_in_the_first_pass(block: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), net(block)[0])  # type: ignore[index]
    checkpoint_blocks(model, "blocks")
    with pytest.raises(ConfigError, match=words) as refused:
        passes(model, 1)
    assert "the block 1." in str(refused.value)
    assert block.__name__ in str(refused.value)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = x * 1
            y = block(x)
            x += y
        return x


class Late(nn.Module):
    """Changes its buffer from the third pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = nn.Linear(16, 16), 0
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.count += torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if self.count > 2:
            self.mean.add_(x.detach().mean(0))
        return self.inner(x - self.mean)


def test_buffer_that_is_changed_in_a_later_pass_only_is_refused_there() -> None:
    model = net(Late)
    checkpoint_blocks(model, "blocks")
    passes(model, 2)
    with pytest.raises(ConfigError, match="changes its buffer mean, which it did not"):
        passes(model, 1)


def test_input_that_is_changed_after_its_block_is_refused() -> None:
    model = Residual()
    checkpoint_blocks(model, "blocks")
    with pytest.raises((ConfigError, RuntimeError), match=r"in.?place"):
        passes(model, 1)


def test_model_without_blocks_is_refused() -> None:
    flat = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3))
    for asked in ("blocks", "all", 0.5):
        with pytest.raises(ConfigError, match="has no blocks"):
            checkpoint_blocks(flat, asked)


def test_block_of_torchscript_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    with pytest.raises(ConfigError, match="TorchScript"):
        checkpoint_blocks(nn.Sequential(script, copy.deepcopy(script)), "blocks")


def test_block_with_a_forward_of_its_own_is_refused() -> None:
    model = net()
    model[0][2].forward = lambda x: x  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"0\.2 \(Chancy\) has a forward of its own"):
        checkpoint_blocks(model, "blocks")
