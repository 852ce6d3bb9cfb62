"""Golden messages: the bytes of every format, for values that are exact in binary, and what they decode to.

``python -m tests.golden.messages`` writes them anew. Do this only when the format is meant to change: then its version
must change, too (`ray_lowcomm.core.codecs.message.VERSION`), for replicas with the old one cannot read the new.
"""

import json
from pathlib import Path
from typing import Any

import torch

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.codecs.formats import ValueFormat
from ray_lowcomm.core.codecs.topk import TopK, kept_per_chunk
from ray_lowcomm.core.layout import Layout

FILE = Path(__file__).parent / "messages.json"
SHAPES = ((5, 7), (19,), (), (2, 3, 4), (0,))
LAYOUT = Layout(("matrix", "vector", "scalar", "kernel", "empty"), SHAPES)
LAYOUT_64 = Layout(LAYOUT.names, SHAPES, torch.float64)


def sparse(form: ValueFormat, layout: Layout = LAYOUT) -> TopK:
    """Without a transform: matrix products differ in the last bit from machine to machine."""
    return TopK(ChunkPlan.tiles(layout, 6), kept_per_chunk(5, 6), False, form)


def dense(form: ValueFormat) -> TopK:
    return TopK(ChunkPlan.runs(LAYOUT, 16), lambda c: c, False, form, table_per_chunk=True)


CODECS: dict[str, TopK] = {
    "sparse_32": sparse(ValueFormat(32)),
    "sparse_64": sparse(ValueFormat(32), LAYOUT_64),
    "sparse_16": sparse(ValueFormat(16)),
    "sparse_8": sparse(ValueFormat(8)),
    "sparse_4": sparse(ValueFormat(4)),
    "sparse_e3m0": sparse(ValueFormat(4, "e3m0")),
    "sparse_2": sparse(ValueFormat(2)),
    "sparse_2_stochastic": sparse(ValueFormat(2, "linear", "stochastic")),
    "sparse_1": sparse(ValueFormat(1)),
    "dense_8": dense(ValueFormat(8)),
    "dense_e3m0_stochastic": dense(ValueFormat(4, "e3m0", "stochastic")),
}


def values(codec: TopK) -> torch.Tensor:
    """Multiples of 1/8 between −4 and 4, so that sums are exact in any order."""
    layout = codec.plan.layout
    return ((torch.arange(layout.numel) * 37 + 11) % 64 - 32).to(layout.dtype) / 8


def message_and_content(name: str) -> dict[str, Any]:
    codec = CODECS[name]
    message = codec.encode(values(codec), "golden@1").message
    decoded = codec.decode_mean([codec.parse(message)], [1.0])
    return {"message": message.numpy().tobytes().hex(), "decoded": decoded.tolist()}


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: message_and_content(name) for name in CODECS}, indent=1) + "\n")
