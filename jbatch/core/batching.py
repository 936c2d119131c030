"""When waiting requests may enter: at every step, or as batches that run to their end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jbatch.controls import BATCHINGS
from jbatch.core.state import EngineState, Phase


@struct.dataclass
class Gate:
    """What the way of batching allows in a step."""

    limit: jax.Array  # int32, most requests that may run; those that run already stay
    open: jax.Array  # bool, whether any may enter


def gate(state: EngineState) -> Gate:
    """The gate of the way of batching in force."""
    phase, header = state.slots.phase, state.header
    limit = jnp.minimum(header.running_limit, state.controller.running)
    waiting, running = phase == Phase.WAITING, jnp.sum(phase == Phase.RUNNING, dtype=jnp.int32)
    num_waiting = jnp.sum(waiting, dtype=jnp.int32)
    oldest = jnp.max(jnp.where(waiting, header.now - state.slots.submitted, 0))
    always, idle, one = jnp.bool(True), running == 0, jnp.int32(1)
    collected = (num_waiting >= header.batch_size) | (oldest >= header.batch_delay)
    gates = {
        "continuous": (limit, always),
        "serial": (one, idle),
        "static": (limit, idle),
        "dynamic": (limit, idle & collected),
        "threshold": (jnp.where(num_waiting > header.batch_threshold, limit, one), idle),
    }
    limits, opens = zip(*(gates[name] for name in BATCHINGS), strict=True)
    allowed = jnp.stack(limits)[header.batching]
    return Gate(limit=jnp.maximum(allowed, running), open=jnp.stack(opens)[header.batching])
