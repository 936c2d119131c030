"""When waiting requests may enter: at every step, or as batches that run to their end.

A batch that runs to its end keeps its shape, as in the engines that batch whole requests: rows of those that have ended
are computed all the same (Yu et al. 2022, "Orca", section 3).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jbatch.config import EngineConfig
from jbatch.controls import BATCHINGS
from jbatch.core.state import EngineState, Phase, Wait, WholeBatch


@struct.dataclass
class Gate:
    """What the way of batching and the limits allow in a step."""

    limit: jax.Array  # int32, most requests that may run; those that run already stay
    limited_by: jax.Array  # int32, the `Wait` of those that find the limit reached
    open: jax.Array  # bool, whether any may enter
    rows: jax.Array  # int32, decode rows that a whole batch keeps
    batch_limit: jax.Array  # int32, most that may be in the batch that runs or begins, under "threshold"


def gate_now(state: EngineState, config: EngineConfig) -> Gate:
    """The gate of the way of batching in force."""
    slots, header, batch = state.slots, state.header, state.batch
    limit = jnp.minimum(header.running_limit, state.controller.running)
    waiting, running = slots.phase == Phase.WAITING, jnp.sum(slots.phase == Phase.RUNNING, dtype=jnp.int32)
    num_waiting = jnp.sum(waiting, dtype=jnp.int32) + header.queued
    oldest = jnp.max(jnp.where(waiting, header.now - slots.submitted, 0))
    always, never, idle, one = jnp.bool(True), jnp.bool(False), running == 0, jnp.int32(1)
    begins = (num_waiting >= header.batch_size) | (oldest >= header.batch_delay)
    # A batch of more than may enter in one step goes on filling, and so does one some of which wait for its prefixes.
    fills = (batch.entered == config.max_admissions) | jnp.any(waiting & (slots.wait_reason == Wait.PREFIX))
    batch_limit = jnp.where(idle, jnp.where(num_waiting > header.batch_threshold, limit, one), batch.limit)
    ways = {  # most that may run, whether any may enter, whether the batch keeps its shape
        "continuous": (limit, always, never),
        "serial": (one, idle, never),
        "static": (limit, idle | fills, ~idle),
        "dynamic": (limit, (idle & begins) | (~idle & fills), ~idle),
        "threshold": (batch_limit, idle | fills, ~idle),
    }
    allowed, opened, keeps = (
        lax.select_n(header.batching, *column) for column in zip(*(ways[name] for name in BATCHINGS), strict=True)
    )
    by_target = (allowed == state.controller.running) & (allowed < header.running_limit)
    return Gate(
        limit=jnp.maximum(allowed, running),
        limited_by=jnp.where(by_target, Wait.SLO, Wait.RUNNING_LIMIT).astype(jnp.int32),
        open=opened,
        rows=jnp.where(keeps, batch.size, 0),
        batch_limit=batch_limit,
    )


def count_batch(state: EngineState, gate: Gate, entered: jax.Array) -> EngineState:
    """Counts those that enter in this step; `state` is still from before they did."""
    idle = ~jnp.any(state.slots.phase == Phase.RUNNING)
    size = jnp.where(idle, 0, state.batch.size) + entered
    return replace(state, batch=WholeBatch(entered=entered, size=size, limit=gate.batch_limit))
