"""`kv_write` in plain XLA: what every device without a kernel of its own runs, and what kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
        return pages.at[page, offset].set(new.astype(pages.dtype), mode="drop", unique_indices=True)

    return write(k_pages, k_new), write(v_pages, v_new)
