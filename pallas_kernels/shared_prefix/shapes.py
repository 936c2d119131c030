"""Decode steps over a shared prefix to measure."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.shapes import MODELS, HeadShape


@dataclass(frozen=True)
class SharedShape:
    """One call of `shared_prefix_decode`."""

    model: HeadShape
    rows: int
    prefix: int
    """Tokens that all rows share."""
    tail: int
    """Tokens each row has besides."""


SHAPES = {
    f"llama3-8b, {rows} rows, {prefix} + {tail}": SharedShape(MODELS["llama3-8b"], rows, prefix, tail)
    for rows, prefix, tail in ((16, 1024, 256), (64, 1024, 256), (64, 8192, 256), (128, 32768, 256))
}
