"""`paged_decode` and `paged_prefill`, as a CPU runs them, against float64 brute force."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import Problem, decode_problem, make_problem

from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.shared_blocks import FEWEST_SHARERS, shared_blocks

_prefill = jax.jit(paged_prefill, static_argnames="scale")
_decode = jax.jit(paged_decode, static_argnames="scale")
_shared = jax.jit(shared_blocks, static_argnums=(2, 3))

EDGES = [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 0, 200]
SHAPES = [
    {"kv_heads": 2, "group": 1, "dim": 16, "page_size": 8},
    {"kv_heads": 3, "group": 3, "dim": 64, "page_size": 16},
    {"kv_heads": 1, "group": 7, "dim": 16, "page_size": 64},
    {"kv_heads": 5, "group": 2, "dim": 16, "page_size": 16},
    {"kv_heads": 2, "group": 7, "dim": 64, "page_size": 8},
    {"kv_heads": 1, "group": 1, "dim": 64, "page_size": 128},
]


def prefill(problem: Problem) -> np.ndarray:
    """The kernel's answer, zeros where it means nothing."""
    p = problem
    out, _ = _prefill(p.q, p.k_pages, p.v_pages, p.page_table, p.start, p.lengths, scale=p.scale)
    return np.where(p.real()[..., None, None], np.asarray(out, np.float64), 0.0)


def decode(problem: Problem) -> np.ndarray:
    p = problem
    out, _ = _decode(p.q[:, 0], p.k_pages, p.v_pages, p.page_table, p.lengths, scale=p.scale)
    return np.asarray(out, np.float64)[:, None]


def chunks_of(length: int, size: int) -> list[tuple[int, int]]:
    """(length so far, start) of each chunk of a prompt."""
    return [(min(start + size, length), start) for start in range(0, length, size)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_at_the_edges_of_pages_and_blocks(shape: dict[str, int]) -> None:
    problem = decode_problem(EDGES, **shape)
    np.testing.assert_allclose(decode(problem), problem.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_at_the_edges_of_pages_and_blocks(shape: dict[str, int]) -> None:
    parts = [part for length in (1, 8, 63, 64, 65, 129) for part in chunks_of(length, 32)] + [(0, 0)]
    lengths, starts = map(list, zip(*parts, strict=True))
    problem = make_problem(lengths, starts, 32, **shape)
    np.testing.assert_allclose(prefill(problem), problem.expected(), atol=1e-5, rtol=1e-5)


def test_prefill_from_any_start() -> None:
    """Chunks that begin in the middle of a page, and chunks that the request's end cuts short."""
    starts = [0, 1, 5, 15, 16, 31, 62, 64, 90]
    problem = make_problem([start + 1 + start % 7 for start in starts], starts, 8, page_size=16)
    np.testing.assert_allclose(prefill(problem), problem.expected(), atol=1e-5, rtol=1e-5)


def test_a_later_token_of_the_request_is_not_seen() -> None:
    """Rows of one request in one step: the pages already hold tokens past a row's end."""
    whole = make_problem([48], [32], 16)
    table = np.repeat(whole.page_table, 3, axis=0)
    q = np.random.default_rng(1).standard_normal((3, 16, *whole.q.shape[2:])).astype(np.float32)
    problem = replace(whole, q=q, page_table=table, start=np.int32([0, 16, 32]), lengths=np.int32([16, 32, 48]))
    np.testing.assert_allclose(prefill(problem), problem.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 48])
def test_any_number_of_rows(rows: int) -> None:
    """From 32 rows on they go in groups."""
    lengths = np.random.default_rng(rows).integers(0, 150, rows).tolist()
    problem = decode_problem(lengths, page_size=8, width=19)
    np.testing.assert_allclose(decode(problem), problem.expected(), atol=1e-5, rtol=1e-5)


def test_prefill_rows_in_groups() -> None:
    lengths = np.random.default_rng(3).integers(1, 150, 32).tolist()
    problem = make_problem(lengths, [max(0, length - 8) for length in lengths], 8, page_size=8)
    np.testing.assert_allclose(prefill(problem), problem.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 9])
