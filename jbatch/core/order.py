"""Orders and selections of a table's rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def sorted_by(*keys: jax.Array) -> jax.Array:
    """Rows [R] int32 in the order of `keys`, each [R] int32: by the first, where equal by the next, then by row."""
    return lax.sort((*keys, jnp.arange(keys[0].shape[0], dtype=jnp.int32)), num_keys=len(keys))[-1]


def ascending(values: jax.Array, most: int) -> jax.Array:
    """Indices [M] int32 of `values` [M] int32, which are from 0 to `most`, in ascending order; equal ones by index.

    Sorts value and index as one number, ten times as fast on a CPU as with an array of indices that goes along.
    """
    num = values.shape[0]
    if (most + 1) * num > 2**32:
        raise ValueError(f"{num} values up to {most} and their indices do not fit into 32 bits")
    packed = values.astype(jnp.uint32) * jnp.uint32(num) + jnp.arange(num, dtype=jnp.uint32)
    return (lax.sort(packed) % jnp.uint32(num)).astype(jnp.int32)


def inverse(order: jax.Array) -> jax.Array:
    """Each row's place in `order` [R] int32."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32), unique_indices=True)


def compact(mask: jax.Array, size: int) -> jax.Array:
    """Indices of the first `size` true entries of `mask` [M], in order; M where there are fewer."""
    num = mask.shape[0]
    at = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, size)  # past the end: dropped
    index = jnp.arange(num, dtype=jnp.int32)
    return jnp.full(size, num, jnp.int32).at[at].set(index, mode="drop", unique_indices=True)


def owners(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Whose each of `size` things is, where the first of `counts` [M] has the first so many of them, and so on.

    Returns:
      Index among `counts` [size], of no meaning past their sum; and how many the same one has before it [size].
    """
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    at = jnp.where(counts > 0, before, size)  # where each one's things begin; past the end: dropped
    index = jnp.arange(counts.shape[0], dtype=jnp.int32)
    owner = lax.cummax(jnp.zeros(size, jnp.int32).at[at].set(index, mode="drop", unique_indices=True))
    return owner, jnp.arange(size, dtype=jnp.int32) - before[owner]


def first(mask: jax.Array) -> jax.Array:
    """Index of the first true entry of `mask` [M], int32; M where there is none."""
    num = mask.shape[0]
    return jnp.min(jnp.where(mask, jnp.arange(num, dtype=jnp.int32), num))
