"""Every backend of every operation against float64 brute force, over the shapes of real models.

Unused pages and places hold not-a-numbers, tables are permuted, and rows end at and around the edges of pages, tiles
and splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from backends import BACKENDS, call, decode, prefill
from dense import Problem, decode_problem, make_problem

from pallas_kernels.shapes import MODELS

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


@dataclass(frozen=True)
class Case:
    """Heads of a real model, with a window short enough to matter in a short test."""

    model: str
    dtype: str = "float32"
    splits: int = 1
    window: int | None = None
    skipped: bool = False
    causal: bool = True
    queries: int = 16
    """Of a chunk."""

    @property
    def shape(self) -> dict[str, int]:
        model = MODELS[self.model]
        group = model.heads // model.kv_heads
        kv_heads = min(model.kv_heads, 2)  # more are more of the same
        return {"kv_heads": kv_heads, "group": group, "dim": model.dim, "page_size": model.page_size}

    def finish(self, problem: Problem, unseen: list[int]) -> Problem:
        skipped = np.int32(unseen) if self.skipped else None
        cap = MODELS[self.model].soft_cap
        problem = replace(problem, skipped=skipped, causal=self.causal, window=self.window, soft_cap=cap)
        return problem.rounded(jnp.dtype(self.dtype))


DECODES = [
    Case("smollm2-135m"),
    Case("llama3-8b", "bfloat16", splits=3),
    Case("qwen2.5-7b", splits=2, window=70),
    Case("qwen3-moe-235b", "float16", window=1),
    Case("gemma2-9b", splits=4, window=100),
    Case("phi3-mini", splits=2, skipped=True),
]
LENGTHS = [1, 0, 7, 8, 9, 63, 64, 65, 129, 200]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decode(case: Case, backend: str) -> None:
    unseen = [0] * len(LENGTHS)
    if case.window:
        unseen = [max(0, length - case.window) for length in LENGTHS]
    if case.skipped:
        unseen = [length * row // len(LENGTHS) for row, length in enumerate(LENGTHS)]
        unseen[-2] = LENGTHS[-2]  # nothing left
    problem = case.finish(decode_problem(LENGTHS, unseen=unseen, **case.shape), unseen)
    out, lse = decode(problem, backend, splits=case.splits)
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(out, problem.expected(), atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, problem.expected_lse(), atol=tolerance, rtol=tolerance)


PREFILLS = [
    Case("smollm2-135m", queries=40),
    Case("llama3-8b", "bfloat16", splits=2),
    Case("qwen2.5-7b", window=20),
    Case("qwen3-moe-235b", "float16", queries=8, splits=3),
    Case("gemma2-9b", window=33, queries=8),
    Case("phi3-mini", skipped=True),
    Case("llama3-8b", causal=False, queries=5),
]
STARTS = [0, 1, 15, 16, 31, 64, 90, 130]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", PREFILLS, ids=str)
def test_prefill(case: Case, backend: str) -> None:
    lengths = [start + 1 + start % case.queries for start in STARTS] + [0]
    starts = [*STARTS, 0]
    unseen = [0] * len(starts)
    if case.window:
        unseen = [max(0, start - case.window + 1) for start in starts]
    if case.skipped:
        unseen = [start // 2 for start in starts]
    problem = case.finish(make_problem(lengths, starts, case.queries, unseen=unseen, **case.shape), unseen)
    out, lse = prefill(problem, backend, splits=case.splits)
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(out, problem.expected(), atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, problem.expected_lse(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("skipped", [0.4, 1.0])
@pytest.mark.parametrize("model", ["smollm2-135m", "phi3-mini"])
def test_write(model: str, skipped: float, backend: str) -> None:
    """Tokens land in their places, and nothing else changes."""
    shape = MODELS[model]
    rng = np.random.default_rng(shape.dim)
    tokens, num_pages = 37, 5
    places = rng.choice(num_pages * shape.page_size, tokens, replace=False)
    page = np.where(rng.random(tokens) < skipped, -1, places // shape.page_size).astype(np.int32)
    offset = (places % shape.page_size).astype(np.int32)
    pages = rng.standard_normal((2, num_pages, shape.page_size, shape.kv_heads, shape.dim)).astype(jnp.bfloat16)
    new = rng.standard_normal((2, tokens, shape.kv_heads, shape.dim)).astype(np.float32)
    written = call("kv_write", backend, *new, *pages, page, offset)
    for before, after, tokens_new in zip(pages, written, new, strict=True):
        expected = before.copy()
        expected[page[page >= 0], offset[page >= 0]] = tokens_new[page >= 0].astype(jnp.bfloat16)
        np.testing.assert_array_equal(after.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge(dtype: str, backend: str) -> None:
    """Attention over three sets of scores, one row's first set and another row's sets all being empty."""
    rng = np.random.default_rng(0)
    parts, rows, heads, dim, tokens = 3, 4, 5, 96, 7
    scores = rng.standard_normal((parts, rows, heads, tokens)) * 20
    values = rng.standard_normal((parts, rows, heads, tokens, dim))
    scores[0, 1], scores[:, 2] = -np.inf, -np.inf
    top = np.maximum(scores.max(-1, keepdims=True), -1e9)
    weights = np.exp2(scores - top)
    norm = weights.sum(-1)
    outs = np.einsum("nsht,nshtd->nshd", weights, values) / np.maximum(norm, 1e-300)[..., None]
    with np.errstate(divide="ignore"):
        lses = top[..., 0] + np.log2(norm)
        whole = np.log2(np.exp2(scores).sum((0, 3)))
    all_weights = np.exp2(scores - np.where(np.isfinite(whole), whole, 0)[None, ..., None])
    expected = np.einsum("nsht,nshtd->shd", all_weights, values)
    settings: dict[str, Any] = {"out_dtype": jnp.dtype(dtype)}
    out, lse = call("merge_states", backend, outs.astype(np.float32), lses.astype(np.float32), **settings)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, whole, atol=1e-5, rtol=1e-5)


def quantised(pages: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages in 8 bits, their factors, and what the two come to; no factor is a number where pages hold none."""
    factors = np.abs(pages).max(-1) / 127
    numbers = np.nan_to_num(np.round(pages / factors[..., None])).astype(np.int8)
    return numbers, factors, numbers * factors[..., None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_over_8_bit_integers(queries: int, backend: str) -> None:
    starts = [0, 40, 7, 130]
    problem = make_problem([start + queries for start in starts], starts, queries, kv_heads=2, group=4, dim=64)
    (k, k_scale, k_whole), (v, v_scale, v_whole) = quantised(problem.k_pages), quantised(problem.v_pages)
    expected = replace(problem, k_pages=k_whole, v_pages=v_whole)
    problem = replace(problem, k_pages=k, v_pages=v)
    attend = decode if queries == 1 else prefill
    out, lse = attend(problem, backend, k_scale, v_scale, splits=2)
    np.testing.assert_allclose(out, expected.expected(), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(lse, expected.expected_lse(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_over_8_bit_floats(backend: str) -> None:
    problem = decode_problem(LENGTHS, kv_heads=2, group=4, dim=64)
    kind = jnp.float8_e4m3fn
    rounded = {name: getattr(problem, name).astype(kind) for name in ("k_pages", "v_pages")}
    expected = replace(problem, **{name: pages.astype(np.float32) for name, pages in rounded.items()})
    out, _ = decode(replace(problem, **rounded), backend)
    np.testing.assert_allclose(out, expected.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_8_bit_integers(backend: str) -> None:
    rng = np.random.default_rng(5)
    shape = (3, 8, 3, 80)
    k_new, v_new = rng.standard_normal((2, 4, *shape[2:])).astype(np.float32)
    v_new[0] = 0
    page, offset = np.int32([2, -1, 1, 2]), np.int32([7, 0, 3, 0])
    pages = np.full((2, *shape), 99, np.int8)
    scales = np.full((2, *shape[:3]), 99, np.float32)
    after = call("kv_write_int8", backend, k_new, v_new, *pages, *scales, page, offset)
    for new, numbers, factors in ((k_new, after[0], after[2]), (v_new, after[1], after[3])):
        stored = numbers[page, offset] * factors[page, offset][..., None]
        for token in (0, 2, 3):
            most = np.abs(new[token]).max(-1, keepdims=True)
            assert np.all(np.abs(stored[token] - new[token]) <= most / 253)
        untouched = np.ones(shape[:2], bool)
        untouched[page[page >= 0], offset[page >= 0]] = False
        assert np.all(numbers[untouched] == 99) and np.all(factors[untouched] == 99)


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_8_bit_floats(backend: str) -> None:
    """What is too large becomes the largest number there is."""
    new = np.float32([1000.0, -1000.0, 1.0625, 0.0] * 4).reshape(1, 1, 16)
    pages = np.zeros((2, 8, 1, 16), jnp.float8_e4m3fn)
    after, _ = call("kv_write", backend, new, new, pages, pages, np.int32([1]), np.int32([2]))
    np.testing.assert_array_equal(after[1, 2, 0, :4].astype(np.float32), [448.0, -448.0, 1.0, 0.0])
