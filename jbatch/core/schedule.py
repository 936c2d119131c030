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
from jax import lax

from jbatch.config import Bucket, EngineConfig
from jbatch.controls import POLICIES
from jbatch.core.adaptive import expected_output, growth
from jbatch.core.batching import Gate, count_batch, gate
from jbatch.core.pages import allocate, compact, num_free, num_pinned, pages_for, pinned, release, share
from jbatch.core.policies import Rank, holding_order, rank, row_order
from jbatch.core.prefix import Matches, match
from jbatch.core.state import NO_PAGE, NO_SLOT, BatchPlan, EngineState, Phase, Wait


@struct.dataclass
class Demand:
    """What the next step would compute if its bucket were large enough and its inbox empty; scalars, int32."""

    decodes: jax.Array  # slots that lack one token
    prefills: jax.Array  # slots that lack more
    chunks: jax.Array  # chunk rows those need
    places: jax.Array  # requests that could still enter; 0 when some wait already


@struct.dataclass
class _Candidates:
    """What step 3 goes by, in the order in which slots hold pages."""

    phase: jax.Array  # [R] int32
    need: jax.Array  # [R] int32, pages of all known tokens
    held: jax.Array  # [R] int32, pages of the computed ones
    own: jax.Array  # [R] int32, pages held that nobody shares
    length: jax.Array  # [R] int32, tokens known
    left: jax.Array  # [R] int32, tokens expected to come
    known: jax.Array  # [R] bool, waits and was looked up in the prefix cache
    found: jax.Array  # [R] int32, pages it would share with others that run
    pinned: jax.Array  # [R] int32, pages it would take over that are pinned
    deferred: jax.Array  # [R] bool, waits for a page that another computes


@struct.dataclass
class _Residency:
    """Step 3's result, in the same order."""

    resident: jax.Array  # [R] bool
    admitted: jax.Array  # [R] bool, resident from this step on
    preempted: jax.Array  # [R] bool
    wait: jax.Array  # [R] int32, why a slot that waits does


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
    allowed = gate(state, config)
    who = _residency(_candidates(state, order, matches, config), allowed, state, config)
    who = replace(who, wait=_explained(who.wait, state, order, ranks))
    place = _inverse(order)
    state = count_batch(state, allowed, jnp.sum(who.admitted, dtype=jnp.int32))
    state = _moved(state, who, matches, order, place)

    resident = who.resident[place]
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

    plan = _plan(rows, rows_order, (rows.advance > 0) & (computed + rows.advance == length))
    waits = jnp.where(resident & (plan.advance == 0), Wait.ROWS, state.slots.wait_reason)
    slots = replace(state.slots, page_table=page_table, wait_reason=waits)
    state = replace(state, slots=slots, pool=pool)
    return state, _counted(plan, state, who, matches, order)


def _candidates(state: EngineState, order: jax.Array, matches: Matches, config: EngineConfig) -> _Candidates:
    slots, page_size, num_slots = state.slots, config.page_size, order.shape[0]
    shared = jnp.sum((matches.pages != NO_PAGE) & (state.pool.refs[matches.pages] > 1), axis=1, dtype=jnp.int32)
    kept = (matches.pages != NO_PAGE) & ((state.pool.refs == 0) & pinned(state.pool, state.header.now))[matches.pages]
    kept = jnp.sum(kept, axis=1, dtype=jnp.int32)
    busy = slots.phase != Phase.FREE
    return _Candidates(
        phase=slots.phase[order],
        need=jnp.where(busy, pages_for(slots.length, page_size), 0)[order],
        held=jnp.where(busy, pages_for(slots.computed, page_size), 0)[order],
        own=_unshared(state)[order],
        length=slots.length[order],
        left=expected_output(state, config)[order],
        known=_by_place(jnp.ones_like(matches.deferred), matches, num_slots),
        found=_by_place(shared, matches, num_slots),
        pinned=_by_place(kept, matches, num_slots),
        deferred=_by_place(matches.deferred, matches, num_slots),
    )


def _unshared(state: EngineState) -> jax.Array:
    """Pages [R] that each slot holds alone."""
    table = state.slots.page_table
    return jnp.sum((table != NO_PAGE) & (state.pool.refs[table] == 1), axis=1, dtype=jnp.int32)


def _by_place(values: jax.Array, matches: Matches, num_slots: int) -> jax.Array:
    """Values [M] of the slots that were looked up, spread over the order [R]; 0 elsewhere."""
    return jnp.zeros(num_slots, values.dtype).at[matches.place].set(values, mode="drop")


