"""Pages of the KV cache: counting, handing out, giving back. All pure, none needs a host."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jbatch.core.order import compact, first, owners
from jbatch.core.state import NO_PAGE, PagePool

_AGE_BITS, _COLUMN_BITS = 17, 12
_DIGIT_BITS = 10


def pages_for(tokens: jax.Array, page_size: int) -> jax.Array:
    """Pages that hold so many tokens."""
    return (tokens + page_size - 1) // page_size


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


def unshared(refs: jax.Array, page_table: jax.Array) -> jax.Array:
    """How many pages of each row of `page_table` [R, N] no other names; [R] int32."""
    return jnp.sum((page_table != NO_PAGE) & (refs[page_table] == 1), axis=1, dtype=jnp.int32)


def release(pool: PagePool, page_table: jax.Array, leaving: jax.Array) -> tuple[PagePool, jax.Array]:
    """Takes all pages from the slots in `leaving` [R]; returns the pool and the page table [R, N] without them.

    Costs one short scatter per slot that leaves, since XLA's scatters on a CPU are serial.
    """

    def release_row(carry: tuple[PagePool, jax.Array]) -> tuple[PagePool, jax.Array]:
        pool, left = carry
        row = first(left)
        entries = page_table[row]
        entries = jnp.where(entries == NO_PAGE, pool.refs.shape[0], entries)
        pool = replace(
            pool,
            refs=pool.refs.at[entries].add(-1, mode="drop"),
            last_used=pool.last_used.at[entries].set(pool.clock, mode="drop"),
        )
        return pool, left.at[row].set(False)

    pool, _ = lax.while_loop(lambda carry: jnp.any(carry[1]), release_row, (pool, leaving))
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
    # Pins of the past are brought up to now, or they would lie in the future once the clock has wrapped around.
    pool = replace(pool, pinned_until=now + jnp.maximum(pool.pinned_until - now, 0))

    def pin_row(carry: tuple[PagePool, jax.Array]) -> tuple[PagePool, jax.Array]:
        pool, wish = carry
        row = first(wish > 0)
        entries = page_table[row]
        content = (entries != NO_PAGE) & (pool.digest[entries, 0] != 0)
        room = most - jnp.sum(pinned(pool, now), dtype=jnp.int32)
        kept = content & (jnp.cumsum(content & ~pinned(pool, now)[entries]) <= room)
        at = jnp.where(kept, entries, pool.refs.shape[0])  # past the end: dropped
        until = now + jnp.maximum(pool.pinned_until[entries] - now, wish[row])
        return replace(pool, pinned_until=pool.pinned_until.at[at].set(until, mode="drop")), wish.at[row].set(0)

    return lax.while_loop(lambda carry: jnp.any(carry[1] > 0), pin_row, (pool, wish))[0]


def _worth(pool: PagePool, now: jax.Array) -> jax.Array:
    """What the content of each page [P] is worth, below 2**30; nothing where it cannot be shared.

    Most worth are pinned pages, then those used last, and of those used last in the same step the ones nearest to the
    beginning: a page is of no use without those before it. Pages used last before 2**17 steps count alike.
    """
    age = jnp.clip(pool.clock - pool.last_used, 0, 2**_AGE_BITS - 1)
    column = jnp.minimum(pool.column, 2**_COLUMN_BITS - 2)
    value = ((2**_AGE_BITS - 1 - age) << _COLUMN_BITS) | (2**_COLUMN_BITS - 1 - column)
    value |= pinned(pool, now).astype(jnp.int32) << (_AGE_BITS + _COLUMN_BITS)
    return jnp.where(pool.digest[:, 0] != 0, value, 0)


def _least(key: jax.Array, mask: jax.Array, count: jax.Array) -> jax.Array:
    """The `count` entries of `mask` [P] with the least `key` [P], those of lower index where keys are equal.

    A radix select (Alabi et al. 2012): sorting a few thousand keys takes longer than all the rest of a step's
    scheduling. `key` is below 2**30.
    """
    chosen, level = jnp.zeros_like(mask), mask
    for shift in range(2 * _DIGIT_BITS, -1, -_DIGIT_BITS):
        digit = (key >> shift) & (2**_DIGIT_BITS - 1)
        counts = jnp.zeros(2**_DIGIT_BITS, jnp.int32).at[jnp.where(level, digit, 2**_DIGIT_BITS)].add(1, mode="drop")
        below = jnp.cumsum(counts, dtype=jnp.int32) < count
        last = jnp.sum(below, dtype=jnp.int32)  # the digit at which there are enough
        chosen |= level & (digit < last)
        level &= digit == last
        count -= jnp.sum(jnp.where(below, counts, 0), dtype=jnp.int32)
    return chosen | (level & (jnp.cumsum(level, dtype=jnp.int32) <= count))


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

    Takes the free pages of least worth, and forgets what they hold.

    Args:
      slot, held, wanted: [M] int32; slots are distinct.
      most: static bound of the pages wanted in all. The caller sees to it that as many as are wanted are free.
    """
    total = jnp.sum(wanted, dtype=jnp.int32)
    taken = _least(_worth(pool, now), pool.refs == 0, total)
    owner, nth = owners(wanted, most)  # whose page each one is, and which of those
    used = jnp.arange(most, dtype=jnp.int32) < total
    row = jnp.where(used, slot[owner], page_table.shape[0])  # past the end: dropped
    page_table = page_table.at[row, held[owner] + nth].set(compact(taken, most), mode="drop", unique_indices=True)
    digest = jnp.where(taken[:, None], jnp.uint32(0), pool.digest)
    return replace(pool, refs=pool.refs + taken.astype(jnp.int32), digest=digest), page_table
