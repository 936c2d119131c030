"""Who holds pages in a step, and why the others wait. Vectorised over slots, in the order in which they hold pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jbatch.config import EngineConfig
from jbatch.core.batching import Gate
from jbatch.core.growth import expected_output, growth
from jbatch.core.order import first
from jbatch.core.pages import num_free, num_pinned, pages_for
from jbatch.core.state import EngineState, Phase, Wait


@struct.dataclass
class Candidates:
    """What the decision goes by, in the order in which slots hold pages."""

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
class Residency:
    """The decision, in the same order."""

    resident: jax.Array  # [R] bool
    admitted: jax.Array  # [R] bool, resident from this step on
    preempted: jax.Array  # [R] bool
    wait: jax.Array  # [R] int32, why a slot that waits does


def candidates(
    state: EngineState,
    order: jax.Array,
    config: EngineConfig,
    *,
    known: jax.Array,
    found: jax.Array,
    pinned: jax.Array,
    deferred: jax.Array,
) -> Candidates:
    """The slots of `state` in `order` [R], with what the prefix cache has for those that wait."""
    slots = state.slots
    return Candidates(
        phase=slots.phase[order],
        need=pages_for(slots.length, config.page_size)[order],
        held=pages_for(slots.computed, config.page_size)[order],
        own=slots.own[order],
        length=slots.length[order],
        left=expected_output(state, config)[order],
        known=known,
        found=found,
        pinned=pinned,
        deferred=deferred,
    )


def decide(slots: Candidates, gate: Gate, state: EngineState, config: EngineConfig) -> Residency:
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
    kept = usable - num_free(state.pool) - jnp.sum(slots.own)  # if none stays
    stays = jnp.where(running, slots.own + slots.need - slots.held, 0)  # what each one that runs adds by staying
    newcomers = slots.need - slots.found

    # [R], if all up to here stay or enter and none behind.
    taken = kept + jnp.cumsum(jnp.where(slots.phase == Phase.WAITING, newcomers, stays))
    reserve = growth(slots.length, slots.left, busy, config.page_size)
    reserve += num_pinned(state.pool, state.header.now) - slots.pinned
    has_pages = taken + jnp.where(before == 0, 0, reserve) <= usable
    has_turn = before < gate.limit
    # The first that cannot enter bars those behind it, whatever their size: the order is kept.
    enters = waiting & has_pages & has_turn & slots.known & gate.open
    place = jnp.arange(busy.shape[0], dtype=jnp.int32)
    admitted = waiting & (place < first(waiting & ~enters))
    # Running slots may use what the barred ones leave.
    holders = running | admitted
    taken = kept + jnp.cumsum(jnp.where(admitted, newcomers, stays))
    nth = jnp.cumsum(holders, dtype=jnp.int32)
    fits_pages, fits_limit = (taken <= usable) | (nth == 1), nth <= gate.limit
    resident = holders & (place < first(holders & ~(fits_pages & fits_limit)))
    preempted = running & ~resident
    left = usable - jnp.max(jnp.where(resident, taken, 0))
    short = place >= first(fits_limit & ~fits_pages)
    wait = _reasons(slots, admitted, resident, gate, has_pages, left)
    wait = jnp.where(preempted, jnp.where(short, Wait.PAGES, Wait.RUNNING_LIMIT), wait).astype(jnp.int32)
    return Residency(resident=resident, admitted=admitted, preempted=preempted, wait=wait)


def _reasons(
    slots: Candidates, admitted: jax.Array, resident: jax.Array, gate: Gate, has_pages: jax.Array, left: jax.Array
) -> jax.Array:
    """Why each slot [R] that waited goes on waiting; `left` is how many pages the residents leave."""
    held_back = (slots.phase == Phase.WAITING) & ~slots.deferred & ~admitted
    crowded = jnp.sum(resident | slots.deferred) >= gate.limit
    place = jnp.arange(held_back.shape[0], dtype=jnp.int32)
    lacks_pages = (slots.need + 1 > left) | ((place == first(held_back)) & ~has_pages)
    turn_over = place >= first(held_back & slots.known)
    reason = jnp.where(turn_over, Wait.POLICY, Wait.ADMISSIONS)
    reason = jnp.where(lacks_pages, Wait.PAGES, reason)
    reason = jnp.where(crowded, gate.limited_by, reason)
    reason = jnp.where(gate.open, reason, Wait.BATCHING)
    return jnp.where(held_back, reason, jnp.where(slots.deferred, Wait.PREFIX, Wait.NONE))
