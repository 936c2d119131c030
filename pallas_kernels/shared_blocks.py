"""Blocks of pages that several decode rows hold, such as a common prompt's: attended to once for all of them.

The two-part attention of Hydragen (Juravsky et al. 2024) and FlashInfer's cascades, for any number of groups that may
be nested: the queries of a group meet a shared block in one matmul, and each row goes on alone behind its last one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import MASKED, Carry, cap, gather_block, nothing_seen, whole_blocks

FEWEST_SHARERS = 3
"""Rows for which one matmul for all costs less than one for each."""


class SharedBlocks(NamedTuple):
    """Which blocks the rows [S] of a page table share, and what is left of each row. At most W blocks."""

    num_blocks: jax.Array  # int32
    pages: jax.Array  # [W, pages] int32, their pages
    members: jax.Array  # [W, S] bool, rows that hold them
    tail_table: jax.Array  # [S, N] int32, the rows' pages behind their last shared block
    tail_lengths: jax.Array  # [S] int32, tokens in those


def shared_blocks(page_table: jax.Array, lengths: jax.Array, page_size: int, num_pages: int) -> SharedBlocks:
    """What the rows of `page_table` [S, N] with `lengths` [S] share; once a step, since all layers have the same pages.

    A page that is in two rows holds the same tokens at the same positions, and so do all pages before it.
    """
    table, pages = whole_blocks(page_table, page_size, num_pages)
    rows, blocks = table.shape[0], table.shape[1] // pages
    last = table[:, pages - 1 :: pages]  # [S, B]
    whole = (jnp.arange(blocks, dtype=jnp.int32) + 1) * pages * page_size <= lengths[:, None]
    same = (last[:, None] == last[None]) & whole[:, None] & whole[None]  # [S, S, B]
    many = jnp.sum(same, axis=1, dtype=jnp.int32) >= FEWEST_SHARERS
    shared = jnp.cumprod(many, axis=1, dtype=jnp.int32) > 0  # [S, B], and all blocks before it are
    same &= shared[:, None] & shared[None]
    leads = (jnp.argmax(same, axis=1) == jnp.arange(rows)[:, None]) & shared
    most = max(1, rows * blocks // FEWEST_SHARERS)
    row, block = jnp.nonzero(leads, size=most, fill_value=0)
    depth = jnp.sum(shared, axis=1, dtype=jnp.int32)
    column = depth[:, None] * pages + jnp.arange(table.shape[1], dtype=jnp.int32)
    return SharedBlocks(
        num_blocks=jnp.sum(leads, dtype=jnp.int32),
        pages=table.reshape(rows, blocks, pages)[row, block],
        members=same[row, :, block],
        tail_table=jnp.take_along_axis(table, jnp.minimum(column, table.shape[1] - 1), axis=1),
        tail_lengths=lengths - depth * pages * page_size,
    )


def attend_shared(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    shared: SharedBlocks,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    soft_cap: float | None,
) -> Carry:
    """Scaled queries `q` [S, H, D] float32 over the shared blocks of their rows.

    Returns the running maximum [S, H], the sum of weights [S, H] and the weighted sum of values [S, H, D] to go on
    with.
    """
    rows, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads

    def attend() -> Carry:
        by_head = q.reshape(rows, kv_heads, group, dim).transpose(1, 0, 2, 3).reshape(kv_heads, rows * group, dim)

        def attend_block(i: jax.Array, carry: Carry) -> Carry:
            top, norm, out = carry  # [K, S * G], [K, S * G], [K, S * G, D]
            ids = shared.pages[i][None]
            k = gather_block(k_pages, ids, k_scale).reshape(-1, kv_heads, dim)
            v = gather_block(v_pages, ids, v_scale).reshape(-1, kv_heads, dim)
            scores = cap(jnp.einsum("kmd,bkd->kmb", by_head, k), soft_cap)
            member = jnp.repeat(shared.members[i], group)[None, :, None]
            scores = jnp.where(member, scores, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            shrink = jnp.exp(top - new_top)
            weights = jnp.exp(scores - new_top[..., None])
            # A weight of 0 does not keep out what is not a number: rows that do not hold the block must not see it.
            mixed = jnp.where(member, jnp.einsum("kmb,bkd->kmd", weights, v), 0.0)
            return new_top, norm * shrink + weights.sum(-1), out * shrink[..., None] + mixed

        start = nothing_seen(by_head.shape[:2], dim)
        top, norm, out = lax.fori_loop(0, shared.num_blocks, attend_block, start)

        def by_row(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(kv_heads, rows, group, *x.shape[2:]), 0, 1).reshape(rows, heads, *x.shape[2:])

        return by_row(top), by_row(norm), by_row(out)

    return lax.cond(shared.num_blocks > 0, attend, lambda: nothing_seen((rows, heads), dim))
