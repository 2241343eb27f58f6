"""The OpenAPI description of a served model, and the page that shows it to people."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from manyhosts.export.description import Description, TensorSpec
from manyhosts.serve.tensors import BINARY, limits, numpy_dtype

_STATUSES = {
    "400": "the body cannot be read",
    "401": "the token is missing or wrong",
    "408": "the body did not come in time",
    "411": "the length of the body is not a number",
    "413": "the body or the number of samples is too large",
    "415": "the content type is neither JSON nor safetensors",
    "422": "the inputs are not what the model takes",
    "503": "the model is not ready, or too many requests wait",
}


def openapi(described: Description, *, most_samples: int, has_token: bool, preprocesses: bool) -> dict[str, Any]:
    """The description of `POST /predict` and of the paths next to it, for this model."""
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    body = _samples("inputs", described.inputs, preprocesses)
    body["properties"]["inputs"] |= {"minItems": 1, "maxItems": most_samples}
    failures = {code: {"description": said, **_json(error)} for code, said in _STATUSES.items()}
    predict: dict[str, Any] = {
        "operationId": "predict",
        "summary": "What the model answers for each sample",
        "requestBody": {"required": True, **_json(body)},
        "responses": {
            "200": {
                "description": "one output for each sample",
                **_json(_samples("outputs", described.outputs, False)),
            },
            **failures,
        },
    }
    predict["requestBody"]["content"][BINARY] = {"schema": {"type": "string", "format": "binary"}}
    paths: dict[str, Any] = {"/predict": {"post": predict}}
    for path, summary in (
        ("/healthz", "Whether the server lives"),
        ("/readyz", "Whether the model answers"),
        ("/metrics", "Numbers for Prometheus"),
    ):
        codes = {"200": {"description": "yes"}, "401": failures["401"]}
        if path == "/readyz":
            codes["503"] = {"description": "not now"}
        paths[path] = {"get": {"summary": summary, "responses": codes}}
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": described.source.get("script", "model"), "version": str(described.source.get("step", 0))},
        "paths": paths,
    }
    if has_token:
        made["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        made["security"] = [{"token": []}]
    return made


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": dict(schema)}}}


def _samples(key: str, specs: Sequence[TensorSpec], anything: bool) -> dict[str, Any]:
    if anything:
        one: dict[str, Any] = {}
    elif len(specs) == 1:
        one = _schema(specs[0])
    else:
        one = {
            "type": "object",
            "properties": {spec.name: _schema(spec) for spec in specs},
            "required": [spec.name for spec in specs],
            "additionalProperties": False,
        }
    return {
        "type": "object",
        "properties": {key: {"type": "array", "items": one}},
        "required": [key],
        "additionalProperties": False,
    }


def _schema(spec: TensorSpec) -> dict[str, Any]:
    dtype = numpy_dtype(spec)
    kind = {"b": "boolean", "i": "integer", "u": "integer", "f": "number"}[dtype.kind]
    schema: dict[str, Any] = {"type": kind}
    if kind != "boolean":
        schema |= dict(zip(("minimum", "maximum"), limits(dtype), strict=True))
    for side in reversed(spec.shape):
        schema = {"type": "array", "items": schema}
        if side is not None:
            schema |= {"minItems": side, "maxItems": side}
    return schema


def page(described: Description, description: Mapping[str, Any]) -> str:
    """The description for people: one HTML page that loads nothing from elsewhere."""
    rows = "".join(
        f"<tr><td>{kind}</td><td>{html.escape(str(spec))}</td></tr>"
        for kind, specs in (("in", described.inputs), ("out", described.outputs))
        for spec in specs
    )
    title = html.escape("{title}, step {version}".format(**description["info"]))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><h1>{title}</h1>"
        f"<p><code>POST /predict</code> takes <code>{{&quot;inputs&quot;: [...]}}</code>, one entry for each sample, "
        f"and answers <code>{{&quot;outputs&quot;: [...]}}</code>; or {BINARY} both ways.</p><table>{rows}</table>"
        f"<h2>OpenAPI</h2><pre>{html.escape(json.dumps(description, indent=1))}</pre></html>"
    )
