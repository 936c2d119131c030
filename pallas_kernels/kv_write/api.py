"""`kv_write` for whatever device compiles it."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import dispatch, unsupported_pages
from pallas_kernels.kv_write import reference, triton


def kv_write(
    k_new: jax.Array,  # [T, K, D]
    v_new: jax.Array,  # [T, K, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page: jax.Array,  # [T] int32, -1 skips the token
    offset: jax.Array,  # [T] int32, the token's place in its page
) -> tuple[jax.Array, jax.Array]:
    """Stores one key and one value per token; returns the pages (in place where they are donated)."""
    return dispatch(
        reference.kv_write,
        triton.kv_write,
        *(k_new, v_new, k_pages, v_pages, page, offset),
        unsupported=unsupported_pages(k_pages, k_new),
    )


def kv_write_int8(
    k_new: jax.Array,  # [T, K, D]
    v_new: jax.Array,  # [T, K, D]
    k_pages: jax.Array,  # [P, page_size, K, D] int8
    v_pages: jax.Array,  # [P, page_size, K, D] int8
    k_scale: jax.Array,  # [P, page_size, K] float32
    v_scale: jax.Array,  # [P, page_size, K] float32
    page: jax.Array,  # [T] int32, -1 skips the token
    offset: jax.Array,  # [T] int32, the token's place in its page
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Stores keys and values as 8-bit integers, and for each token and head what they are to be multiplied by."""
    return dispatch(
        reference.kv_write_int8,
        triton.kv_write_int8,
        *(k_new, v_new, k_pages, v_pages, k_scale, v_scale, page, offset),
        unsupported=unsupported_pages(k_pages, k_new),
    )
