"""Writes to measure: tokens of one model."""

from __future__ import annotations

from pallas_kernels.shapes import MODELS, HeadShape

SHAPES: dict[str, tuple[HeadShape, int]] = {
    f"llama3-8b, {tokens} tokens": (MODELS["llama3-8b"], tokens) for tokens in (1, 64, 256, 4096)
}
"""A model and a number of tokens."""