def test_tables_narrower_than_a_block_or_no_multiple_of_it(width: int) -> None:
    problem = decode_problem([width * 16, 1, width * 16 - 15, 0], page_size=16, width=width)
    np.testing.assert_allclose(decode(problem), problem.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("filler", [-1, 0, 3, 10_000])
def test_unused_table_entries_may_hold_anything(filler: int) -> None:
    problem = decode_problem([5, 70, 0, 33], page_size=8, width=12)
    table = np.where(problem.page_table < 0, filler, problem.page_table).astype(np.int32)
    np.testing.assert_allclose(decode(replace(problem, page_table=table)), problem.expected(), atol=1e-5, rtol=1e-5)


def test_idle_rows_give_zeros() -> None:
    idle = decode_problem([0, 0, 0], width=4)
    assert np.all(decode(idle) == 0)
    assert np.all(prefill(replace(idle, start=np.int32([0, 0, 0]))) == 0)


def test_large_scores_do_not_overflow() -> None:
    problem = decode_problem([100, 64, 3])
    problem = replace(problem, q=problem.q * 200)
    np.testing.assert_allclose(decode(problem), problem.expected(), atol=1e-4, rtol=1e-4)


def decode_shared(problem: Problem) -> tuple[np.ndarray, int]:
    """The answer where shared blocks are attended to once, and how many there were."""
    p = problem
    shared = _shared(p.page_table, p.lengths, p.k_pages.shape[1], p.k_pages.shape[0])
    out, _ = _decode(p.q[:, 0], p.k_pages, p.v_pages, p.page_table, p.lengths, scale=p.scale, shared=shared)
    return np.asarray(out, np.float64)[:, None], int(shared.num_blocks)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_rows_share_is_attended_to_once(shape: dict[str, int]) -> None:
    """Eight rows over two common blocks, five of those over a third, two over a fourth; and rows of their own."""
    problem = decode_problem([300, 270, 290, 257, 400, 130, 200, 140, 0, 50, 300], **shape)
    table, per_block = problem.page_table, max(1, 64 // shape["page_size"])
    for rows, blocks in ((8, 2), (5, 3), (2, 4)):
        columns = min(blocks * per_block, int(problem.lengths[:rows].min()) // shape["page_size"])
        table[:rows, :columns] = table[0, :columns]
    out, count = decode_shared(problem)
    np.testing.assert_allclose(out, problem.expected(), atol=1e-5, rtol=1e-5)
    assert count == (3 if shape["page_size"] < 128 else 2)


@pytest.mark.parametrize("seed", range(20))
def test_any_pattern_of_shared_blocks(seed: int) -> None:
    """Also blocks in common behind ones that are not, as copies of the same page make them."""
    rng = np.random.default_rng(seed)
    rows, blocks = 12, 4
    problem = decode_problem(rng.integers(0, blocks * 64 + 1, rows).tolist(), width=blocks * 4, seed=seed)
    whole = problem.lengths // 64
    for column in range(blocks):
        having = np.flatnonzero(whole > column)
        leader = {0: having[:1], 1: having[-1:]}
        for row in having[rng.random(len(having)) < 0.8]:
            source = leader[int(rng.integers(2))][0]
            at = slice(column * 4, column * 4 + 4)
            problem.page_table[row, at] = problem.page_table[source, at]
    out, _ = decode_shared(problem)
    np.testing.assert_allclose(out, problem.expected(), atol=1e-5, rtol=1e-5)


def test_too_few_sharers_go_alone() -> None:
    problem = decode_problem([200] * (FEWEST_SHARERS - 1) + [200, 90])
    problem.page_table[: FEWEST_SHARERS - 1, :8] = problem.page_table[0, :8]
    out, count = decode_shared(problem)
    np.testing.assert_allclose(out, problem.expected(), atol=1e-5, rtol=1e-5)
    assert count == 0


def test_bfloat16_pages_are_summed_in_float32() -> None:
    problem = decode_problem([1, 64, 129, 200], page_size=16)
    k, v = (jnp.asarray(pages, jnp.bfloat16) for pages in (problem.k_pages, problem.v_pages))
    rounded = replace(problem, k_pages=np.asarray(k, np.float32), v_pages=np.asarray(v, np.float32))
    out, _ = _decode(problem.q[:, 0], k, v, problem.page_table, problem.lengths, scale=problem.scale)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64)[:, None], rounded.expected(), atol=1e-5, rtol=1e-5)
