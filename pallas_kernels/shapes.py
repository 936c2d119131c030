"""Heads and pages of real models, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadShape:
    """What of a model shapes its attention."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None


MODELS = {
    "smollm2-135m": HeadShape(9, 3, 64),
    "llama3-8b": HeadShape(32, 8, 128),
    "qwen2.5-7b": HeadShape(28, 4, 128, page_size=8),
    "qwen3-moe-235b": HeadShape(64, 4, 128, page_size=64),
    "gemma2-9b": HeadShape(16, 8, 256, page_size=32, window=4096, soft_cap=50.0),
    "llama2-7b": HeadShape(32, 32, 128),
    "phi3-mini": HeadShape(32, 32, 96),
}
"""By name; the page size is a choice, not a property of the model."""
