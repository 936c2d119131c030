"""The scheduler: who holds pages, who computes what in this step. Vectorised over slots; obeys its bucket.

1. Order: by priority class, then arrival; a preempted request keeps its arrival, so it returns first.
2. Prefixes: what is cached for the first that wait. Who needs a page that one before it is about to compute, waits.
3. Residency: walk that order by cumulative sums of pages; running requests that no longer fit are preempted.
4. Rows: cumulative sums of decode rows and chunk rows against the bucket.
5. Pages: exact cumulative sums hand out free pages for the tokens about to be computed.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jbatch.config import Bucket, EngineConfig
from jbatch.core.pages import allocate, compact, pages_for, release, share
from jbatch.core.prefix import Matches, match
from jbatch.core.state import NO_SLOT, BatchPlan, EngineState, Phase, SlotTable, Wait


@struct.dataclass
class Demand:
    """What the next step would compute if its bucket were large enough and its inbox empty; scalars, int32."""

    decodes: jax.Array  # slots that lack one token
    prefills: jax.Array  # slots that lack more
    chunks: jax.Array  # chunk rows those need
    places: jax.Array  # requests that could still enter; 0 when some wait already


@struct.dataclass
class _Residency:
    """Step 3's result, in scheduling order."""

    resident: jax.Array  # [R] bool
    admitted: jax.Array  # [R] bool, resident from this step on
    preempted: jax.Array  # [R] bool
    wait: jax.Array  # [R] int32, why a slot that waits does


@struct.dataclass
class _Rows:
    """Step 4's result: rows to places in scheduling order, and back."""

    decode: jax.Array  # [S] int32, place in the order, R for an idle row
    chunk: jax.Array  # [C] int32, place in the order, R for an idle row
    chunk_start: jax.Array  # [C] int32
    chunk_len: jax.Array  # [C] int32
    advance: jax.Array  # [R] int32
    last_row: jax.Array  # [R] int32


