"""Pages of the KV cache: counting, handing out, giving back. All pure, none needs a host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jbatch.core.state import NO_PAGE, PagePool


def pages_for(tokens: jax.Array, page_size: int) -> jax.Array:
    """Pages that hold so many tokens."""
    return (tokens + page_size - 1) // page_size


def compact(mask: jax.Array, size: int) -> jax.Array:
    """Indices of the first `size` true entries of `mask` [M], in order; M where there are fewer."""
    counts = jnp.cumsum(mask, dtype=jnp.int32)
    return jnp.searchsorted(counts, jnp.arange(1, size + 1, dtype=jnp.int32)).astype(jnp.int32)


def num_free(pool: PagePool) -> jax.Array:
    """Pages nobody names, a scalar."""
    return jnp.sum(pool.refs == 0, dtype=jnp.int32)


def release(pool: PagePool, page_table: jax.Array, leaving: jax.Array) -> tuple[PagePool, jax.Array]:
    """Takes all pages from the slots in `leaving` [R]; returns the pool and the page table [R, N] without them.

    Costs one short scatter per slot that leaves, since XLA's scatters on a CPU are serial.
    """
    rows = compact(leaving, leaving.shape[0])

    def release_row(i: jax.Array, refs: jax.Array) -> jax.Array:
        entries = page_table[rows[i]]
        entries = jnp.where(entries == NO_PAGE, refs.shape[0], entries)
        return refs.at[entries].add(-1, mode="drop")

    refs = lax.fori_loop(0, jnp.sum(leaving, dtype=jnp.int32), release_row, pool.refs)
    return PagePool(refs=refs), jnp.where(leaving[:, None], NO_PAGE, page_table)


def allocate(
    pool: PagePool, page_table: jax.Array, slot: jax.Array, held: jax.Array, wanted: jax.Array, *, most: int
) -> tuple[PagePool, jax.Array]:
    """Appends `wanted[i]` fresh pages to the table row of `slot[i]`, which holds `held[i]` already.

    Args:
      slot, held, wanted: [M] int32; slots are distinct.
      most: static bound of the pages wanted in all. The caller sees to it that so many are free.
    """
    end = jnp.cumsum(wanted, dtype=jnp.int32)
    ids = compact(pool.refs == 0, most)
    nth = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.searchsorted(end, nth, side="right").astype(jnp.int32)  # whose page the nth one is
    used = nth < end[-1]
    owner = jnp.minimum(owner, slot.shape[0] - 1)
    column = held[owner] + nth - (end - wanted)[owner]
    row = jnp.where(used, slot[owner], page_table.shape[0])  # past the end: dropped
    page_table = page_table.at[row, column].set(ids, mode="drop", unique_indices=True)
    refs = pool.refs.at[jnp.where(used, ids, pool.refs.shape[0])].set(1, mode="drop", unique_indices=True)
    return PagePool(refs=refs), page_table
