"""Decode rows that share pages, on the path of plain XLA, against float64 brute force."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from dense import Problem, decode_problem

from pallas_kernels.paged_decode.reference import paged_decode
from pallas_kernels.shared_blocks import FEWEST_SHARERS, shared_blocks

_decode = jax.jit(paged_decode, static_argnames="scale")
_shared = jax.jit(shared_blocks, static_argnums=(2, 3))

SHAPES = [
    {"kv_heads": 2, "group": 1, "dim": 16, "page_size": 8},
    {"kv_heads": 3, "group": 3, "dim": 64, "page_size": 16},
    {"kv_heads": 5, "group": 2, "dim": 16, "page_size": 16},
    {"kv_heads": 1, "group": 1, "dim": 64, "page_size": 128},
]


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


def test_what_is_not_a_number_stays_in_its_group() -> None:
    problem = decode_problem([200] * 8)
    for first in (0, 4):
        problem.page_table[first : first + 4, :8] = problem.page_table[first, :8]
    problem.v_pages[problem.page_table[0, 3]] = np.nan
    out, count = decode_shared(problem)
    assert count == 4
    assert np.all(np.isnan(out[:4]))
    np.testing.assert_allclose(out[4:], problem.expected()[4:], atol=1e-5, rtol=1e-5)


def test_too_few_sharers_go_alone() -> None:
    problem = decode_problem([200] * (FEWEST_SHARERS - 1) + [200, 90])
    problem.page_table[: FEWEST_SHARERS - 1, :8] = problem.page_table[0, :8]
    out, count = decode_shared(problem)
    np.testing.assert_allclose(out, problem.expected(), atol=1e-5, rtol=1e-5)
    assert count == 0
