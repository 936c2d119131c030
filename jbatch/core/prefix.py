"""The prefix cache: full pages that requests share when they begin with the same tokens.

A page's digest is a hash of all tokens up to its end and of the request's salt, so equal digests mean equal prefixes of
the same owner. Pages keep their digest after their last user has gone, until they are handed out anew. The index finds
a page by its digest; an entry counts only while the page still carries that digest, so reuse needs no deletion.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jbatch.config import EngineConfig
from jbatch.core.order import compact, owners
from jbatch.core.state import NO_PAGE, EngineState, PagePool, Phase, PrefixIndex, SlotTable

_WAYS = 4


@struct.dataclass
class Matches:
    """What is cached for the first M waiting slots in scheduling order."""

    place: jax.Array  # [M] int32, place in the order, R where fewer wait
    slot: jax.Array  # [M] int32, of no meaning where fewer wait
    pages: jax.Array  # [M, N] int32, cached pages of the slot's first tokens, NO_PAGE after the last
    tokens: jax.Array  # [M] int32, tokens those pages hold; at least one token is always left to compute
    deferred: jax.Array  # [M] bool, a slot before it is about to compute the next page it needs


def chain_digest(before: jax.Array, tokens: jax.Array) -> jax.Array:
    """Digest [..., 2] uint32 of a page with `tokens` [..., page_size] int32 that follows the digest `before` [..., 2].

    64 bits, secret only as far as the salt is: good against chance, and against whoever does not know the salt. Two
    lanes of MurmurHash3's 32-bit mixing (Appleby 2011) with constants of their own, mixed with each other at the end;
    never (0, 0), which means none. `before` of a request's first page is its salt.
    """
    multiply = jnp.asarray([[0xCC9E2D51, 0x239B961B], [0x1B873593, 0xAB0E9789]], jnp.uint32)
    digest = before
    for i in range(tokens.shape[-1]):
        word = _rotate(tokens[..., i : i + 1].astype(jnp.uint32) * multiply[0], 15) * multiply[1]
        digest = _rotate(digest ^ word, 13) * jnp.uint32(5) + jnp.uint32(0xE6546B64)
    digest = _finalise(digest + digest[..., ::-1] * jnp.asarray([1, 2], jnp.uint32))
    return digest.at[..., 0].max(jnp.uint32(1))


def _rotate(x: jax.Array, bits: int) -> jax.Array:
    return (x << jnp.uint32(bits)) | (x >> jnp.uint32(32 - bits))


def _finalise(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def prompt_digests(salt: jax.Array, tokens: jax.Array, length: jax.Array, config: EngineConfig) -> jax.Array:
    """Digests [N, 2] of the full pages among the first `length` of `tokens` [L]; zeros for the others."""
    pages, page_size = config.pages_per_slot, config.page_size
    tokens = jnp.pad(tokens, (0, pages * page_size - tokens.shape[0])).reshape(pages, page_size)

    def extend(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        before, digests = carry
        digest = chain_digest(before, tokens[i])
        return digest, digests.at[i].set(digest)

    none = jnp.zeros((pages, 2), jnp.uint32)
    return lax.fori_loop(0, length // page_size, extend, (salt, none))[1]


def match(state: EngineState, order: jax.Array, config: EngineConfig) -> Matches:
    """Looks up the longest run of cached pages for the first `max_admissions` waiting slots in `order` [R]."""
    slots = state.slots
    num_slots, num_pages = slots.page_table.shape
    place = compact(slots.phase[order] == Phase.WAITING, config.max_admissions)
    slot = order[jnp.minimum(place, num_slots - 1)]
    digests = slots.digests[slot]
    shareable = (slots.length[slot] - 1) // config.page_size
    column = jnp.arange(num_pages, dtype=jnp.int32)

    pages = find(state.pool, state.index, digests)
    found = (pages != NO_PAGE) & (column < shareable[:, None]) & (place < num_slots)[:, None]
    run = jnp.sum(jnp.cumsum(~found, axis=1, dtype=jnp.int32) == 0, axis=1, dtype=jnp.int32)
    pages = jnp.where(column < run[:, None], pages, NO_PAGE)

    end = (run + 1) * config.page_size
    wanted = jnp.take_along_axis(digests, jnp.minimum(run, num_pages - 1)[:, None, None], axis=1)[:, 0]
    ahead = slots.digests[order[:, None], jnp.minimum(run, num_pages - 1)]  # [R, M, 2]
    computing = (slots.phase[order][:, None] != Phase.FREE) & (slots.computed[order][:, None] < end)
    computing &= slots.length[order][:, None] >= end
    earlier = jnp.arange(num_slots, dtype=jnp.int32)[:, None] < place
    same = jnp.all(ahead == wanted, axis=-1) & computing & earlier
    same &= wanted[:, 0] != 0
    deferred = jnp.any(same, axis=0) & (run < shareable) & (place < num_slots)
    return Matches(place=place, slot=slot, pages=pages, tokens=run * config.page_size, deferred=deferred)


def find(pool: PagePool, index: PrefixIndex, digests: jax.Array) -> jax.Array:
    """Page [...] int32 that carries each of `digests` [..., 2], or NO_PAGE."""
    ways = index.buckets[_bucket(index, digests)]  # [..., _WAYS]
    theirs = pool.digest[jnp.maximum(ways, 0)]  # [..., _WAYS, 2]
    hit = (ways != NO_PAGE) & jnp.all(theirs == digests[..., None, :], axis=-1) & (digests[..., :1] != 0)
    return jnp.max(jnp.where(hit, ways, NO_PAGE), axis=-1)


def _bucket(index: PrefixIndex, digests: jax.Array) -> jax.Array:
    return (digests[..., 1] & jnp.uint32(index.buckets.shape[0] - 1)).astype(jnp.int32)


def register(state: EngineState, advance: jax.Array, *, most: int, page_size: int) -> EngineState:
    """Enters the pages that filled up as each slot computed `advance` [R] tokens, at most `most` of them.

    Called before `computed` moves on. A page whose prefix is cached already is left out: it stays its slot's own.
    """
    slots = state.slots
    before = slots.computed // page_size
    count = (slots.computed + advance) // page_size - before
    slot, nth = owners(count, most)
    column = before[slot] + nth
    page, digest = slots.page_table[slot, column], slots.digests[slot, column]

    nth_of_all = jnp.arange(most, dtype=jnp.int32)
    bucket, num_buckets = _bucket(state.index, digest), state.index.buckets.shape[0]

    def enter(carry: tuple[PagePool, PrefixIndex, jax.Array]) -> tuple[PagePool, PrefixIndex, jax.Array]:
        """One page a bucket, if none is found as the round begins: the next one may be the same, or need its place."""
        pool, index, left = carry
        left &= find(pool, index, digest) == NO_PAGE
        at = jnp.where(left, bucket, num_buckets)  # past the end: dropped
        turn = jnp.full(num_buckets, most, jnp.int32).at[at].min(nth_of_all, mode="drop")
        enters = left & (turn[bucket] == nth_of_all)
        ways = index.buckets[bucket]
        theirs = pool.digest[jnp.maximum(ways, 0)]
        stale = (ways == NO_PAGE) | (_bucket(index, theirs) != bucket[:, None]) | (theirs[..., 0] == 0)
        way = jnp.where(jnp.any(stale, axis=1), jnp.argmax(stale, axis=1), page % _WAYS).astype(jnp.int32)
        at = jnp.where(enters, page, pool.digest.shape[0])
        pool = replace(
            pool,
            digest=pool.digest.at[at].set(digest, mode="drop"),
            column=pool.column.at[at].set(column, mode="drop"),
            pinned_until=pool.pinned_until.at[at].set(state.header.now, mode="drop"),
        )
        buckets = index.buckets.at[jnp.where(enters, bucket, num_buckets), way].set(page, mode="drop")
        return pool, replace(index, buckets=buckets), left & ~enters

    filled = nth_of_all < jnp.sum(count, dtype=jnp.int32)
    pool, index, _ = lax.while_loop(lambda carry: jnp.any(carry[2]), enter, (state.pool, state.index, filled))
    return replace(state, pool=pool, index=index)


def extend_digests(slots: SlotTable, grown: jax.Array, page_size: int) -> jax.Array:
    """Digests [R, N, 2] after the slots in `grown` [R] gained a token; `slots` knows the token already."""
    index = jnp.arange(grown.shape[0], dtype=jnp.int32)
    full = grown & (slots.length % page_size == 0)
    column = slots.length // page_size - 1
    within = jnp.arange(page_size, dtype=jnp.int32)
    tokens = slots.tokens[index[:, None], jnp.maximum(column, 0)[:, None] * page_size + within]
    before = jnp.where((column > 0)[:, None], slots.digests[index, jnp.maximum(column - 1, 0)], slots.salt)
    at = jnp.where(full, column, slots.digests.shape[1])  # past the end: dropped
    return slots.digests.at[index, at].set(chain_digest(before, tokens), mode="drop", unique_indices=True)
