"""What the references of paged attention share: online softmax over blocks of a request's tokens."""

from __future__ import annotations

import itertools
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

MOST_ROWS = 32
"""Rows attended to side by side: their blocks of keys and values are to stay in a processor's cache."""

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


def over_blocks(num_blocks: jax.Array, attend_block: Callable[[slice, jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Runs `attend_block(rows, i, carry)`, block `i` of these rows, over each row's `num_blocks` [rows].

    Goes through MOST_ROWS at a time. Once the first half of those has seen all its blocks, the loop goes on with the
    second half only, then with that one's second half, and so on: with rows in order of length few of them wait for the
    longest.
    """
    rows = num_blocks.shape[0]
    parts = [
        _over_blocks(num_blocks, attend_block, slice(begin, min(begin + MOST_ROWS, rows)), carry)
        for begin in range(0, rows, MOST_ROWS)
    ]
    top, norm, out = (jnp.concatenate(columns) for columns in zip(*itertools.chain(*parts), strict=True))
    return top, norm, out


def _over_blocks(
    num_blocks: jax.Array, attend_block: Callable[[slice, jax.Array, Carry], Carry], rows: slice, carry: Carry
) -> list[Carry]:
    """The same for some `rows` at once; their carries part by part."""
    begin, done = rows.start, jnp.int32(0)
    top, norm, out = (x[rows] for x in carry)
    finished = []
    while begin < rows.stop:
        left = rows.stop - begin
        end = begin + left // 2 if left >= 2 * FEWEST_ROWS else rows.stop
        until = jnp.maximum(done, jnp.max(num_blocks[begin:end]))
        attend = partial(attend_block, slice(begin, rows.stop))
        top, norm, out = lax.fori_loop(done, until, attend, (top, norm, out))
        half = end - begin
        finished.append((top[:half], norm[:half], out[:half]))
        top, norm, out = top[half:], norm[half:], out[half:]
        begin, done = end, until
    return finished
