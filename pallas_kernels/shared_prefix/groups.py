"""Which decode rows begin with the same pages."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_ROWS = 16
"""Rows of one block of a group."""

FEWEST_ROWS = 8
"""Smaller groups are not worth a pass of their own; at most half of `BLOCK_ROWS`."""

FEWEST_TOKENS = 256
"""Nor are shorter prefixes (the gate of vLLM's cascade attention)."""


class Groups(NamedTuple):
    """Blocks of decode rows that share leading pages. B blocks of R rows, S decode rows."""

    rows: jax.Array  # [B, R] int32, decode rows of the block, -1 where unused
    lengths: jax.Array  # [B] int32, tokens that its rows share, whole pages; 0 for an unused block
    place: jax.Array  # [S] int32, where the row stands among the B * R; -1 for rows of no group
    skipped: jax.Array  # [S] int32, tokens of the row that its block covers


def group_rows(page_table: jax.Array, lengths: jax.Array, page_size: int) -> Groups:
    """Groups the rows of `page_table` [S, N] whose first `FEWEST_TOKENS` tokens lie in the same pages.

    `lengths` [S] are tokens to attend to. A group shares as many pages as all of its rows have in common, at most to
    their last token but one. Once a step is enough: layers share page tables.
    """
    rows, width = page_table.shape
    blocks = max(1, rows // FEWEST_ROWS)
    index = jnp.arange(rows, dtype=jnp.int32)
    full = jnp.maximum(lengths - 1, 0) // page_size
    column = jnp.arange(width, dtype=jnp.int32)
    same = page_table[:, None] == page_table[None]
    differ = jnp.where(same, width, column).min(-1)
    common = jnp.minimum(differ, jnp.minimum(full[:, None], full[None])) * page_size  # [S, S] tokens
    alike = common >= FEWEST_TOKENS
    leader = jnp.argmax(alike, axis=1).astype(jnp.int32)  # the group's first row
    size = alike.sum(1, dtype=jnp.int32)
    member = size >= FEWEST_ROWS
    shared = jnp.where(alike, common, width * page_size).min(1)[leader]

    rank = jnp.sum(alike & (index[None] < index[:, None]), axis=1, dtype=jnp.int32)
    needed = jnp.where(member & (leader == index), (size + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    first_block = jnp.cumsum(needed) - needed
    place = jnp.where(member, first_block[leader] * BLOCK_ROWS + rank, -1)
    at = jnp.where(member, place, blocks * BLOCK_ROWS)  # past the end: dropped
    members = jnp.full(blocks * BLOCK_ROWS, -1, jnp.int32).at[at].set(index, mode="drop", unique_indices=True)
    members = members.reshape(blocks, BLOCK_ROWS)
    used = members[:, 0] >= 0
    return Groups(
        rows=members,
        lengths=jnp.where(used, shared[members[:, 0]], 0),
        place=place,
        skipped=lax.select(member, shared, jnp.zeros_like(shared)),
    )
