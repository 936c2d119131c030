"""What the engine needs of a model, and what it hands to one. Names of shapes as in `state`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import struct

from jbatch.core.state import KVPages


@struct.dataclass
class Batch:
    """What the model's forward pass needs to know: the plan in terms of tokens and pages."""

    tokens: jax.Array  # [T] int32
    positions: jax.Array  # [T] int32
    page: jax.Array  # [T] int32, where the token's key and value go; -1 for an idle row
    offset: jax.Array  # [T] int32
    decode_table: jax.Array  # [S, N] int32
    decode_lengths: jax.Array  # [S] int32, tokens to attend to, 0 for an idle row
    chunk_table: jax.Array  # [C, N] int32
    chunk_start: jax.Array  # [C] int32
    chunk_lengths: jax.Array  # [C] int32, tokens to attend to, 0 for an idle row
    logit_rows: jax.Array  # [S + C] int32, token rows whose logits are wanted


Params = Any
"""A model's weights: any pytree of arrays."""

Forward = Callable[[Params, KVPages, Batch], tuple[jax.Array, KVPages]]
"""A model: `(params, kv, batch) -> (logits [S + C, vocabulary] float32, kv)`, pure."""


@dataclass(frozen=True)
class Model:
    """What the engine needs of a model."""

    forward: Forward
    params: Params
    init_kv: Callable[[int, int], KVPages]
    """Empty pages, given their number and size."""
    vocab_size: int
    max_len: int
    """Longest sequence it was trained for, in tokens."""
    eos_ids: frozenset[int]
