"""The scheduler: who holds pages, who computes what in this step. Vectorised over slots; obeys its bucket.

1. Order: the policy's levels and scores; see `policies`.
2. Prefixes: what is cached for the first that wait. Who needs a page that one before it is about to compute, waits.
3. Residency: walk that order by cumulative sums of pages; running requests that no longer fit are preempted.
4. Rows: cumulative sums of decode rows and chunk rows against the bucket and the controller's limit.
5. Pages: exact cumulative sums hand out free pages for the tokens about to be computed.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jbatch.config import Bucket, EngineConfig
from jbatch.core.batching import Gate, count_batch, gate_now
from jbatch.core.order import ascending, compact, inverse, owners
from jbatch.core.pages import allocate, pages_for, pinned, release, share
from jbatch.core.policies import holding_order, overdue, rank, row_order
from jbatch.core.prefix import Matches, match
from jbatch.core.residency import Residency, candidates, decide
from jbatch.core.state import NO_PAGE, NO_SLOT, BatchPlan, EngineState, Phase, Wait


@struct.dataclass
class _Rows:
    """Step 4's result. The first four go by rows, with places in the order of rows; the others by that order."""

    decode: jax.Array  # [S] int32, place in the order, R for an idle row
    chunk: jax.Array  # [C] int32, place in the order, R for an idle row
    chunk_start: jax.Array  # [C] int32
    chunk_len: jax.Array  # [C] int32
    advance: jax.Array  # [R] int32, tokens it computes
    last_row: jax.Array  # [R] int32, row of the last of them
    samples: jax.Array  # [R] bool, whether that yields a new one
    held: jax.Array  # [R] int32, pages
    wanted: jax.Array  # [R] int32, more pages for what it computes


