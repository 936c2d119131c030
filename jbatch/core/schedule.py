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
from jbatch.core.pages import allocate, compact, pages_for, pinned, release, share
from jbatch.core.policies import holding_order, overdue, rank, row_order
from jbatch.core.prefix import Matches, match
from jbatch.core.residency import Residency, candidates, decide
from jbatch.core.state import NO_PAGE, NO_SLOT, BatchPlan, EngineState, Phase, Wait


@struct.dataclass
class _Rows:
    """Step 4's result: rows to places in the order of rows, and back."""

    decode: jax.Array  # [S] int32, place in the order, R for an idle row
    chunk: jax.Array  # [C] int32, place in the order, R for an idle row
    chunk_start: jax.Array  # [C] int32
    chunk_len: jax.Array  # [C] int32
    advance: jax.Array  # [R] int32
    last_row: jax.Array  # [R] int32


def schedule(state: EngineState, config: EngineConfig, bucket: Bucket) -> tuple[EngineState, BatchPlan]:
    """Plans one step and takes the pages it needs. Never fails: what does not fit waits, with a reason."""
    ranks = rank(state, config)
    order = holding_order(state, ranks)
    matches = match(state, order, config)
    gate = gate_now(state, config)
    who = _residency(state, order, matches, gate, config)
    before, state = state, count_batch(state, gate, jnp.sum(who.admitted, dtype=jnp.int32))
    state = _move(state, who, matches, order)

    resident = who.resident[_inverse(order)]
    rows_order = row_order(state, ranks, resident)
    length = jnp.where(resident, state.slots.length, 0)[rows_order]
    computed = state.slots.computed[rows_order]
    rows = _rows(length, computed, state.controller.chunks, config, bucket)
    held = pages_for(computed, config.page_size)
    wanted = jnp.where(rows.advance > 0, pages_for(computed + rows.advance, config.page_size) - held, 0)
    most = bucket.decode + bucket.chunks * (config.chunk_size // config.page_size + 1)
    pool, page_table = allocate(
        state.pool, state.slots.page_table, rows_order, held, wanted, state.header.now, most=most
    )

    first_time = (state.slots.phase == Phase.RUNNING) & (before.slots.phase == Phase.WAITING)
    first_time &= state.slots.preemptions == 0
    samples = (rows.advance > 0) & (computed + rows.advance == length)
    place, slot_of = _inverse(rows_order), jnp.append(rows_order, NO_SLOT)
    plan = BatchPlan(
        decode_slot=slot_of[rows.decode],
        chunk_slot=slot_of[rows.chunk],
        chunk_start=rows.chunk_start,
        chunk_len=rows.chunk_len,
        advance=rows.advance[place],
        sample_row=jnp.where(samples, rows.last_row, -1)[place],
        preempted=jnp.sum(who.preempted, dtype=jnp.int32),
        prefix_queries=jnp.sum(jnp.where(first_time, state.slots.length, 0), dtype=jnp.int32),
        prefix_hits=jnp.sum(jnp.where(first_time, state.slots.cached, 0), dtype=jnp.int32),
        order=order,
        matched=_by_place(matches.tokens, matches, order)[_inverse(order)],
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


def _by_place(values: jax.Array, matches: Matches, order: jax.Array) -> jax.Array:
    """Values [M] of the slots that were looked up, spread over the order [R]; 0 elsewhere."""
    return jnp.zeros(order.shape, values.dtype).at[matches.place].set(values, mode="drop")


def _move(state: EngineState, who: Residency, matches: Matches, order: jax.Array) -> EngineState:
    """Those who leave give up their pages; those who enter begin with what they found in the cache."""
    slots, place = state.slots, _inverse(order)
    resident, admitted, preempted = who.resident[place], who.admitted[place], who.preempted[place]
    pool, page_table = release(state.pool, slots.page_table, (slots.page_table[:, 0] != NO_PAGE) & ~resident)
    entering = who.admitted.at[matches.place].get(mode="fill", fill_value=False)
    pool, page_table = share(pool, page_table, matches.slot, matches.pages, entering)
    found = jnp.where(admitted, _by_place(matches.tokens, matches, order)[place], 0)
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


def _inverse(order: jax.Array) -> jax.Array:
    """Each slot's place in `order` [R]."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32), unique_indices=True)


def _rows(length: jax.Array, computed: jax.Array, most: jax.Array, config: EngineConfig, bucket: Bucket) -> _Rows:
    """Deals the bucket's rows, `most` chunk rows at most, in order. A slot that lacks one token takes a decode row."""
    chunk = config.chunk_size
    missing = length - computed
    decodes = missing == 1
    decode_row = jnp.cumsum(decodes, dtype=jnp.int32) - 1
    decodes &= decode_row < bucket.decode
    decode = compact(decodes, bucket.decode)
    # Rows in order of length, idle ones first: attention can then leave the short ones behind.
    by_length = jnp.argsort(jnp.append(length, 0)[decode])
    decode_row = jnp.argsort(by_length)[jnp.minimum(decode_row, bucket.decode - 1)]

    chunks = chunks_for(missing, chunk)
    first = jnp.cumsum(chunks, dtype=jnp.int32) - chunks
    most = jnp.minimum(bucket.chunks, most)
    granted = jnp.clip(most - first, 0, chunks)
    end = first + granted
    row = jnp.arange(bucket.chunks, dtype=jnp.int32)
    owner = jnp.searchsorted(end, row, side="right").astype(jnp.int32)
    owner = jnp.where(row < most, owner, length.shape[0])  # R: idle
    owner_or_last = jnp.minimum(owner, length.shape[0] - 1)
    start = computed[owner_or_last] + (row - first[owner_or_last]) * chunk
    tokens = jnp.minimum(chunk, length[owner_or_last] - start)
    idle = owner == length.shape[0]
    return _Rows(
        decode=decode[by_length],
        chunk=owner,
        chunk_start=jnp.where(idle, 0, start),
        chunk_len=jnp.where(idle, 0, tokens),
        advance=jnp.where(decodes, 1, jnp.where(missing > 1, jnp.minimum(granted * chunk, missing), 0)),
        last_row=jnp.where(decodes, decode_row, bucket.decode + end - 1),
    )


def chunks_for(missing: jax.Array, chunk_size: int) -> jax.Array:
    """Chunk rows for so many missing tokens; a single one takes a decode row instead."""
    return jnp.where(missing > 1, (missing + chunk_size - 1) // chunk_size, 0)
