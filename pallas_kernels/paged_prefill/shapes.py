"""Prefill steps to measure: chunks of one model, and how much of each request comes before them."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.shapes import MODELS, HeadShape


@dataclass(frozen=True)
class PrefillShape:
    """One call of `paged_prefill`."""

    model: HeadShape
    chunks: int
    queries: int
    """Tokens of a chunk."""
    start: int
    """Tokens before each chunk."""


SHAPES = {
    f"{name}, {chunks} chunks of {queries} from {start}": PrefillShape(MODELS[name], chunks, queries, start)
    for name in ("llama3-8b", "qwen2.5-7b")
    for chunks, queries, start in ((1, 4096, 0), (8, 512, 0), (8, 512, 8192), (64, 16, 1024))
}
