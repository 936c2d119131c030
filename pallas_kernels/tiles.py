"""The loop that the Triton attention kernels share: online softmax over tiles of a request's tokens.

Page ids are loaded one tile ahead of their use and handed on through the loop's carry. So the loads of keys and values
do not depend on a load of the same iteration, and Triton's software pipeliner keeps several of them in flight, as it
does for contiguous keys and values. Scores are in base 2: `exp2` is one instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.blocks import LEAST, LOG2_E, MASKED

TILE_BYTES = 16 * 1024
"""Keys of one tile: with values and three buffers of each, two programs share a multiprocessor's shared memory."""

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum [M] in base 2, sum of weights [M], weighted sum of values [M, D]; all float32."""


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def tile_tokens(dim: int, itemsize: int) -> int:
    """Tokens in a tile of keys of `dim` numbers of `itemsize` bytes."""
    return min(128, max(16, power_of_two(TILE_BYTES // (power_of_two(dim) * itemsize))))


@dataclass(frozen=True)
class Pages:
    """One KV head of a paged cache, inside a kernel."""

    k: Any  # ref [P, page_size, K, D]
    v: Any  # ref [P, page_size, K, D]
    k_scale: Any  # ref [P, page_size, K] float32, or None
    v_scale: Any
    table: Any  # ref [rows, N]
    row: jax.Array
    """Row of the page table."""
    head: jax.Array
    """KV head."""
    low: jax.Array
    """First token that may be read."""
    high: jax.Array
    """One past the last token that may be read."""

    def ids(self, at: jax.Array) -> jax.Array:
        """Pages of the tokens at positions `at`; 0 for those that may not be read."""
        column = at // self.k.shape[1]
        return plt.load(self.table.at[self.row, column], mask=self._readable(at), other=0)

    def rows(self, ref: Any, ids: jax.Array, at: jax.Array, dims: jax.Array) -> jax.Array:
        """[tokens, D] of keys or values; zeros for tokens that may not be read, whatever their pages hold."""
        mask = self._readable(at)[:, None] & (dims < ref.shape[3])[None]
        offset = (at % ref.shape[1])[:, None]
        zero = 0 if ref.dtype == jnp.int8 else 0.0
        return plt.load(ref.at[ids[:, None], offset, self.head, dims[None]], mask=mask, other=zero)

    def scales(self, ref: Any, ids: jax.Array, at: jax.Array) -> jax.Array:
        """[tokens] float32."""
        return plt.load(ref.at[ids, at % ref.shape[1], self.head], mask=self._readable(at), other=0.0)

    def _readable(self, at: jax.Array) -> jax.Array:
        return (at >= self.low) & (at < self.high) & (at < self.table.shape[1] * self.k.shape[1])


def attend(
    q: jax.Array,  # [M, D]
    pages: Pages,
    first: jax.Array,  # [M] or [1] int32, first position each query sees
    last: jax.Array,  # [M] or [1] int32, last position each query sees
    begin: jax.Array,  # int32, first tile
    end: jax.Array,  # int32, one past the last tile
    *,
    scale: float,
    soft_cap: float | None,
    tile: int,
) -> Carry:
    """Attention of M queries over the tokens of some tiles, before the division by the sum of weights."""
    dims = jnp.arange(q.shape[1], dtype=jnp.int32)
    within = jnp.arange(tile, dtype=jnp.int32)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None  # else Triton would round to TF32

    def attend_tile(i: jax.Array, carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        ids, (top, norm, out) = carry
        at = i * tile + within
        ids_ahead = pages.ids(at + tile)
        keys = pages.rows(pages.k, ids, at, dims).astype(q.dtype)
        scores = plt.dot(q, keys, trans_b=True, precision=precision)
        if pages.k_scale is not None:
            scores *= pages.scales(pages.k_scale, ids, at)[None]
        if soft_cap is None:
            scores *= scale * LOG2_E
        else:
            scores = _tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)
        seen = (at[None] >= first[:, None]) & (at[None] <= last[:, None])
        scores = jnp.where(seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - new_top[:, None])
        norm = norm * shrink + weights.sum(1)
        if pages.v_scale is not None:
            weights *= pages.scales(pages.v_scale, ids, at)[None]
        values = pages.rows(pages.v, ids, at, dims).astype(q.dtype)
        out = out * shrink[:, None] + plt.dot(weights.astype(q.dtype), values, precision=precision)
        return ids_ahead, (new_top, norm, out)

    rows = q.shape[0]
    start = (jnp.full((rows,), LEAST, jnp.float32), jnp.zeros((rows,), jnp.float32), jnp.zeros(q.shape, jnp.float32))
    return lax.fori_loop(begin, end, attend_tile, (pages.ids(begin * tile + within), start))[1]


def normalise(carry: Carry) -> tuple[jax.Array, jax.Array]:
    """Output [M, D] and base-2 log-sum-exp [M] of what has been attended to; zeros and -inf where that is nothing."""
    top, norm, out = carry
    some = norm > 0
    safe = jnp.where(some, norm, 1.0)
    return out / safe[:, None], jnp.where(some, top + jnp.log2(safe), -jnp.inf)


def _tanh(x: jax.Array) -> jax.Array:
    """Hyperbolic tangent by `exp2`, exact to a few float32 roundings where soft caps matter; never overflows."""
    shrunk = jnp.exp2(jnp.abs(x) * (-2 * LOG2_E))
    return jnp.sign(x) * (1 - shrunk) / (1 + shrunk)