def schedule(state: EngineState, config: EngineConfig, bucket: Bucket) -> tuple[EngineState, BatchPlan]:
    """Plans one step and takes the pages it needs. Never fails: what does not fit waits, with a reason."""
    slots, pool = state.slots, state.pool
    order = scheduling_order(slots)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32), unique_indices=True)
    phase, length = slots.phase[order], slots.length[order]

    matches = match(state, order, config)
    who = _residency(phase, length, matches, config)
    computed = _computed(slots.computed[order], who, matches)
    rows = _rows(jnp.where(who.resident, length, 0), computed, config, bucket)

    entering = who.admitted.at[matches.place].get(mode="fill", fill_value=False)
    pool, page_table = release(pool, slots.page_table, ((slots.page_table[:, 0] >= 0) & ~who.resident[place]))
    pool, page_table = share(pool, page_table, matches.slot, matches.pages, entering)
    held = pages_for(computed, config.page_size)
    wanted = jnp.where(rows.advance > 0, pages_for(computed + rows.advance, config.page_size) - held, 0)
    most = bucket.decode + bucket.chunks * (config.chunk_size // config.page_size + 1)
    pool, page_table = allocate(pool, page_table, order, held, wanted, most=most)

    plan = _plan(slots, order, place, who, rows, computed)
    first_time = entering & (slots.preemptions[matches.slot] == 0)
    plan = replace(
        plan,
        prefix_queries=jnp.sum(jnp.where(first_time, slots.length[matches.slot], 0), dtype=jnp.int32),
        prefix_hits=jnp.sum(jnp.where(first_time, matches.tokens, 0), dtype=jnp.int32),
    )
    wait = jnp.where(who.resident & (rows.advance == 0), Wait.ROWS, who.wait)
    phase = jnp.where(who.admitted, Phase.RUNNING, jnp.where(who.preempted, Phase.WAITING, phase))
    slots = replace(
        slots,
        phase=phase[place],
        preemptions=slots.preemptions + who.preempted[place].astype(jnp.int32),
        computed=computed[place],
        wait_reason=wait[place],
        page_table=page_table,
    )
    return replace(state, slots=slots, pool=pool), plan


def _plan(
    slots: SlotTable, order: jax.Array, place: jax.Array, who: _Residency, rows: _Rows, computed: jax.Array
) -> BatchPlan:
    """The rows in terms of slots instead of places in the order; prefix counters are left at 0."""
    samples = (rows.advance > 0) & (computed + rows.advance == slots.length[order])
    slot_of = jnp.append(order, NO_SLOT)
    return BatchPlan(
        decode_slot=slot_of[rows.decode],
        chunk_slot=slot_of[rows.chunk],
        chunk_start=rows.chunk_start,
        chunk_len=rows.chunk_len,
        advance=rows.advance[place],
        preempted=jnp.sum(who.preempted, dtype=jnp.int32),
        prefix_queries=jnp.int32(0),
        prefix_hits=jnp.int32(0),
        sample_row=jnp.where(samples, rows.last_row, -1)[place],
    )


def demand(state: EngineState, config: EngineConfig) -> Demand:
    """Looks ahead from a settled state, so that the host can choose a bucket without knowing the policy."""
    slots = state.slots
    order = scheduling_order(slots)
    matches = match(state, order, config)
    who = _residency(slots.phase[order], slots.length[order], matches, config)
    computed = _computed(slots.computed[order], who, matches)
    missing = jnp.where(who.resident, slots.length[order] - computed, 0)
    deferred = who.wait == Wait.PREFIX
    held_back = jnp.any((slots.phase[order] == Phase.WAITING) & ~who.admitted & ~deferred)
    taken = jnp.sum(who.resident | deferred, dtype=jnp.int32)
    return Demand(
        decodes=jnp.sum(missing == 1, dtype=jnp.int32),
        prefills=jnp.sum(missing > 1, dtype=jnp.int32),
        chunks=jnp.sum(_chunks(missing, config.chunk_size), dtype=jnp.int32),
        places=jnp.where(held_back, 0, jnp.maximum(config.max_running - taken, 0)),
    )


def scheduling_order(slots: SlotTable) -> jax.Array:
    """Slots [R] in the order they are served: priority class, then arrival; free slots last."""
    idle = (slots.phase == Phase.FREE).astype(jnp.int32)
    index = jnp.arange(idle.shape[0], dtype=jnp.int32)
    return lax.sort((idle, slots.priority, slots.arrival, index), num_keys=3)[-1]


def _computed(computed: jax.Array, who: _Residency, matches: Matches) -> jax.Array:
    """Tokens [R] whose keys and values lie in pages, in scheduling order, given what newcomers find in the cache."""
    computed = jnp.where(who.resident & ~who.admitted, computed, 0)
    return computed + jnp.where(who.admitted, _by_place(matches.tokens, matches, computed.shape[0]), 0)


def _by_place(values: jax.Array, matches: Matches, num_slots: int) -> jax.Array:
    """Values [M] of the slots that were looked up, spread over the scheduling order [R]; 0 elsewhere."""
    return jnp.zeros(num_slots, values.dtype).at[matches.place].set(values, mode="drop")


def _residency(phase: jax.Array, length: jax.Array, matches: Matches, config: EngineConfig) -> _Residency:
    """Who holds pages from now on. Everything is in scheduling order.

    A slot counts with the pages of all its known tokens, computed or not, so nobody starts a prompt that cannot be
    finished. To enter, a waiting slot must moreover leave one page of growth to each slot before it: a slot let in
    only to be preempted a few steps later would compute its prompt for nothing. The first in order needs no such
    room, so one request always makes progress. Pages that are shared count for each who shares them.

    Deferred slots wait for a page that another computes. Their room is kept, so that none enters only to be preempted
    for them, but they bar nobody.
    """
    deferred = _by_place(matches.deferred, matches, phase.shape[0])
    looked_up = _by_place(jnp.ones_like(matches.deferred), matches, phase.shape[0])
    usable = config.num_pages - 1
    need = jnp.where(phase == Phase.FREE, 0, pages_for(length, config.page_size))
    before = jnp.arange(phase.shape[0], dtype=jnp.int32)
    waiting, running = (phase == Phase.WAITING) & ~deferred, phase == Phase.RUNNING

    has_pages = jnp.cumsum(need) + before <= usable
    has_turn = before < config.max_running
    # The first that cannot enter bars those behind it, whatever their size: arrival order is kept.
    barred = lax.cummax((waiting & ~(has_pages & has_turn & looked_up)).astype(jnp.int32)) > 0
    admitted = waiting & ~barred
    # Running slots may use what the barred ones leave.
    holders = running | admitted
    fits_pages = jnp.cumsum(jnp.where(holders, need, 0)) <= usable
    fits_limit = jnp.cumsum(holders, dtype=jnp.int32) <= config.max_running
    resident = holders & fits_pages & fits_limit
    preempted = running & ~resident
    # Short of pages, it or one before it; whoever waits otherwise finds as many running as may.
    short = (waiting & looked_up & has_turn & ~has_pages) | (holders & fits_limit & ~fits_pages)
    crowded = lax.cummax((waiting & looked_up & ~has_turn).astype(jnp.int32)) > 0
    reason = jnp.where(crowded | preempted, Wait.RUNNING_LIMIT, Wait.ADMISSIONS)
    reason = jnp.where(lax.cummax(short.astype(jnp.int32)) > 0, Wait.PAGES, reason)
    wait = jnp.where((waiting & ~admitted) | preempted, reason, Wait.NONE)
    wait = jnp.where(deferred, Wait.PREFIX, wait)
    return _Residency(resident=resident, admitted=admitted, preempted=preempted, wait=wait)


def _rows(length: jax.Array, computed: jax.Array, config: EngineConfig, bucket: Bucket) -> _Rows:
    """Deals the bucket's rows to resident slots in order. A slot that lacks one token takes a decode row."""
    chunk = config.chunk_size
    missing = length - computed
    decodes = missing == 1
    decode_row = jnp.cumsum(decodes, dtype=jnp.int32) - 1
    decodes &= decode_row < bucket.decode
    decode = compact(decodes, bucket.decode)
    # Rows in order of length, idle ones first: attention can then leave the short ones behind.
    by_length = jnp.argsort(jnp.append(length, 0)[decode])
    decode_row = jnp.argsort(by_length)[jnp.minimum(decode_row, bucket.decode - 1)]

    chunks = _chunks(missing, chunk)
    first = jnp.cumsum(chunks, dtype=jnp.int32) - chunks
    granted = jnp.clip(bucket.chunks - first, 0, chunks)
    end = first + granted
    row = jnp.arange(bucket.chunks, dtype=jnp.int32)
    owner = jnp.searchsorted(end, row, side="right").astype(jnp.int32)  # size R when the row is idle
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


def _chunks(missing: jax.Array, chunk_size: int) -> jax.Array:
    """Chunk rows for so many missing tokens; a single one takes a decode row instead."""
    return jnp.where(missing > 1, (missing + chunk_size - 1) // chunk_size, 0)