def schedule(state: EngineState, config: EngineConfig, bucket: Bucket) -> tuple[EngineState, BatchPlan]:
    """Plans one step and takes the pages it needs. Never fails: what does not fit waits, with a reason."""
    before = state
    ranks = rank(state, config)
    order = holding_order(state, ranks)
    place = inverse(order)
    matches = match(state, order, config)
    gate = gate_now(state, config)
    who = _residency(state, order, matches, gate, config)
    state = count_batch(state, gate, jnp.sum(who.admitted, dtype=jnp.int32))
    state = _move(state, who, matches, place)

    resident = who.resident[place]
    by_row = row_order(state, ranks, resident)
    rows = _rows(state, by_row, resident, config, bucket)
    most = bucket.decode + bucket.chunks * (config.chunk_size // config.page_size + 1)
    pool, page_table = allocate(
        state.pool, state.slots.page_table, by_row, rows.held, rows.wanted, state.header.now, most=most
    )
    first_time = (state.slots.phase == Phase.RUNNING) & (before.slots.phase == Phase.WAITING)
    first_time &= state.slots.preemptions == 0
    row_place, slot_of = inverse(by_row), jnp.append(by_row, NO_SLOT)
    plan = BatchPlan(
        decode_slot=slot_of[rows.decode],
        chunk_slot=slot_of[rows.chunk],
        chunk_start=rows.chunk_start,
        chunk_len=rows.chunk_len,
        advance=rows.advance[row_place],
        sample_row=jnp.where(rows.samples, rows.last_row, -1)[row_place],
        preempted=jnp.sum(who.preempted, dtype=jnp.int32),
        prefix_queries=jnp.sum(jnp.where(first_time, state.slots.length, 0), dtype=jnp.int32),
        prefix_hits=jnp.sum(jnp.where(first_time, state.slots.cached, 0), dtype=jnp.int32),
        order=order,
        matched=_by_place(matches.tokens, matches, order)[place],
    )
    waits = jnp.where(resident & (plan.advance == 0), Wait.ROWS, state.slots.wait_reason)
    slots = replace(state.slots, page_table=page_table, wait_reason=waits)
    return replace(state, slots=slots, pool=pool), plan


def _residency(state: EngineState, order: jax.Array, matches: Matches, gate: Gate, config: EngineConfig) -> Residency:
    found = matches.pages != NO_PAGE
    kept = (state.pool.refs == 0) & pinned(state.pool, state.header.now)
    slots = candidates(
        state,
        order,
        config,
        known=_by_place(jnp.ones_like(matches.deferred), matches, order),
        found=_by_place(jnp.sum(found & (state.pool.refs[matches.pages] > 1), axis=1, dtype=jnp.int32), matches, order),
        pinned=_by_place(jnp.sum(found & kept[matches.pages], axis=1, dtype=jnp.int32), matches, order),
        deferred=_by_place(matches.deferred, matches, order),
    )
    who = decide(slots, gate, state, config)
    late = overdue(state)[order] & (who.wait != Wait.NONE) & (who.wait != Wait.PREFIX)
    return replace(who, wait=jnp.where(late, Wait.DEADLINE, who.wait))


def _by_place(values: jax.Array, matches: Matches, like: jax.Array) -> jax.Array:
    """Values [M] of the slots that were looked up, spread over the order; 0 elsewhere. As many as `like` [R]."""
    return jnp.zeros(like.shape, values.dtype).at[matches.place].set(values, mode="drop")


def _move(state: EngineState, who: Residency, matches: Matches, place: jax.Array) -> EngineState:
    """Those who leave give up their pages; those who enter begin with what they found in the cache."""
    slots = state.slots
    resident, admitted, preempted = who.resident[place], who.admitted[place], who.preempted[place]
    pool, page_table = release(state.pool, slots.page_table, (slots.page_table[:, 0] != NO_PAGE) & ~resident)
    entering = who.admitted.at[matches.place].get(mode="fill", fill_value=False)
    pool, page_table = share(pool, page_table, matches.slot, matches.pages, entering)
    found = jnp.where(admitted, _by_place(matches.tokens, matches, place)[place], 0)
    phase = jnp.where(admitted, Phase.RUNNING, jnp.where(preempted, Phase.WAITING, slots.phase))
    slots = replace(
        slots,
        phase=phase,
        preemptions=slots.preemptions + preempted.astype(jnp.int32),
        computed=jnp.where(resident & ~admitted, slots.computed, found),
        cached=jnp.where(admitted & (slots.preemptions == 0), found, slots.cached),
        wait_reason=who.wait[place],
        page_table=page_table,
    )
    return replace(state, slots=slots, pool=pool)


def _rows(state: EngineState, order: jax.Array, resident: jax.Array, config: EngineConfig, bucket: Bucket) -> _Rows:
    """Deals rows in `order` [R] to those in `resident` [R]; a slot that lacks one token takes a decode row."""
    length = jnp.where(resident, state.slots.length, 0)[order]
    computed = state.slots.computed[order]
    missing = length - computed
    decodes = missing == 1
    decode_row = jnp.cumsum(decodes, dtype=jnp.int32) - 1
    decode = compact(decodes, bucket.decode)
    decodes &= decode_row < bucket.decode
    # Rows in order of length, idle ones first: attention can then leave the short ones behind.
    by_length = ascending(jnp.append(length, 0)[decode], config.max_model_len)
    decode_row = inverse(by_length)[jnp.minimum(decode_row, bucket.decode - 1)]

    chunk = config.chunk_size
    chunks = chunks_for(missing, chunk)
    before = jnp.cumsum(chunks, dtype=jnp.int32) - chunks
    granted = jnp.clip(jnp.minimum(bucket.chunks, state.controller.chunks) - before, 0, chunks)
    owner, nth = owners(granted, bucket.chunks)
    idle = jnp.arange(bucket.chunks, dtype=jnp.int32) >= jnp.sum(granted, dtype=jnp.int32)
    start = computed[owner] + nth * chunk
    advance = jnp.where(decodes, 1, jnp.where(missing > 1, jnp.minimum(granted * chunk, missing), 0))
    held = pages_for(computed, config.page_size)
    return _Rows(
        decode=decode[by_length],
        chunk=jnp.where(idle, length.shape[0], owner),
        chunk_start=jnp.where(idle, 0, start),
        chunk_len=jnp.where(idle, 0, jnp.minimum(chunk, length[owner] - start)),
        advance=advance,
        last_row=jnp.where(decodes, decode_row, bucket.decode + before + granted - 1),
        samples=(advance > 0) & (computed + advance == length),
        held=held,
        wanted=jnp.where(advance > 0, pages_for(computed + advance, config.page_size) - held, 0),
    )


def chunks_for(missing: jax.Array, chunk_size: int) -> jax.Array:
    """Chunk rows for so many missing tokens; a single one takes a decode row instead."""
    return jnp.where(missing > 1, (missing + chunk_size - 1) // chunk_size, 0)
