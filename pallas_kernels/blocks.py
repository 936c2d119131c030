"""What the references of paged attention share: online softmax over blocks of a request's tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_TOKENS = 64
"""Tokens of a request attended to in one iteration."""

FEWEST_ROWS = 4
"""Rows that are not halved any further."""

MASKED = -1e30
LEAST = -1e29
"""Where a running maximum starts: so far above a masked score that its weight is 0 even where nothing else is seen."""

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum, sum of weights, weighted sum of values; the first axis of each is the rows."""


def whole_blocks(page_table: jax.Array, page_size: int, num_pages: int) -> tuple[jax.Array, int]:
    """`page_table` [rows, N] padded to whole blocks, every entry some page's id; and the pages in a block."""
    pages = max(1, min(BLOCK_TOKENS // page_size, page_table.shape[1]))
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    return jnp.clip(table, 0, num_pages - 1), pages


def gather_block(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """Pages `ids` [rows, pages] of `pool` [P, page_size, K, D] -> [rows, pages * page_size, K * D] float32."""
    num_pages, page_size, kv_heads, dim = pool.shape
    flat = pool.reshape(num_pages, -1).at[ids.reshape(-1)].get(mode="promise_in_bounds")
    return flat.reshape(-1, ids.shape[1] * page_size, kv_heads * dim).astype(jnp.float32)


def over_blocks(num_blocks: jax.Array, attend_block: Callable[[int, jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Runs `attend_block(begin, i, carry)`, block `i` of the rows from `begin` on, over each row's `num_blocks` [rows].

    Once the first half of the rows has seen all its blocks, the loop goes on with the second half only, then with that
    one's second half, and so on: with rows in order of length few of them wait for the longest.
    """
    rows = num_blocks.shape[0]
    begin, done = 0, jnp.int32(0)
    finished = []
    while begin < rows:
        left = rows - begin
        end = begin + left // 2 if left >= 2 * FEWEST_ROWS else rows
        until = jnp.maximum(done, jnp.max(num_blocks[begin:end]))
        carry = lax.fori_loop(done, until, partial(attend_block, begin), carry)
        finished.append(tuple(x[: end - begin] for x in carry))
        top, norm, out = (x[end - begin :] for x in carry)
        carry = (top, norm, out)
        begin, done = end, until
    top, norm, out = (jnp.concatenate(parts) for parts in zip(*finished, strict=True))
    return top, norm, out
