"""Samples as pictures, where a run has kept some: of its first batch, or of what its model is most wrong about."""

from __future__ import annotations

import base64
from html import escape
from io import BytesIO
from pathlib import Path

from manyhosts.records import first_batch as kept


def of(path: Path) -> str:
    """Those in the file at `path`, with their labels; empty where there are none."""
    batch = kept.read(path)
    if batch is None:
        return ""
    labels = batch.labels or ("",) * len(batch.pixels)
    shown = []
    for place, label in enumerate(labels):
        words = f"sample {place + 1}" + (f", label {label}" if label else "")
        caption = f"<figcaption>{escape(label)}</figcaption>" if label else ""
        data = base64.b64encode(_png(batch, place)).decode()
        shown.append(f'<figure><img alt="{escape(words)}" src="data:image/png;base64,{data}">{caption}</figure>')
    return f'<div class="pictures">{"".join(shown)}</div>'


def _png(batch: kept.FirstBatch, place: int) -> bytes:
    from PIL import Image  # comes with tensorboard

    pixels = batch.pixels[place]
    file = BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, format="PNG", optimize=True)
    return file.getvalue()
