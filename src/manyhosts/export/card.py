"""The model card of an export: README.md, as the Hugging Face Hub reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhosts.export.description import Description

_USE = {
    "safetensors": 'safetensors.torch.load_file("model.safetensors")  # int8: name * name.scale',
    "torch-export": 'torch.export.load("model.pt2").module()(*inputs)',
    "onnx": 'onnxruntime.InferenceSession("model.onnx").run(None, {name: array})',
    "hf": 'transformers.AutoModel.from_pretrained(".")  # or the class that the configuration names',
}


def write_card(folder: Path, described: Description) -> None:
    """Write README.md into `folder`; with the Hub's own header where huggingface_hub is there."""
    text = _text(described)
    try:
        from huggingface_hub import ModelCard, ModelCardData
    except ImportError:
        (folder / "README.md").write_text(text)
        return
    # "other" is the Hub's word for a licence that is not in its list.
    licence = "other" if described.licence == "unknown" else described.licence
    data = ModelCardData(license=licence, library_name="pytorch", tags=["manyhosts", described.format])
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / "README.md")


def _text(described: Description) -> str:
    source = described.source
    metrics = [
        f"| {which} | {name} | {value:.6g} |"
        for which, values in described.metrics.items()
        for name, value in values.items()
        if isinstance(value, int | float)
    ]
    return "\n".join(
        [
            f"# {source['script']}, step {source['step']}",
            "",
            f"Format {described.format}, {described.precision}. Licence: {described.licence}.",
            "",
            *_section("Use", ["```python", _USE.get(described.format, ""), "```"]),
            *_section("Inputs", [f"* {each}" for each in described.inputs]),
            *_section("Outputs", [f"* {each}" for each in described.outputs]),
            *_section("Metrics", ["| set | metric | value |", "|---|---|---:|", *metrics] if metrics else ["none"]),
            *_section("Data", [f"* {name}: {count} samples" for name, count in described.data["sets"].items()]),
            *_section("Preprocessing", [described.preprocessing.function if described.preprocessing else "none"]),
            *_section("Training", _lines({key: source[key] for key in ("run", "snapshot", "strategy", "workers")})),
            *_section("Versions", _lines(source["versions"])),
            *_section("Compared with the trained model", _lines(described.verified)),
        ]
    )


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""]


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"* {key}: {value}" for key, value in values.items()]
