"""Each format: how the trained model is written, and how what was written answers."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyhosts.communication.layout import write
from manyhosts.errors import ConfigError, first_line
from manyhosts.export.model_call import ModelCall, without_cache

Answers = list[tuple[Tensor, ...]]
Batches = Sequence[tuple[Tensor, ...]]
WEIGHTS = "model.safetensors"
PROGRAM = "model.pt2"
ONNX = "model.onnx"
EXTRA = "in a clone of manyhosts: pip install '.[export]'"
_ALONE = """
import sys
for name in ("manyhosts", "__main__."):
    sys.modules[name] = None
import torch
from safetensors.torch import load_file, save_file
program = torch.export.load(sys.argv[1]).module()
batches, answers = load_file(sys.argv[2]), {}
for number in range(int(sys.argv[3])):
    inputs = [batches[f"{number}.{place}"] for place in range(int(sys.argv[4]))]
    with torch.no_grad():
        outputs = program(*inputs)
    answers |= {f"{number}.{place}": each.contiguous().clone() for place, each in enumerate(outputs)}
save_file(answers, sys.argv[5])
"""
"""Loads a program in a process that has neither manyhosts nor the script: batches in, answers out."""


def needs(package: str, what: str) -> Any:
    """An optional package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as cause:
        raise ConfigError(f"{what} takes {package}, which is not installed", where="--format", fix=EXTRA) from cause


def write_safetensors(folder: Path, call: ModelCall, precision: str) -> None:
    """The model's own `state_dict`, under its own names, one file."""
    state: Mapping[str, Any] = call.run.model.state_dict()
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise ConfigError(f"{other[0]} is not a tensor", where="--format safetensors", fix="choose torch-export")
    if precision == "int8":
        state = quantised_state(call.run.model)
    elif precision == "bf16":
        state = {name: each.bfloat16() if each.is_floating_point() else each for name, each in state.items()}
    seen: set[int] = set()
    tensors = {}
    for name, each in state.items():
        tensor = each.detach().cpu().contiguous()
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor  # two names of one tensor: each its own
        seen.add(tensor.data_ptr())
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "precision": precision})


@torch.no_grad()
def answer_safetensors(folder: Path, call: ModelCall, batches: Batches, precision: str) -> Answers:
    """The script's model, with what the file holds copied into it tensor by tensor."""
    own = call.run.model.state_dict()
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name, tensor in own.items():
            write(tensor, dequantised(file.get_tensor, name, file.keys()).to(tensor.dtype))
    return answers_of(call.program(), batches)


def write_torch_export(folder: Path, call: ModelCall, precision: str) -> None:
    """A program that PyTorch alone loads: `torch.export.load(file).module()(*inputs)`, a tuple of tensors."""
    exported = _traced(call, precision)
    with _quiet():
        torch.export.save(exported, folder / PROGRAM)


def answer_torch_export(folder: Path, call: ModelCall, batches: Batches, precision: str) -> Answers:
    """That program in a process of its own, which knows nothing of manyhosts or of the script."""
    given, found = folder / "given.safetensors", folder / "found.safetensors"
    save_file(
        {
            f"{n}.{place}": each.cpu().contiguous().clone()
            for n, row in enumerate(batches)
            for place, each in enumerate(row)
        },
        given,
    )
    words = [str(folder / PROGRAM), str(given), str(len(batches)), str(len(call.inputs)), str(found)]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ALONE, *words], cwd=folder, capture_output=True, text=True, env=_plain()
        )
        if done.returncode:
            lengths = any(None in spec.shape for spec in call.inputs)
            padded = "pad all samples to one length in collate, if the model computes one length alone; " * lengths
            raise ConfigError(
                f"the program does not run where manyhosts and the script are not: {_last(done.stderr)}",
                where="--format torch-export",
                fix=f"{padded}keep operations of packages of your own out of the model, or choose safetensors",
            )
        answers = load_file(found)
    finally:
        given.unlink(missing_ok=True)
        found.unlink(missing_ok=True)
    return [tuple(answers[f"{n}.{place}"] for place in range(len(call.kept))) for n in range(len(batches))]


