"""Drawing tokens without sorting the vocabulary.

Top-k, top-p and min-p each keep the tokens whose logit is at least some threshold. The thresholds are found by
bisection over the bit patterns of the float32 logits, so they are exact: a few passes that count or weigh, where a
sort would move the whole vocabulary. A token is then drawn by inverting the cumulative distribution with one
uniform number a row, which depends only on the request's seed and the token's position, never on the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

_BLOCK = 256
"""Tokens per block where a vocabulary is searched in two levels."""

_LANES = 8
"""float32 numbers in a vector register of a common CPU."""


@struct.dataclass
class SamplingRows:
    """Sampling parameters of B rows."""

    temperature: jax.Array  # [B] float32, 0 is greedy
    top_k: jax.Array  # [B] int32, 0 keeps all
    top_p: jax.Array  # [B] float32
    min_p: jax.Array  # [B] float32
    seed: jax.Array  # [B] int32
    position: jax.Array  # [B] int32, position the sampled token will have


def sample(logits: jax.Array, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """One token per row of `logits` [B, V] float32: its id [B] int32 and its natural log-probability [B] float32.

    The log-probability is that of the unscaled, unfiltered distribution. Filters apply in the order min-p, top-k,
    top-p, after the temperature. Rows at temperature 0 take the most likely token, the first among equals.
    """
    greedy = most_likely(logits)
    drawn = rows.temperature > 0
    token = lax.cond(jnp.any(drawn), lambda: jnp.where(drawn, _draw(logits, rows), greedy), lambda: greedy)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token, chosen - log_sum_exp(logits)


def most_likely(logits: jax.Array) -> jax.Array:
    """Index [B] int32 of the largest of each row [B, V], the first among equals.

    In two levels, since XLA's argmax on a CPU is slow and its maximum is fast.
    """
    blocks = _columns(logits)
    block = jnp.argmax(blocks.max(1), axis=0)
    inner = blocks[block, :, jnp.arange(logits.shape[0])]
    return (block * _BLOCK + jnp.argmax(inner, axis=-1)).astype(jnp.int32)


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """[B, V] -> [B]. Over columns where there are enough of them to fill a vector register."""
    if logits.shape[0] < _LANES:
        return jax.nn.logsumexp(logits, axis=-1)
    columns = logits.T
    top = jnp.maximum(columns.max(0), -3e38)
    return top + jnp.log(jnp.exp(columns - top).sum(0))


def _columns(logits: jax.Array) -> jax.Array:
    """[B, V] -> [blocks, _BLOCK, B], padded with -inf: a matmul of few rows leaves logits as columns."""
    columns = jnp.pad(logits.T, ((0, -logits.shape[1] % _BLOCK), (0, 0)), constant_values=-jnp.inf)
    return columns.reshape(-1, _BLOCK, logits.shape[0])


def _blocks(x: jax.Array) -> jax.Array:
    """[B, V] -> [B, blocks, _BLOCK], padded with zeros."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _BLOCK))).reshape(x.shape[0], -1, _BLOCK)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    # Subtract first: after a division by a tiny temperature the difference would be nothing but rounding errors.
    below_top = logits - logits.max(-1, keepdims=True)
    scaled = below_top / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    weights = jnp.exp(scaled)
    ordered = order_preserving_bits(scaled)

    floor = order_preserving_bits(jnp.log(rows.min_p))  # log 0 = -inf keeps all
    kept = jnp.sum(ordered >= floor[:, None], axis=-1, dtype=jnp.int32)
    limited = (rows.top_k > 0) & (rows.top_k < kept)
    by_k = lax.cond(jnp.any(limited), lambda: top_k_threshold(ordered, rows.top_k), lambda: floor)
    floor = jnp.where(limited, by_k, floor)
    weights = jnp.where(ordered >= floor[:, None], weights, 0.0)
    limited = rows.top_p < 1.0
    by_p = lax.cond(jnp.any(limited), lambda: top_p_threshold(ordered, weights, rows.top_p), lambda: floor)
    floor = jnp.where(limited, jnp.maximum(by_p, floor), floor)
    weights = jnp.where(ordered >= floor[:, None], weights, 0.0)

    keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))(rows.seed, rows.position)
    return invert_cumulative(weights, jax.vmap(jax.random.uniform)(keys))


def order_preserving_bits(x: jax.Array) -> jax.Array:
    """float32 -> int32 such that a < b holds for the floats where it holds for the integers (-0.0 counts as 0.0)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def top_k_threshold(ordered: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest of each row of `ordered` [B, V], or a value that keeps the same tokens; ties all stay."""

    def enough(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        count = jnp.sum(ordered >= at[:, None], axis=-1, dtype=jnp.int32)
        return count >= k, count

    return _largest(ordered, enough)


def top_p_threshold(ordered: jax.Array, weights: jax.Array, p: jax.Array) -> jax.Array:
    """The largest threshold at which the tokens kept weigh at least `p` of each row's total weight."""
    wanted = p * jnp.sum(weights, axis=-1)

    def enough(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        keep = ordered >= at[:, None]
        weight = jnp.sum(jnp.where(keep, weights, 0.0), axis=-1)
        return weight >= wanted, jnp.sum(keep, axis=-1, dtype=jnp.int32)

    return _largest(ordered, enough)


_Bounds = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _largest(ordered: jax.Array, enough: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Bisects for the largest threshold [B] that keeps enough; `enough` also counts the tokens it keeps.

    Stops early in rows where a single token lies between the bounds: then the lower bound keeps the right ones.
    """
    low, high = ordered.min(-1), ordered.max(-1) + 1
    rows, vocabulary = ordered.shape

    def unsettled(bounds: _Bounds) -> jax.Array:
        low, high, kept_low, kept_high = bounds
        return (_midpoint(low, high) > low) & (kept_low - kept_high > 1)

    def halve(bounds: _Bounds) -> _Bounds:
        low, high, kept_low, kept_high = bounds
        middle = _midpoint(low, high)
        keeps, kept = enough(middle)
        go = unsettled(bounds)
        up, down = go & keeps, go & ~keeps
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, kept, kept_low),
            jnp.where(down, kept, kept_high),
        )

    bounds = (low, high, jnp.full(rows, vocabulary, jnp.int32), jnp.zeros(rows, jnp.int32))
    return lax.while_loop(lambda bounds: jnp.any(unsettled(bounds)), halve, bounds)[0]


def _midpoint(low: jax.Array, high: jax.Array) -> jax.Array:
    """Middle of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


def invert_cumulative(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index [B] at which the cumulative sum of `weights` [B, V] passes `uniform` [B] of its total.

    Never an index of weight zero, as long as a row has any weight. In two levels, since a cumulative sum over a
    whole vocabulary is slow on a CPU.
    """
    blocks = _blocks(weights)
    sums = blocks.sum(-1)
    block, before = _pass(sums, uniform * jnp.cumsum(sums, axis=-1)[:, -1])
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    index, _ = _pass(inner, before)
    return (block * _BLOCK + index).astype(jnp.int32)


def _pass(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index at which the cumulative sum exceeds `target`, and what of the target lies within that entry."""
    total = jnp.cumsum(weights, axis=-1)
    passed = (total > target[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    index = jnp.where(passed.any(-1), jnp.argmax(passed, axis=-1), last)
    before = jnp.take_along_axis(total - weights, index[:, None], axis=-1)[:, 0]
    return index, jnp.maximum(target - before, 0.0)
