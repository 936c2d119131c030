"""`core.sample` against a float64 sort of the whole vocabulary, and against the distribution it should draw from."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jbatch.core.sample import (
    SamplingRows,
    invert_cumulative,
    order_preserving_bits,
    sample,
    top_k_threshold,
    top_p_threshold,
)

DRAWS = 4096
_sample = jax.jit(sample)
_bits = jax.jit(order_preserving_bits)


@dataclass(frozen=True)
class Filter:
    """Sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def rows_of(filters: list[Filter], seed: np.ndarray, position: np.ndarray) -> SamplingRows:
    return SamplingRows(
        temperature=jnp.asarray([f.temperature for f in filters], jnp.float32),
        top_k=jnp.asarray([f.top_k for f in filters], jnp.int32),
        top_p=jnp.asarray([f.top_p for f in filters], jnp.float32),
        min_p=jnp.asarray([f.min_p for f in filters], jnp.float32),
        seed=jnp.asarray(seed, jnp.int32),
        position=jnp.asarray(position, jnp.int32),
    )


def draw(logits: np.ndarray, how: Filter, count: int = DRAWS, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of `count` draws from one row of logits, at positions 0 .. count - 1."""
    rows = rows_of([how] * count, np.full(count, seed), np.arange(count))
    token, logprob = _sample(jnp.asarray(np.broadcast_to(logits, (count, len(logits)))), rows)
    return np.asarray(token), np.asarray(logprob)


def kept_by_sorting(logits: np.ndarray, how: Filter) -> np.ndarray:
    """Which tokens [V] the filters keep: min-p, then top-k, then top-p; equals share their fate."""
    scaled = logits.astype(np.float64) / how.temperature
    weight = np.exp(scaled - scaled.max())
    kept = (weight > 0) & (weight >= how.min_p)
    if 0 < how.top_k < kept.sum():
        kept &= weight >= np.sort(weight[kept])[::-1][how.top_k - 1]
    if how.top_p < 1:
        descending = np.sort(weight[kept])[::-1]
        mass = np.cumsum(descending)
        last = np.argmax(mass >= how.top_p * mass[-1])
        kept &= weight >= descending[last]
    return kept


def flat_logits(size: int, seed: int = 0) -> np.ndarray:
    """No token is so rare that thousands of draws could miss it."""
    return np.random.default_rng(seed).uniform(-1, 1, size).astype(np.float32)


FILTERS = [
    Filter(),
    Filter(temperature=0.5),
    Filter(temperature=4.0),
    Filter(top_k=1),
    Filter(top_k=2),
    Filter(top_k=7),
    Filter(top_k=36),
    Filter(top_k=37),
    Filter(top_k=10_000),
    Filter(top_k=2**31 - 1),
    Filter(top_p=1e-30),
    Filter(top_p=0.05),
    Filter(top_p=0.5),
    Filter(top_p=0.999),
    Filter(min_p=1.0),
    Filter(min_p=0.9),
    Filter(min_p=0.3),
    Filter(min_p=1e-30),
    Filter(top_k=9, top_p=0.6),
    Filter(top_k=20, top_p=0.7, min_p=0.4, temperature=0.8),
    Filter(top_k=5, min_p=0.95),
    Filter(top_p=0.6, min_p=0.35, temperature=1.7),
]


@pytest.mark.parametrize("how", FILTERS, ids=repr)
def test_exactly_the_tokens_that_sorting_keeps_are_drawn(how: Filter) -> None:
    logits = flat_logits(37)
    tokens, _ = draw(logits, how)
    assert set(tokens.tolist()) == set(np.flatnonzero(kept_by_sorting(logits, how)).tolist())


@pytest.mark.parametrize("how", FILTERS, ids=repr)
def test_draws_follow_the_filtered_distribution(how: Filter) -> None:
    """Chi-square with a bound of six standard deviations; seeds are fixed, so it cannot flicker."""
    logits = flat_logits(37, seed=5)
    tokens, _ = draw(logits, how, seed=99)
    kept = kept_by_sorting(logits, how)
    weight = np.where(kept, np.exp(logits.astype(np.float64) / how.temperature), 0.0)
    expected = DRAWS * weight[kept] / weight.sum()
    observed = np.bincount(tokens, minlength=len(logits))[kept]
    degrees = max(kept.sum() - 1, 1)
    assert np.sum((observed - expected) ** 2 / expected) < degrees + 6 * np.sqrt(2 * degrees)


def test_equal_logits_all_stay() -> None:
    logits = np.float32([0, 2, 1, 2, 2, -1, 1])
    for how, expected in [
        (Filter(top_k=1), {1, 3, 4}),
        (Filter(top_k=2), {1, 3, 4}),
        (Filter(top_k=4), {1, 2, 3, 4, 6}),
        (Filter(top_p=0.01), {1, 3, 4}),
        (Filter(min_p=1.0), {1, 3, 4}),
    ]:
        assert set(draw(logits, how)[0].tolist()) == expected


def test_positive_and_negative_zero_are_equal() -> None:
    logits = np.float32([-0.0, -1, 0.0, -2])
    for how in (Filter(top_k=1), Filter(top_p=0.1), Filter(min_p=1.0), Filter(temperature=3.0, top_k=1)):
        assert set(draw(logits, how)[0].tolist()) == {0, 2}


@pytest.mark.parametrize("how", [*FILTERS, Filter(1e-9), Filter(1e30), Filter(3e38), Filter(3e38, 3)], ids=repr)
def test_masked_tokens_are_never_drawn(how: Filter) -> None:
    logits = flat_logits(600, seed=2)
    allowed = np.zeros(600, bool)
    allowed[[3, 255, 256, 257, 511, 512, 599]] = True
    logits[~allowed] = -np.inf
    tokens, logprob = draw(logits, how, count=256)
    assert set(tokens.tolist()) <= set(np.flatnonzero(kept_by_sorting(logits, how)).tolist())
    assert np.all(np.isfinite(logprob))


def test_a_single_allowed_token_is_always_drawn() -> None:
    for only in (0, 255, 256, 300):
        logits = np.full(301, -np.inf, np.float32)
        logits[only] = -5.0
        for how in FILTERS:
            tokens, logprob = draw(logits, how, count=16)
            assert set(tokens.tolist()) == {only}
            assert np.all(logprob == 0)


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 1000])
def test_any_size_of_vocabulary(vocabulary: int) -> None:
    logits = flat_logits(vocabulary, seed=vocabulary)
    for how in (Filter(), Filter(top_k=3), Filter(top_p=0.4), Filter(min_p=0.5)):
        tokens, _ = draw(logits, how, count=512)
        assert np.all(kept_by_sorting(logits, how)[tokens])


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6, 1e-10, 1e-20, 1e-30, 1e-37, 1e-38, 1e-45])
@pytest.mark.parametrize("how", [Filter(), Filter(top_k=5), Filter(top_p=0.9), Filter(min_p=0.1)], ids=repr)
def test_a_tiny_temperature_takes_the_likeliest_token(temperature: float, how: Filter) -> None:
    logits = np.random.default_rng(3).standard_normal(300).astype(np.float32) * 7
    how = Filter(temperature, how.top_k, how.top_p, how.min_p)
    tokens, logprob = draw(logits, how, count=64)
    assert set(tokens.tolist()) == {int(logits.argmax())}
    assert np.all(np.isfinite(logprob))


@pytest.mark.parametrize("temperature", [1e3, 1e10, 1e30, 3e38, np.inf])
def test_a_huge_temperature_draws_all_tokens_alike(temperature: float) -> None:
    logits = np.random.default_rng(4).standard_normal(16).astype(np.float32) * 7
    tokens, logprob = draw(logits, Filter(temperature))
    counts = np.bincount(tokens, minlength=16)
    assert len(counts) == 16
    assert np.sum((counts - DRAWS / 16) ** 2 / (DRAWS / 16)) < 15 + 6 * np.sqrt(30)
    assert np.all(np.isfinite(logprob))


def test_top_k_and_a_huge_temperature() -> None:
    logits = np.random.default_rng(4).standard_normal(300).astype(np.float32) * 7
    best = np.argsort(logits)[::-1][:4]
    assert set(draw(logits, Filter(1e30, top_k=4))[0].tolist()) == set(best.tolist())


def test_large_logits_do_not_overflow() -> None:
    logits = np.float32([3e38, -3e38, 2.9e38, 0])
    tokens, logprob = draw(logits, Filter(top_p=0.9), count=64)
    assert set(tokens.tolist()) == {0}
    assert np.all(np.isfinite(logprob))


@pytest.mark.parametrize("k", [1, 2, 17, 999, 1000, 1001, 5000])
@pytest.mark.parametrize("distinct", [5, 10**6])
def test_top_k_threshold_equals_sorting(k: int, distinct: int) -> None:
    rng = np.random.default_rng(k)
    values = rng.integers(-distinct, distinct, (8, 1000)).astype(np.int32)
    kept = values >= np.asarray(jax.jit(top_k_threshold)(values, jnp.full(8, k, jnp.int32)))[:, None]
    kth = np.sort(values, axis=-1)[:, ::-1][:, min(k, 1000) - 1]
    np.testing.assert_array_equal(kept, values >= kth[:, None])


@pytest.mark.parametrize("p", [1e-6, 0.01, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("distinct", [6, 10**6])
def test_top_p_threshold_equals_sorting(p: float, distinct: int) -> None:
    """Integer weights, whose sums are exact whatever their order."""
    rng = np.random.default_rng(int(p * 1000))
    values = rng.integers(1, distinct, (8, 700)).astype(np.int32)
    weights = (values % 1000 + 1).astype(np.float32)
    wanted = np.float32(p) * weights.sum(-1, dtype=np.float32)
    threshold = jax.jit(top_p_threshold)(values, jnp.asarray(weights), jnp.full(8, p, jnp.float32))
    kept = values >= np.asarray(threshold)[:, None]
    for row in range(8):
        levels = np.unique(values[row])[::-1]
        enough = [level for level in levels if weights[row][values[row] >= level].sum() >= wanted[row]]
        np.testing.assert_array_equal(kept[row], values[row] >= enough[0])


def test_extreme_integers_do_not_overflow_the_bisection() -> None:
    values = np.int32([[-(2**31) + 1, 2**31 - 2, 0, 5, -7]])
    for k, expected in [(1, 2**31 - 2), (2, 5), (3, 0), (4, -7), (5, -(2**31) + 1)]:
        threshold = int(top_k_threshold(values, jnp.int32([k]))[0])
        assert set(values[values >= threshold].tolist()) == set(values[values >= expected].tolist())


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), 2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-126)]),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(FLOATS, min_size=16, max_size=16))
def test_bits_keep_the_order_of_floats(values: list[float]) -> None:
    floats = np.asarray(values, np.float32)
    bits = np.asarray(_bits(floats)).astype(np.int64)
    less = floats[:, None] < floats[None, :]
    assert np.all((bits[:, None] < bits[None, :]) <= less), "the order of the integers holds for the floats"
    assert np.all(less <= (bits[:, None] <= bits[None, :])), "and never contradicts it"
    normal = np.abs(floats) >= np.finfo(np.float32).tiny
    strictly = less & normal[:, None] & normal[None, :]
    assert np.all(strictly <= (bits[:, None] < bits[None, :])), "normal numbers stay distinct"
    assert len(set(bits[floats == 0])) <= 1, "both zeros are one"


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 3), min_size=300, max_size=300).filter(any), st.floats(0, 1, exclude_max=True, width=32))
def test_inverting_a_cumulative_sum(weights: list[int], uniform: float) -> None:
    """Small integers add up exactly, so the answer is exact too."""
    expected = int(np.argmax(np.cumsum(weights) > np.float32(uniform) * np.float32(sum(weights))))
    index = int(jax.jit(invert_cumulative)(jnp.float32([weights]), jnp.float32([uniform]))[0])
    assert index == expected


def test_no_index_of_weight_zero_whatever_the_rounding() -> None:
    """Weights of very different sizes with gaps; uniform numbers at and around every step of the sum."""
    rng = np.random.default_rng(11)
    weights = np.exp(rng.standard_normal(2000) * 6).astype(np.float32)
    weights[rng.random(2000) < 0.6] = 0
    steps = np.cumsum(weights, dtype=np.float64)[weights > 0] / weights.sum(dtype=np.float64)
    around = np.concatenate([steps.astype(np.float32), np.nextafter(steps.astype(np.float32), np.float32(0)), [0.0]])
    uniform = np.minimum(around, np.nextafter(np.float32(1), np.float32(0))).astype(np.float32)
    index = jax.jit(invert_cumulative)(jnp.broadcast_to(weights, (len(uniform), 2000)), uniform)
    assert np.all(weights[np.asarray(index)] > 0)


def mixed_rows(count: int) -> tuple[np.ndarray, list[Filter], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((count, 500)).astype(np.float32) * 3
    filters = [Filter(0.0) if i % 3 == 0 else FILTERS[i % len(FILTERS)] for i in range(count)]
    return logits, filters, rng.integers(0, 2**31, count), rng.integers(0, 4000, count)


def test_a_draw_depends_on_its_own_row_only() -> None:
    """Neither the other rows, nor the row's place, nor the number of rows matter."""
    logits, filters, seed, position = mixed_rows(64)
    together, _ = _sample(logits, rows_of(filters, seed, position))
    shuffle = np.random.default_rng(1).permutation(64)
    shuffled, _ = _sample(logits[shuffle], rows_of([filters[i] for i in shuffle], seed[shuffle], position[shuffle]))
    np.testing.assert_array_equal(np.asarray(together)[shuffle], shuffled)
    for i in range(64):
        alone, _ = _sample(logits[i : i + 1], rows_of([filters[i]], seed[i : i + 1], position[i : i + 1]))
        assert int(alone[0]) == int(together[i])


def test_greedy_rows_ignore_sampled_rows_and_their_own_filters() -> None:
    logits, filters, seed, position = mixed_rows(64)
    tokens, _ = _sample(logits, rows_of(filters, seed, position))
    greedy = [i for i, how in enumerate(filters) if how.temperature == 0]
    np.testing.assert_array_equal(np.asarray(tokens)[greedy], logits[greedy].argmax(-1))
    filtered, _ = _sample(logits, rows_of([Filter(0.0, top_k=3, top_p=0.1, min_p=0.5)] * 64, seed, position))
    np.testing.assert_array_equal(filtered, logits.argmax(-1))


def test_greedy_takes_the_first_of_equals() -> None:
    tokens, _ = draw(np.float32([1, 3, 3, 0, 3]), Filter(0.0), count=2)
    assert tokens.tolist() == [1, 1]


def test_seed_and_position_both_matter() -> None:
    logits = flat_logits(500)
    first, again, other = (draw(logits, Filter(), count=64, seed=seed)[0] for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert np.mean(first == other) < 0.2
    assert len(set(first.tolist())) > 32


@pytest.mark.parametrize("how", [Filter(0.0), Filter(), Filter(0.3, 4, 0.5, 0.1)], ids=repr)
def test_logprob_is_that_of_the_unscaled_distribution(how: Filter) -> None:
    logits = np.random.default_rng(6).standard_normal((32, 49_152)).astype(np.float32) * 4
    token, logprob = _sample(logits, rows_of([how] * 32, np.arange(32), np.arange(32)))
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    expected = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprob, expected[np.arange(32), np.asarray(token)], atol=1e-5)