def write_onnx(folder: Path, call: ModelCall, precision: str) -> None:
    """A program for onnxruntime and whatever else reads ONNX, with named inputs and outputs."""
    needs("onnxscript", "ONNX")
    names: dict[str, Any] = {"input_names": [each.name for each in call.inputs], "output_names": call.kept}
    exported = _traced(call, precision, computes_bf16=False)  # onnxruntime on CPUs has no convolution in bf16
    with _quiet():
        made = torch.onnx.export(exported, dynamo=True, verbose=False, optimize=precision == "fp32", **names)
        assert made is not None, "dynamo=True gives a program"
        made.save(folder / ONNX, external_data=False)


def answer_onnx(folder: Path, call: ModelCall, batches: Batches, precision: str) -> Answers:
    """onnxruntime, on the CPU."""
    program = onnx_program(folder, [each.name for each in call.inputs], call.kept)
    return [program(*row) for row in batches]


def onnx_program(folder: Path, inputs: Sequence[str], outputs: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """What answers as the program in `folder` does: tensors by these names, in and out."""
    opens = needs("onnxruntime", "running ONNX").InferenceSession
    session = opens(str(folder / ONNX), providers=["CPUExecutionProvider"])
    known = {each.name for each in session.get_inputs()}

    def answer(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = {name: each.cpu().numpy() for name, each in zip(inputs, tensors, strict=True) if name in known}
        return tuple(torch.from_numpy(each) for each in session.run(outputs, given))

    return answer


def write_hf(folder: Path, call: ModelCall, precision: str) -> None:
    """What `from_pretrained` loads: weights, configuration, and the script's tokenizer or processor."""
    model = call.run.model
    save = getattr(model, "save_pretrained", None)
    if save is None or not hasattr(type(model), "from_pretrained"):
        raise ConfigError(
            f"the model is a {type(model).__name__}, not one of transformers: it has no save_pretrained",
            where="--format hf",
            fix="choose safetensors, torch-export or onnx",
        )
    if precision == "int8":
        raise ConfigError(
            "int8 weights have no form that from_pretrained loads alike everywhere",
            where="--int8",
            fix="choose torch-export or onnx for int8, or --bf16",
        )
    with _quiet():
        if precision == "bf16":
            copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
        else:
            save(folder)
        for name in ("tokenizer", "processor", "feature_extractor", "image_processor"):
            if hasattr(call.run.names.get(name), "save_pretrained"):
                call.run.names[name].save_pretrained(folder)


def answer_hf(folder: Path, call: ModelCall, batches: Batches, precision: str) -> Answers:
    """The folder, loaded by `from_pretrained` of the model's class."""
    kind: Any = type(call.run.model)
    dtype = torch.bfloat16 if precision == "bf16" else None
    with _quiet():
        if hasattr(call.run.model, "peft_config"):  # adapters alone are in the folder
            base = copy.deepcopy(call.run.model).unload()  # type: ignore[operator]
            model = kind.from_pretrained(base, folder)
        else:
            model = kind.from_pretrained(folder, **({} if dtype is None else {"dtype": dtype}))
    return answers_of(call.program(model.to(call.run.trainer.world.device).eval(), dtype), batches)


Writes = Callable[[Path, ModelCall, str], None]
Reads = Callable[[Path, ModelCall, Batches, str], Answers]
BY_NAME: Mapping[str, tuple[Writes, Reads]] = {
    "safetensors": (write_safetensors, answer_safetensors),
    "torch-export": (write_torch_export, answer_torch_export),
    "onnx": (write_onnx, answer_onnx),
    "hf": (write_hf, answer_hf),
}


@torch.no_grad()
def answers_of(program: nn.Module, batches: Batches) -> Answers:
    """What a program answers, on the CPU."""
    with without_cache(program.get_submodule("model")):
        return [tuple(each.cpu() for each in program(*row)) for row in batches]


def _traced(call: ModelCall, precision: str, *, computes_bf16: bool = True) -> torch.export.ExportedProgram:
    """The model as a graph of PyTorch's operations, for any batch.

    Raises:
        ConfigError: it cannot be one, with PyTorch's reason.
    """
    model, dtype = call.run.model, None
    if precision == "bf16" and computes_bf16:
        model, dtype = copy.deepcopy(model).to(torch.bfloat16), torch.bfloat16
    elif precision != "fp32":
        model = narrow(copy.deepcopy(model), precision)
    program = call.program(model.cpu(), dtype)
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple(
        {0: batch, **{dim: torch.export.Dim.AUTO for dim, side in enumerate(spec.shape, 1) if side is None}}
        for spec in call.inputs
    )
    example = tuple(each.cpu() for each in call.tensors(17))
    try:
        with _quiet(), torch.no_grad(), without_cache(model):
            return torch.export.export(program, example, dynamic_shapes=(shapes,), strict=False)
    except Exception as cause:  # of many kinds: whatever the model does that a graph cannot
        raise ConfigError(
            f"the model is no graph that torch.export can write down: {first_line(cause)}",
            where="torch.export.export",
            fix="leave --bf16 out, or choose --format safetensors"
            if "BFloat16" in str(cause)
            else "keep decisions that depend on values, and sizes of the batch, out of forward; or choose safetensors",
        ) from cause


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within, libraries do not print: the check of what they wrote says whether all is well."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _plain() -> dict[str, str]:
    """The variables for a process without manyhosts."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MANYHOSTS", "PYTHONPATH"))}


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it ended without a word")


# Weights in eight or sixteen bits: of int8, matrices and kernels are integers with one scale for each row.
#
# Symmetric, by the largest value of each row of the first dimension (each output channel), as in torchao's weight-only
# int8; decision 0103 says why it is not torchao's. Inside a program the weight is made again where it is used, so any
# runtime computes it with ordinary operations, in float32.

_SCALE = ".scale"
_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Narrow(nn.Module):
    """A weight that is kept in fewer bits: as int8 and a scale for each row, or as bfloat16."""

    def __init__(self, weight: Tensor, precision: str) -> None:
        super().__init__()
        kept, scale = rounded(weight) if precision == "int8" else (weight.to(torch.bfloat16), None)
        self.register_buffer("kept", kept)
        self.register_buffer("scale", scale)

    def forward(self) -> Tensor:
        """The weight, nearly."""
        weight, scale = self.get_buffer("kept").float(), self._buffers["scale"]
        return weight if scale is None else weight * scale


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight`, of shape (rows, …), as int8 of that shape and a scale of shape (rows, 1, …)."""
    scale = weight.abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True).clamp(min=1e-12) / 127
    return torch.round(weight / scale).clamp(-127, 127).to(torch.int8), scale


def _of_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _LAYERS)]


