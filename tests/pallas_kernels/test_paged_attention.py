"""`paged_decode` and `paged_prefill`, in plain XLA, against float64 brute force."""

from __future__ import annotations

from dataclasses import replace

import backends
import jax.numpy as jnp
import numpy as np
import pytest
from dense import Problem, decode_problem, make_problem

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
    """The reference's answer, zeros where it means nothing."""
    return backends.prefill(problem, "xla")[0]


def decode(problem: Problem) -> np.ndarray:
    return backends.decode(problem, "xla")[0]


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


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 48, 70])
def test_any_number_of_rows(rows: int) -> None:
    """More than 32 go in groups."""
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


def test_bfloat16_pages_are_summed_in_float32() -> None:
    problem = decode_problem([1, 64, 129, 200], page_size=16)
    k, v = (pages.astype(jnp.bfloat16) for pages in (problem.k_pages, problem.v_pages))
    rounded = replace(problem, k_pages=k.astype(np.float32), v_pages=v.astype(np.float32))
    out = decode(replace(problem, k_pages=k, v_pages=v))
    np.testing.assert_allclose(out, rounded.expected(), atol=1e-5, rtol=1e-5)
