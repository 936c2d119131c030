"""Decode steps to measure: who decodes, how many rows, and how long their requests are."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.shapes import MODELS, HeadShape


@dataclass(frozen=True)
class DecodeShape:
    """One call of `paged_decode`."""

    model: HeadShape
    rows: int
    length: int
    """Tokens of each row's request."""


SHAPES = {
    f"llama3-8b, {rows} rows of {length}": DecodeShape(MODELS["llama3-8b"], rows, length)
    for rows in (1, 16, 64, 256)
    for length in (1024, 4096, 16384)
}