def _residency(slots: _Candidates, gate: Gate, state: EngineState, config: EngineConfig) -> _Residency:
    """Who holds pages from now on.

    A slot counts with the pages of all its known tokens, computed or not, so nobody starts a prompt that cannot be
    finished; pages that it would share with running ones do not count. To enter, a waiting slot must moreover leave
    room for those before it to grow, and what is pinned: one let in only to be preempted a few steps later would
    compute its prompt for nothing. The first in order need not, so one request always makes progress.

    Whoever stands behind a slot in the order can be preempted for it. That gives back at least the pages that nobody
    shares: so never too many pages are promised, if sometimes too few.

    Deferred slots wait for a page that another computes. Their room is kept, so that none enters only to be preempted
    for them, but they bar nobody.
    """
    usable = config.num_pages - 1
    busy = slots.phase != Phase.FREE
    before = jnp.cumsum(busy, dtype=jnp.int32) - busy.astype(jnp.int32)
    running, waiting = slots.phase == Phase.RUNNING, (slots.phase == Phase.WAITING) & ~slots.deferred
    behind = jnp.sum(slots.own) - jnp.cumsum(jnp.where(running, slots.own, 0))
    grown = jnp.cumsum(jnp.where(running, slots.need - slots.held, 0))
    held = usable - num_free(state.pool) - behind + grown  # [R], if all up to here stay and none behind
    newcomers = slots.need - slots.found

    taken = held + jnp.cumsum(jnp.where(slots.phase == Phase.WAITING, newcomers, 0))
    reserve = growth(slots.length, slots.left, busy, config.page_size)
    reserve += num_pinned(state.pool, state.header.now) - slots.pinned
    has_pages = taken + jnp.where(before == 0, 0, reserve) <= usable
    has_turn = before < gate.limit
    # The first that cannot enter bars those behind it, whatever their size: the order is kept.
    enters = waiting & has_pages & has_turn & slots.known & gate.open
    barred = lax.cummax((waiting & ~enters).astype(jnp.int32)) > 0
    admitted = waiting & ~barred
    # Running slots may use what the barred ones leave.
    holders = running | admitted
    taken = held + jnp.cumsum(jnp.where(admitted, newcomers, 0))
    fits_pages = (taken <= usable) | (jnp.cumsum(holders) == 1)
    fits_limit = jnp.cumsum(holders, dtype=jnp.int32) <= gate.limit
    resident = holders & (lax.cummin((~holders | (fits_pages & fits_limit)).astype(jnp.int32)) > 0)
    preempted = running & ~resident
    who = _Residency(resident=resident, admitted=admitted, preempted=preempted, wait=jnp.zeros_like(before))
    left = usable - jnp.max(jnp.where(resident, taken, 0))
    return replace(who, wait=_reasons(slots, who, gate, has_pages, fits_limit & ~fits_pages, left))


def _reasons(
    slots: _Candidates, who: _Residency, gate: Gate, has_pages: jax.Array, short: jax.Array, left: jax.Array
) -> jax.Array:
    """Why each slot [R] waits; `left` is how many pages the residents leave, `short` [R] who lacked pages to stay."""
    held_back = (slots.phase == Phase.WAITING) & ~slots.deferred & ~who.admitted
    crowded = jnp.sum(who.resident | slots.deferred) >= gate.limit
    first = held_back & (jnp.cumsum(held_back) == 1)
    lacks_pages = (slots.need + 1 > left) | (first & ~has_pages)
    turn_over = lax.cummax((held_back & slots.known).astype(jnp.int32)) > 0
    reason = jnp.where(turn_over, Wait.POLICY, Wait.ADMISSIONS)
    reason = jnp.where(lacks_pages, Wait.PAGES, reason)
    reason = jnp.where(crowded, Wait.RUNNING_LIMIT, reason)
    reason = jnp.where(gate.open, reason, Wait.BATCHING)
    wait = jnp.where(held_back, reason, jnp.where(slots.deferred, Wait.PREFIX, Wait.NONE))
    lost = jnp.where(lax.cummax(short.astype(jnp.int32)) > 0, Wait.PAGES, Wait.RUNNING_LIMIT)
    return jnp.where(who.preempted, lost, wait).astype(jnp.int32)


def _explained(wait: jax.Array, state: EngineState, order: jax.Array, ranks: Rank) -> jax.Array:
    """Reasons in `order` with those that only the policy and the controller know."""
    targeted = state.controller.running < state.header.running_limit
    wait = jnp.where((wait == Wait.RUNNING_LIMIT) & targeted, Wait.SLO, wait)
    waits = (wait != Wait.NONE) & (wait != Wait.PREFIX) & (state.slots.phase[order] == Phase.WAITING)
    overdue = (state.header.policy == POLICIES.index("edf")) & (ranks[0][order] > 0)
    return jnp.where(waits & overdue, Wait.DEADLINE, wait)


