"""When waiting requests may enter: at every step, or as batches that run to their end.

A batch that runs to its end keeps its shape, as in the engines that batch whole requests: rows of those that have ended
are computed all the same (Yu et al. 2022, "Orca", section 3).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jbatch.config import EngineConfig
from jbatch.controls import BATCHINGS
from jbatch.core.state import EngineState, Phase, Wait


@struct.dataclass
class Gate:
    """What the way of batching allows in a step."""

    limit: jax.Array  # int32, most requests that may run; those that run already stay
    open: jax.Array  # bool, whether any may enter
    rows: jax.Array  # int32, decode rows that are computed at least
    batch_limit: jax.Array  # int32, most that may be in the batch that runs or begins, under "threshold"


def gate(state: EngineState, config: EngineConfig) -> Gate:
    """The gate of the way of batching in force."""
    slots, header, controller = state.slots, state.header, state.controller
    limit = jnp.minimum(header.running_limit, controller.running)
    waiting, running = slots.phase == Phase.WAITING, jnp.sum(slots.phase == Phase.RUNNING, dtype=jnp.int32)
    num_waiting = jnp.sum(waiting, dtype=jnp.int32) + header.queued
    oldest = jnp.max(jnp.where(waiting, header.now - slots.submitted, 0))
    always, idle, one = jnp.bool(True), running == 0, jnp.int32(1)
    begins = (num_waiting >= header.batch_size) | (oldest >= header.batch_delay)
    # A batch of more than may enter in one step goes on filling, and so does one some of which wait for its prefixes.
    fills = (controller.entered == config.max_admissions) | jnp.any(waiting & (slots.wait_reason == Wait.PREFIX))
    batch_limit = jnp.where(idle, jnp.where(num_waiting > header.batch_threshold, limit, one), controller.batch_limit)
    gates = {
        "continuous": (limit, always),
        "serial": (one, idle),
        "static": (limit, idle | fills),
        "dynamic": (limit, (idle & begins) | (~idle & fills)),
        "threshold": (batch_limit, idle | fills),
    }
    limits, opens = zip(*(gates[name] for name in BATCHINGS), strict=True)
    allowed = jnp.stack(limits)[header.batching]
    whole = header.batching >= BATCHINGS.index("static")
    return Gate(
        limit=jnp.maximum(allowed, running),
        open=jnp.stack(opens)[header.batching],
        rows=jnp.where(whole & ~idle, controller.batch, 0),
        batch_limit=batch_limit,
    )


def count_batch(state: EngineState, gate: Gate, entered: jax.Array) -> EngineState:
    """Counts those that enter in this step; `state` is still from before they did."""
    idle = ~jnp.any(state.slots.phase == Phase.RUNNING)
    batch = jnp.where(idle, 0, state.controller.batch) + entered
    controller = replace(state.controller, entered=entered, batch=batch, batch_limit=gate.batch_limit)
    return replace(state, controller=controller)
