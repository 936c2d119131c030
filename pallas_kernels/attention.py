"""Paged attention as one Pallas kernel for Triton; `paged_decode` and `paged_prefill` are its two uses.

One program computes a block of queries of one KV head over one split of the tokens they see. Its matmul rows are pairs
of (query token, query head of the group), so a decode row with grouped heads still fills a tensor core's tile, and a
chunk of a few tokens fills a warp group's. With few rows the tokens are split among programs ("flash decoding", Dao et
al. 2023), whose results `merge_states` joins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import tiles
from pallas_kernels.merge_states.triton import merge_states

FEWEST_ROWS = 16
"""Rows of the smallest matmul that tensor cores take."""

MULTIPROCESSORS = 132
"""Of an H100 or H200."""

MAX_SPLITS = 16


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut and compiled. `None` is a choice by shape."""

    num_splits: int | None = None
    """Programs among which the tokens of a row are split."""
    programs: int = 4 * MULTIPROCESSORS
    """Programs wanted at least: as long as there are fewer, tokens are split."""
    matmul_rows: int = FEWEST_ROWS
    """Most rows of a program's matmuls, unless one token's query heads are more."""
    num_warps: int | None = None
    num_stages: int = 4
    """Tiles of keys and values under way at once, plus one."""


@dataclass(frozen=True)
class _Cut:
    """What the kernel knows at compile time."""

    group: int
    """Query heads of a KV head."""
    block: int
    """Query tokens of a program."""
    rows: int
    """Rows of its matmuls, a power of two."""
    splits: int
    tile: int
    scale: float
    causal: bool
    window: int | None
    soft_cap: float | None


def paged_attention(
    q: jax.Array,  # [C, Q, H, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page_table: jax.Array,  # [C, N] int32
    start: jax.Array | None,  # [C] int32, position of the first query; `None`: all stand at `lengths - 1`
    lengths: jax.Array,  # [C] int32
    skipped: jax.Array | None,  # [C] int32, tokens not attended to at the beginning; `None`: none
    k_scale: jax.Array | None,  # [P, page_size, K] float32
    v_scale: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    out_dtype: jnp.dtype,
    tuning: Tuning,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array]:  # [C, Q, H, D] of `out_dtype`, [C, Q, H] float32
    """Attention and its base-2 log-sum-exp, as the references specify."""
    chunks, queries, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    exact = q.dtype.itemsize > 2  # on CUDA cores, which takes more registers
    most = tuning.matmul_rows // 2 if exact else tuning.matmul_rows
    rows = max(FEWEST_ROWS, tiles.power_of_two(group), min(most, tiles.power_of_two(queries * group)))
    block = rows // group
    blocks = pl.cdiv(queries, block)
    splits = tuning.num_splits or min(MAX_SPLITS, max(1, pl.cdiv(tuning.programs, chunks * blocks * kv_heads)))
    tile = tiles.tile_tokens(dim, k_pages.dtype.itemsize)
    cut = _Cut(group, block, rows, splits, tile, scale, causal, window, soft_cap)
    out, lse = pl.pallas_call(
        partial(_kernel, cut=cut),
        grid=(chunks * blocks, kv_heads, splits),
        out_shape=(
            jax.ShapeDtypeStruct((splits, *q.shape), out_dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, chunks, queries, heads), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(
            num_warps=tuning.num_warps or (8 if exact or rows > 64 else 4), num_stages=tuning.num_stages
        ),
        interpret=interpret,
        name=name,
    )(q, k_pages, v_pages, page_table, start, lengths, skipped, k_scale, v_scale)
    if splits == 1:
        return out[0], lse[0]
    out, lse = merge_states(
        out.reshape(splits, -1, heads, dim), lse.reshape(splits, -1, heads), out_dtype=out_dtype, interpret=interpret
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    start_ref: Any,
    lengths_ref: Any,
    skipped_ref: Any,
    k_scale_ref: Any,
    v_scale_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    cut: _Cut,
) -> None:
    _, queries, _, dim = q_ref.shape
    blocks = pl.cdiv(queries, cut.block)
    chunk, kv_head, split = pl.program_id(0) // blocks, pl.program_id(1), pl.program_id(2)
    first_query = pl.program_id(0) % blocks * cut.block

    row = jnp.arange(cut.rows, dtype=jnp.int32)
    query, head = first_query + row // cut.group, kv_head * cut.group + row % cut.group
    dims = jnp.arange(tiles.power_of_two(dim), dtype=jnp.int32)
    real = (row < cut.block * cut.group) & (query < queries)
    inside = real[:, None] & (dims < dim)[None]
    q = plt.load(q_ref.at[chunk, query[:, None], head[:, None], dims[None]], mask=inside, other=0.0)

    length = lengths_ref[chunk]
    position = length - 1 if start_ref is None else start_ref[chunk] + first_query  # of the block's first query
    positions = jnp.broadcast_to(position, row.shape) if start_ref is None else position + row // cut.group
    low = jnp.int32(0) if skipped_ref is None else skipped_ref[chunk]
    high = jnp.minimum(length, position + cut.block) if cut.causal else length
    first, last = low[None], jnp.minimum(positions, length - 1) if cut.causal else length[None] - 1
    if cut.window is not None:
        low = jnp.maximum(low, position - (cut.window - 1))
        first = jnp.maximum(first, positions - (cut.window - 1))
    share = pl.cdiv(jnp.maximum(pl.cdiv(high, cut.tile) - low // cut.tile, 0), cut.splits)
    begin = low // cut.tile + split * share
    end = jnp.minimum(begin + share, pl.cdiv(high, cut.tile))
    pages = tiles.Pages(k_ref, v_ref, k_scale_ref, v_scale_ref, table_ref, chunk, kv_head, low, high)
    carry = tiles.attend(q, pages, first, last, begin, end, scale=cut.scale, soft_cap=cut.soft_cap, tile=cut.tile)
    out, lse = tiles.normalise(carry)
    at = split, chunk, query[:, None], head[:, None], dims[None]
    plt.store(out_ref.at[at], out.astype(out_ref.dtype), mask=inside)
    plt.store(lse_ref.at[split, chunk, query, head], lse, mask=real)
