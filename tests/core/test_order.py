"""Sorting, compacting and dealing out, against numpy and plain loops."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jbatch.core.order import ascending, compact, first, inverse, owners, sorted_by
from jbatch.core.pages import _least

ROWS, SIZE, MOST = 9, 6, 5


def rows(least: int, most: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(least, most), min_size=ROWS, max_size=ROWS).map(lambda row: np.array(row, np.int32))


_sorted_by, _inverse, _first = jax.jit(sorted_by), jax.jit(inverse), jax.jit(first)
_ascending = jax.jit(partial(ascending, most=MOST))
_compact, _owners = jax.jit(partial(compact, size=SIZE)), jax.jit(partial(owners, size=SIZE))
_select = jax.jit(_least)


@settings(deadline=None)  # the first example compiles
@given(rows(-2, 2), rows(-(2**31), 2**31 - 1))
def test_orders(key: np.ndarray, other: np.ndarray) -> None:
    order = np.lexsort((other, key))
    assert _sorted_by(key, other).tolist() == order.tolist()
    assert _inverse(jnp.asarray(order, jnp.int32)).tolist() == np.argsort(order).tolist()


@settings(deadline=None)  # the first example compiles
@given(rows(0, MOST))
def test_ascending_keeps_the_order_of_equal_ones(values: np.ndarray) -> None:
    assert _ascending(values).tolist() == np.argsort(values, kind="stable").tolist()


@settings(deadline=None)  # the first example compiles
@given(rows(0, 1))
def test_selections(mask: np.ndarray) -> None:
    chosen = np.flatnonzero(mask).tolist()
    assert _compact(mask == 1).tolist() == [*chosen, *[ROWS] * SIZE][:SIZE]
    assert _first(mask == 1) == (chosen[0] if chosen else ROWS)


@settings(deadline=None)  # the first example compiles
@given(rows(0, 3))
def test_owners_of_as_many_as_there_are(counts: np.ndarray) -> None:
    owner, nth = _owners(counts)
    dealt = [(i, n) for i, count in enumerate(counts) for n in range(count)][:SIZE]
    assert list(zip(owner.tolist(), nth.tolist(), strict=True))[: len(dealt)] == dealt
    assert np.all((owner >= 0) & (owner < ROWS))


@settings(deadline=None)  # the first example compiles
@given(rows(0, 2**30 - 1), rows(0, 3), rows(0, 1), st.integers(-1, ROWS + 1))
def test_the_least_of_some(wide: np.ndarray, narrow: np.ndarray, mask: np.ndarray, count: int) -> None:
    """Keys of all sizes, and keys of which many are equal."""
    for key in (wide, narrow):
        expected = sorted(np.flatnonzero(mask), key=lambda i: (key[i], i))[: max(count, 0)]
        assert np.flatnonzero(_select(key, mask == 1, count)).tolist() == sorted(expected)
