"""What the references of paged attention share: online softmax over blocks of a request's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_TOKENS = 64
"""Tokens of a request attended to in one iteration."""

FEWEST_ROWS = 4
"""Rows that are not halved any further."""

LOG2_E = math.log2(math.e)
MASKED = -1e30
LEAST = -1e29
"""Where a running maximum starts: so far above a masked score that its weight is 0 even where nothing else is seen."""

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum, sum of weights, weighted sum of values; the first axis of each is the rows."""


def nothing_seen(shape: tuple[int, ...], dim: int) -> Carry:
    """The carry of queries `shape` with values of `dim` numbers, before the first block."""
    return jnp.full(shape, LEAST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, dim), jnp.float32)


def whole_blocks(page_table: jax.Array, page_size: int, num_pages: int) -> tuple[jax.Array, int]:
    """`page_table` [rows, N] padded to whole blocks, every entry some page's id; and the pages in a block."""
    pages = max(1, min(BLOCK_TOKENS // page_size, page_table.shape[1]))
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    return jnp.clip(table, 0, num_pages - 1), pages


def gather_block(pool: jax.Array, ids: jax.Array, scales: jax.Array | None = None) -> jax.Array:
    """Pages `ids` [rows, pages] of `pool` [P, page_size, K, D] -> [rows, pages * page_size, K * D] float32.

    `scales` [P, page_size, K] are what the numbers are to be multiplied by.
    """
    num_pages, page_size, kv_heads, dim = pool.shape
    flat = pool.reshape(num_pages, -1).at[ids.reshape(-1)].get(mode="promise_in_bounds")
    block = flat.reshape(-1, ids.shape[1] * page_size, kv_heads * dim).astype(jnp.float32)
    if scales is None:
        return block
    factors = scales.reshape(num_pages, -1).at[ids.reshape(-1)].get(mode="promise_in_bounds")
    return block * jnp.repeat(factors.reshape(*block.shape[:2], kv_heads), dim, axis=-1)


def cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Scores bent towards +- `soft_cap` (Gemma 2)."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def normalise(carry: Carry) -> tuple[jax.Array, jax.Array]:
    """Output [..., D] and base-2 log-sum-exp [...] of what has been attended to: zeros and -inf of nothing."""
    top, norm, out = carry
    safe = jnp.where(norm > 0, norm, 1.0)
    return out / safe[..., None], jnp.where(norm > 0, (top + jnp.log(safe)) * LOG2_E, -jnp.inf)


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