@torch.no_grad()
def narrow(model: nn.Module, precision: str) -> nn.Module:
    """`model` itself, its linear, convolution and embedding weights kept in fewer bits. Tied weights stay tied."""
    shared: dict[int, _Narrow] = {}
    for _, layer in _of_layers(model):
        weight: Any = layer.weight
        kept = shared.setdefault(id(weight), _Narrow(weight, precision))
        del layer._parameters["weight"]
        layer.add_module("narrow_weight", kept)
        kind = type(layer)
        # A property: models also read the weights of layers that they do not call
        weight_of = property(lambda self: self.get_submodule("narrow_weight")())
        layer.__class__ = type(kind.__name__, (kind,), {"weight": weight_of})
    return model


def quantised_state(model: nn.Module) -> dict[str, Tensor]:
    """The `state_dict` of `model`, with int8 for the weights of those layers and `name.scale` next to each."""
    state = dict(model.state_dict())
    for name, _ in _of_layers(model):
        weight = f"{name}.weight".removeprefix(".")
        state[weight], state[weight + _SCALE] = rounded(state[weight])
    return state


def dequantised(read: Callable[[str], Tensor], name: str, names: Collection[str]) -> Tensor:
    """The tensor `name` of a file with these `names`, multiplied by its scale where it has one."""
    tensor = read(name)
    return tensor.float() * read(name + _SCALE) if name + _SCALE in names else tensor