def _moved(state: EngineState, who: _Residency, matches: Matches, order: jax.Array, place: jax.Array) -> EngineState:
    """Those who leave give up their pages; those who enter begin with what they found in the cache."""
    slots, resident = state.slots, who.resident[place]
    pool, page_table = release(state.pool, slots.page_table, (slots.page_table[:, 0] != NO_PAGE) & ~resident)
    entering = who.admitted.at[matches.place].get(mode="fill", fill_value=False)
    pool, page_table = share(pool, page_table, matches.slot, matches.pages, entering)
    found = _by_place(jnp.where(entering, matches.tokens, 0), matches, order.shape[0])[place]
    admitted, preempted = who.admitted[place], who.preempted[place]
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


def _plan(rows: _Rows, order: jax.Array, samples: jax.Array) -> BatchPlan:
    """The rows in terms of slots instead of places in `order`; the rest is left at 0."""
    slot_of = jnp.append(order, NO_SLOT)
    place = _inverse(order)
    return BatchPlan(
        decode_slot=slot_of[rows.decode],
        chunk_slot=slot_of[rows.chunk],
        chunk_start=rows.chunk_start,
        chunk_len=rows.chunk_len,
        advance=rows.advance[place],
        sample_row=jnp.where(samples, rows.last_row, -1)[place],
        preempted=jnp.int32(0),
        prefix_queries=jnp.int32(0),
        prefix_hits=jnp.int32(0),
        order=order,
        matched=jnp.zeros_like(order),
    )


def _counted(plan: BatchPlan, state: EngineState, who: _Residency, matches: Matches, order: jax.Array) -> BatchPlan:
    """The plan with what happened on the way to it."""
    entering = who.admitted.at[matches.place].get(mode="fill", fill_value=False)
    first_time = entering & (state.slots.preemptions[matches.slot] == 0)
    return replace(
        plan,
        preempted=jnp.sum(who.preempted, dtype=jnp.int32),
        prefix_queries=jnp.sum(jnp.where(first_time, state.slots.length[matches.slot], 0), dtype=jnp.int32),
        prefix_hits=jnp.sum(jnp.where(first_time, matches.tokens, 0), dtype=jnp.int32),
        order=order,
        matched=_by_place(matches.tokens, matches, order.shape[0])[_inverse(order)],
    )


def demand(state: EngineState, plan: BatchPlan, config: EngineConfig) -> Demand:
    """Looks ahead from a settled state, so that the host can choose a bucket without knowing the policy.

    Goes by the order of the step just taken and by what it found in the prefix cache, so it costs little. Who was
    deferred in that step is taken to enter in the next one.
    """
    slots, order, num_slots = state.slots, plan.order, plan.order.shape[0]
    phase = slots.phase[order]
    shareable = (slots.length - 1) // config.page_size * config.page_size
    found = jnp.where(slots.wait_reason == Wait.PREFIX, shareable, plan.matched)
    none = jnp.zeros(num_slots, bool)
    waiting = phase == Phase.WAITING
    candidates = _Candidates(
        phase=phase,
        need=jnp.where(phase != Phase.FREE, pages_for(slots.length, config.page_size)[order], 0),
        held=jnp.where(phase != Phase.FREE, pages_for(slots.computed, config.page_size)[order], 0),
        own=_unshared(state)[order],
        length=slots.length[order],
        left=expected_output(state, config)[order],
        known=waiting & (jnp.cumsum(waiting) <= config.max_admissions),
        found=jnp.zeros_like(order),
        pinned=jnp.zeros_like(order),
        deferred=none,
    )
    allowed = gate(state, config)
    who = _residency(candidates, allowed, state, config)
    computed = jnp.where(who.admitted, found[order], slots.computed[order])
    missing = jnp.where(who.resident, slots.length[order] - computed, 0)
    taken = jnp.sum(who.resident, dtype=jnp.int32)
    held_back = jnp.any(waiting & ~who.admitted) | ~allowed.open
    chunks = jnp.sum(_chunks(missing, config.chunk_size), dtype=jnp.int32)
    prefills = jnp.sum(missing > 1, dtype=jnp.int32)
    return Demand(
        decodes=jnp.maximum(jnp.sum(missing == 1, dtype=jnp.int32), allowed.rows - prefills),
        prefills=prefills,
        chunks=chunks,
        places=jnp.where(held_back, 0, jnp.maximum(allowed.limit - taken, 0)),
    )


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

    chunks = _chunks(missing, chunk)
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


def _chunks(missing: jax.Array, chunk_size: int) -> jax.Array:
    """Chunk rows for so many missing tokens; a single one takes a decode row instead."""
    return jnp.where(missing > 1, (missing + chunk_size - 1) // chunk_size, 0)
