"""What the next step would compute, so that the host can choose its bucket without knowing the policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jbatch.config import EngineConfig
from jbatch.core.batching import gate_now
from jbatch.core.residency import candidates, decide
from jbatch.core.schedule import chunks_for
from jbatch.core.state import BatchPlan, EngineState, Phase, Wait


@struct.dataclass
class Demand:
    """What the next step would compute if its bucket were large enough and its inbox empty; scalars, int32."""

    decodes: jax.Array  # slots that lack one token
    prefills: jax.Array  # slots that lack more
    chunks: jax.Array  # chunk rows those need, as far as the next few steps go
    rows: jax.Array  # decode rows that a whole batch keeps
    places: jax.Array  # requests that could still enter; 0 when some wait already
    limit: jax.Array  # most requests that may run


def demand(state: EngineState, plan: BatchPlan, config: EngineConfig) -> Demand:
    """Looks ahead from a settled state.

    Goes by the order of the step just taken and by what it found in the prefix cache, so it costs little. Who was
    deferred in that step is taken to enter in the next one.
    """
    slots, order = state.slots, plan.order
    waiting = slots.phase[order] == Phase.WAITING
    nothing = jnp.zeros_like(order)
    gate = gate_now(state, config)
    known = waiting & (jnp.cumsum(waiting) <= config.max_admissions)
    deferred = jnp.zeros_like(waiting)
    entrants = candidates(state, order, config, known=known, found=nothing, pinned=nothing, deferred=deferred)
    who = decide(entrants, gate, state, config)

    shareable = (slots.length - 1) // config.page_size * config.page_size
    found = jnp.where(slots.wait_reason == Wait.PREFIX, shareable, plan.matched)[order]
    computed = jnp.where(who.admitted, found, slots.computed[order])
    missing = jnp.where(who.resident, slots.length[order] - computed, 0)
    taken = jnp.sum(who.resident, dtype=jnp.int32)
    held_back = jnp.any(waiting & ~who.admitted) | ~gate.open
    return Demand(
        decodes=jnp.sum(missing == 1, dtype=jnp.int32),
        prefills=jnp.sum(missing > 1, dtype=jnp.int32),
        chunks=jnp.sum(chunks_for(missing, config.chunk_size), dtype=jnp.int32),
        rows=gate.rows,
        places=jnp.where(held_back, 0, jnp.maximum(gate.limit - taken, 0)),
        limit=gate.limit,
    )
