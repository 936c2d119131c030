"""`kv_write` against a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write


def written_by_a_loop(pages: np.ndarray, new: np.ndarray, page: np.ndarray, offset: np.ndarray) -> np.ndarray:
    pages = pages.copy()
    for token in range(len(page)):
        if page[token] >= 0:
            pages[page[token], offset[token]] = new[token]
    return pages


@pytest.mark.parametrize(("kv_heads", "dim", "page_size"), [(1, 16, 8), (2, 64, 16), (3, 16, 64)])
@pytest.mark.parametrize("skipped", [0.0, 0.4, 1.0])
def test_tokens_land_in_their_places_and_nothing_else_changes(
    kv_heads: int, dim: int, page_size: int, skipped: float
) -> None:
    rng = np.random.default_rng(dim + page_size)
    tokens, num_pages = 37, 9
    places = rng.choice(num_pages * page_size, tokens, replace=False)
    page = np.where(rng.random(tokens) < skipped, -1, places // page_size).astype(np.int32)
    offset = (places % page_size).astype(np.int32)
    k_pages, v_pages = rng.standard_normal((2, num_pages, page_size, kv_heads, dim)).astype(np.float32)
    k_new, v_new = rng.standard_normal((2, tokens, kv_heads, dim)).astype(np.float32)
    k_out, v_out = jax.jit(kv_write)(k_new, v_new, k_pages, v_pages, page, offset)
    np.testing.assert_array_equal(k_out, written_by_a_loop(k_pages, k_new, page, offset))
    np.testing.assert_array_equal(v_out, written_by_a_loop(v_pages, v_new, page, offset))


def test_the_last_place_of_the_last_page_is_written_and_a_skip_never_wraps_to_it() -> None:
    pages = np.zeros((3, 8, 1, 4), np.float32)
    new = np.ones((2, 1, 4), np.float32)
    for page, expected in [([2, -1], 4.0), ([-1, -1], 0.0)]:
        out, _ = jax.jit(kv_write)(new, new, pages, pages, np.int32(page), np.int32([7, 7]))
        assert float(out.sum()) == float(out[2, 7].sum()) == expected


def test_values_are_cast_to_the_pages_dtype() -> None:
    new = np.full((1, 1, 4), 1 + 2.0**-10, np.float32)
    pages = jnp.zeros((2, 8, 1, 4), jnp.bfloat16)
    out, _ = kv_write(new, new, pages, pages, np.int32([1]), np.int32([0]))
    assert out.dtype == jnp.bfloat16
    assert float(out[1, 0, 0, 0]) == 1.0
