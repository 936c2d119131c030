"""Pages of the KV cache: counting, handing out, giving back. All pure, none needs a host."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jbatch.core.state import NO_PAGE, PagePool

_AGE_BITS, _COLUMN_BITS = 17, 12


def pages_for(tokens: jax.Array, page_size: int) -> jax.Array:
    """Pages that hold so many tokens."""
    return (tokens + page_size - 1) // page_size


def compact(mask: jax.Array, size: int) -> jax.Array:
    """Indices of the first `size` true entries of `mask` [M], in order; M where there are fewer."""
    counts = jnp.cumsum(mask, dtype=jnp.int32)
    return jnp.searchsorted(counts, jnp.arange(1, size + 1, dtype=jnp.int32)).astype(jnp.int32)


def num_free(pool: PagePool) -> jax.Array:
    """Pages nobody names, cached ones included; a scalar."""
    return jnp.sum(pool.refs == 0, dtype=jnp.int32)


def num_cached(pool: PagePool) -> jax.Array:
    """Pages nobody names whose content may still be shared; a scalar."""
    return jnp.sum((pool.refs == 0) & (pool.digest[:, 0] != 0), dtype=jnp.int32)


def num_pinned(pool: PagePool, now: jax.Array) -> jax.Array:
    """Pages nobody names that are kept for a while; a scalar."""
    return jnp.sum((pool.refs == 0) & pinned(pool, now), dtype=jnp.int32)


def pinned(pool: PagePool, now: jax.Array) -> jax.Array:
    """Whether each page [P] holds content that is kept for a while."""
    return (pool.digest[:, 0] != 0) & (pool.pinned_until - now > 0)


def release(pool: PagePool, page_table: jax.Array, leaving: jax.Array) -> tuple[PagePool, jax.Array]:
    """Takes all pages from the slots in `leaving` [R]; returns the pool and the page table [R, N] without them.

    Costs one short scatter per slot that leaves, since XLA's scatters on a CPU are serial.
    """
    rows = compact(leaving, leaving.shape[0])

    def release_row(i: jax.Array, pool: PagePool) -> PagePool:
        entries = page_table[rows[i]]
        entries = jnp.where(entries == NO_PAGE, pool.refs.shape[0], entries)
        return replace(
            pool,
            refs=pool.refs.at[entries].add(-1, mode="drop"),
            last_used=pool.last_used.at[entries].set(pool.clock, mode="drop"),
        )

    pool = lax.fori_loop(0, jnp.sum(leaving, dtype=jnp.int32), release_row, pool)
    return pool, jnp.where(leaving[:, None], NO_PAGE, page_table)


def share(
    pool: PagePool, page_table: jax.Array, slot: jax.Array, pages: jax.Array, entering: jax.Array
) -> tuple[PagePool, jax.Array]:
    """Begins the empty table rows of `slot` [M] with cached `pages` [M, N] where `entering` [M]."""
    page_table = page_table.at[jnp.where(entering, slot, page_table.shape[0])].set(pages, mode="drop")
    entries = jnp.where(entering[:, None] & (pages != NO_PAGE), pages, pool.refs.shape[0])
    return replace(pool, refs=pool.refs.at[entries].add(1, mode="drop")), page_table


def pin(pool: PagePool, page_table: jax.Array, wish: jax.Array, now: jax.Array, most: jax.Array) -> PagePool:
    """Keeps the pages of slots for `wish` [R] milliseconds from `now`, first pages first, `most` pages in all."""
    wish = jnp.where(page_table[:, 0] != NO_PAGE, wish, 0)
    rows = compact(wish > 0, wish.shape[0])
    # Pins of the past are brought up to now, or they would lie in the future once the clock has wrapped around.
    pool = replace(pool, pinned_until=now + jnp.maximum(pool.pinned_until - now, 0))

    def pin_row(i: jax.Array, pool: PagePool) -> PagePool:
        entries = page_table[rows[i]]
        content = (entries != NO_PAGE) & (pool.digest[entries, 0] != 0)
        room = most - jnp.sum(pinned(pool, now), dtype=jnp.int32)
        kept = content & (jnp.cumsum(content & ~pinned(pool, now)[entries]) <= room)
        at = jnp.where(kept, entries, pool.refs.shape[0])  # past the end: dropped
        until = now + jnp.maximum(pool.pinned_until[entries] - now, wish[rows[i]])
        return replace(pool, pinned_until=pool.pinned_until.at[at].set(until, mode="drop"))

    return lax.fori_loop(0, jnp.sum(wish > 0, dtype=jnp.int32), pin_row, pool)


def evict(pool: PagePool, wanted: jax.Array, now: jax.Array) -> PagePool:
    """Forgets what cached pages hold, until `wanted` free pages are not cached, as far as there are so many.

    Pinned ones go last. The least recently used go first, and of those used last in the same step the ones furthest
    from the beginning: a page is of no use without those before it.
    """
    free, cached = pool.refs == 0, pool.digest[:, 0] != 0
    lacking = wanted - jnp.sum(free & ~cached, dtype=jnp.int32)

    def forget() -> jax.Array:
        going = _first(_worth(pool, now), free & cached, lacking)
        return jnp.where(going[:, None], jnp.uint32(0), pool.digest)

    return replace(pool, digest=lax.cond(lacking > 0, forget, lambda: pool.digest))


def _worth(pool: PagePool, now: jax.Array) -> jax.Array:
    """What each cached page [P] is worth, below 2**30; pages used last before 2**17 steps count alike."""
    age = jnp.clip(pool.clock - pool.last_used, 0, 2**_AGE_BITS - 1)
    column = jnp.minimum(pool.column, 2**_COLUMN_BITS - 1)
    worth = ((2**_AGE_BITS - 1 - age) << _COLUMN_BITS) | (2**_COLUMN_BITS - 1 - column)
    return worth | (pinned(pool, now).astype(jnp.int32) << (_AGE_BITS + _COLUMN_BITS))


def _first(key: jax.Array, mask: jax.Array, count: jax.Array) -> jax.Array:
    """The `count` entries of `mask` [P] with the least `key` [P], those of lower index where keys are equal.

    By bisection: sorting a few thousand keys takes longer than all the rest of a step's scheduling.
    """

    def halve(i: jax.Array, bound: jax.Array) -> jax.Array:
        tried = bound | (1 << (_AGE_BITS + _COLUMN_BITS - i))
        return jnp.where(jnp.sum(mask & (key < tried), dtype=jnp.int32) < count, tried, bound)

    bound = lax.fori_loop(0, _AGE_BITS + _COLUMN_BITS + 1, halve, jnp.int32(0))
    below, level = mask & (key < bound), mask & (key == bound)
    left = count - jnp.sum(below, dtype=jnp.int32)
    return below | (level & (jnp.cumsum(level, dtype=jnp.int32) <= left))


def allocate(
    pool: PagePool,
    page_table: jax.Array,
    slot: jax.Array,
    held: jax.Array,
    wanted: jax.Array,
    now: jax.Array,
    *,
    most: int,
) -> tuple[PagePool, jax.Array]:
    """Appends `wanted[i]` fresh pages to the table row of `slot[i]`, which holds `held[i]` already.

    Args:
      slot, held, wanted: [M] int32; slots are distinct.
      most: static bound of the pages wanted in all. The caller sees to it that as many as are wanted are free.
    """
    end = jnp.cumsum(wanted, dtype=jnp.int32)
    pool = evict(pool, end[-1], now)
    ids = compact((pool.refs == 0) & (pool.digest[:, 0] == 0), most)
    nth = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.searchsorted(end, nth, side="right").astype(jnp.int32)  # whose page the nth one is
    used = nth < end[-1]
    owner = jnp.minimum(owner, slot.shape[0] - 1)
    column = held[owner] + nth - (end - wanted)[owner]
    row = jnp.where(used, slot[owner], page_table.shape[0])  # past the end: dropped
    page_table = page_table.at[row, column].set(ids, mode="drop", unique_indices=True)
    refs = pool.refs.at[jnp.where(used, ids, pool.refs.shape[0])].set(1, mode="drop", unique_indices=True)
    return replace(pool, refs=refs), page_table
