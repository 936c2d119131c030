"""`kv_write` in plain XLA: what every device without a kernel of its own runs, and what kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LARGEST = 127.0
"""Of 8-bit integers, the same on both sides of zero."""

LARGEST_FLOAT8 = 448.0
"""Of 8-bit floats with four bits of exponent."""

LEAST_FACTOR = 1e-30
"""So that zeros are divided by something."""


def kv_write(
    k_new: jax.Array,  # [T, K, D]
    v_new: jax.Array,  # [T, K, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page: jax.Array,  # [T] int32, -1 skips the token
    offset: jax.Array,  # [T] int32, the token's place in its page
) -> tuple[jax.Array, jax.Array]:
    """Stores one key and one value per token; returns the pages (in place where they are donated)."""
    page = jnp.where(page < 0, k_pages.shape[0], page)  # past the end: dropped

    def write(pages: jax.Array, new: jax.Array) -> jax.Array:
        return pages.at[page, offset].set(stored(new, pages.dtype), mode="drop", unique_indices=True)

    return write(k_pages, k_new), write(v_pages, v_new)


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
    page = jnp.where(page < 0, k_pages.shape[0], page)  # past the end: dropped

    def write(pages: jax.Array, scales: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers, factors = quantise(new)
        pages = pages.at[page, offset].set(numbers, mode="drop", unique_indices=True)
        return pages, scales.at[page, offset].set(factors, mode="drop", unique_indices=True)

    k_pages, k_scale = write(k_pages, k_scale, k_new)
    v_pages, v_scale = write(v_pages, v_scale, v_new)
    return k_pages, v_pages, k_scale, v_scale


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` as pages of `dtype` hold it: to 8-bit floats, which have no infinity, large numbers become the largest."""
    if dtype == jnp.float8_e4m3fn:
        x = jnp.clip(x, -LARGEST_FLOAT8, LARGEST_FLOAT8)
    return x.astype(dtype)


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`x` [..., D] -> int8 [..., D] and float32 factors [...], whose product is `x` to 1/254 of its largest number."""
    x = x.astype(jnp.float32)
    factor = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), LEAST_FACTOR * LARGEST) / LARGEST
    return jnp.floor(x / factor[..., None] + 0.5).astype(jnp.int8), factor
