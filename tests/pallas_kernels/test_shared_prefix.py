"""Decode over shared prefixes: the grouping, and that results are those of plain decode."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import Problem, decode_problem

from pallas_kernels import dispatch
from pallas_kernels.shared_prefix import Groups, group_rows, shared_prefix_decode

PAGE_SIZE = 16


def shared_problem() -> Problem:
    """A group of 18 rows over 320 tokens (one of them over 288), one of 8 over 256, one too small, others too short."""
    sizes = [(18, 320), (8, 256), (7, 400), (5, 128)]
    rng = np.random.default_rng(0)
    lengths = [shared + int(rng.integers(1, 60)) for size, shared in sizes for _ in range(size)] + [0, 40]
    lengths[3] = 289
    problem = decode_problem(lengths, kv_heads=1, group=4, dim=16, page_size=PAGE_SIZE)
    table = problem.page_table.copy()
    first = 0
    for size, shared in sizes:
        for row in range(first, first + size):
            pages = min(shared, (lengths[row] - 1) // PAGE_SIZE * PAGE_SIZE) // PAGE_SIZE
            table[row, :pages] = table[first, :pages]
        first += size
    order = rng.permutation(len(lengths))
    return replace(problem, page_table=table[order], lengths=problem.lengths[order], start=problem.start[order])


def groups_of(problem: Problem) -> Groups:
    return Groups(
        *map(np.asarray, jax.jit(group_rows, static_argnums=2)(problem.page_table, problem.lengths, PAGE_SIZE))
    )


def test_rows_that_share_pages_stand_together() -> None:
    problem = shared_problem()
    groups = groups_of(problem)
    members = [row for row in groups.rows.ravel() if row >= 0]
    assert sorted(members) == sorted(np.flatnonzero(groups.place >= 0))
    np.testing.assert_array_equal(groups.rows.ravel()[groups.place[members]], members)
    assert sorted(groups.lengths[groups.lengths > 0]) == [256, 288, 288]
    for rows, length in zip(groups.rows, groups.lengths, strict=True):
        for row in rows[rows >= 0]:
            assert groups.skipped[row] == length < problem.lengths[row]
            pages = length // PAGE_SIZE
            np.testing.assert_array_equal(problem.page_table[row, :pages], problem.page_table[rows[0], :pages])
    assert np.all(groups.skipped[groups.place < 0] == 0)
    assert len(members) == 26


@pytest.mark.parametrize("sizes", [[8] * 8, [64], [17, 16, 15, 8, 8], [9, 55], [1] * 64])
def test_blocks_suffice_for_any_sizes(sizes: list[int]) -> None:
    leaders = np.repeat(np.arange(len(sizes)), sizes)
    table = np.int32(leaders)[:, None] * 100 + np.arange(20, dtype=np.int32)
    groups = Groups(*map(np.asarray, group_rows(jnp.asarray(table), jnp.full(64, 320, jnp.int32), PAGE_SIZE)))
    assert np.sum(groups.rows >= 0) == sum(size for size in sizes if size >= 8)
    for size, leader in zip(sizes, range(len(sizes)), strict=True):
        assert np.all((groups.place >= 0)[leaders == leader] == (size >= 8))
    assert np.all(np.sort(groups.place[groups.place >= 0])[1:] > np.sort(groups.place[groups.place >= 0])[:-1])


def test_what_is_not_a_number_stays_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last place of the last block is what rows of no group would read."""
    monkeypatch.setattr(dispatch, "mode", lambda: "xla")
    p = shared_problem()
    rows, place, skipped = np.zeros((1, 16), np.int32), np.full(40, -1), np.zeros(40, np.int32)
    groups = Groups(rows=rows, lengths=np.int32([16]), place=place, skipped=skipped)
    p.v_pages[p.page_table[0, 0]] = np.nan
    run = jax.jit(partial(shared_prefix_decode, scale=p.scale))
    out, _ = run(p.q[:, 0], p.k_pages, p.v_pages, p.page_table, p.lengths, groups)
    clean = ~np.any(np.isin(p.page_table, p.page_table[0, 0]), axis=1)
    assert clean.sum() > 20
    np.testing.assert_allclose(np.asarray(out)[clean][:, None], p.expected()[clean], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["xla", "interpret"])
def test_the_result_is_that_of_plain_decode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "mode", lambda: mode)
    p = shared_problem()
    groups = groups_of(p)
    args = p.q[:, 0], p.k_pages, p.v_pages, p.page_table, p.lengths, groups
    run = jax.jit(partial(shared_prefix_decode, scale=p.scale)).lower(*args)
    out, lse = run.compile(compiler_options={"xla_backend_optimization_level": 0})(*args)
    np.testing.assert_allclose(out[:, None], p.expected(), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(lse[:, None], p.expected_lse(), atol=1e-5, rtol=1e-5)
