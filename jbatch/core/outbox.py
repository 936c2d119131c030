"""What a step tells the host, in one int32 buffer of fixed shape: counters, then one entry per slot and column."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jbatch.config import EngineConfig
from jbatch.core.demand import Demand
from jbatch.core.pages import num_cached, num_free, num_pinned
from jbatch.core.state import NO_SLOT, NO_TOKEN, BatchPlan, EngineState

COUNTERS = (
    "free_pages",
    "decode_tokens",
    "prefill_tokens",
    "preempted",
    "cached_pages",
    "prefix_queries",
    "prefix_hits",
    "recomputed_tokens",
    "pinned_pages",
    "running_limit",
    "chunk_limit",
    "chunk_rows",
    "next_rows",
    "next_decodes",
    "next_prefills",
    "next_chunks",
    "next_places",
)
COLUMNS = ("token", "logprob", "finish", "phase", "wait_reason", "cached")


@struct.dataclass
class StepResult:
    """What came of a step's plan."""

    token: jax.Array  # [R] int32, NO_TOKEN where none was sampled
    logprob: jax.Array  # [R] float32
    finish: jax.Array  # [R] int32, a Finish
    recomputed: jax.Array  # int32, tokens computed that had been computed before


def pack_outbox(state: EngineState, plan: BatchPlan, ahead: Demand, result: StepResult) -> jax.Array:
    """One buffer from the state after a step, its plan, the next step's demand and the step's result."""
    slots = state.slots
    counters = (
        num_free(state.pool),
        jnp.sum(plan.decode_slot != NO_SLOT, dtype=jnp.int32),
        jnp.sum(plan.chunk_len, dtype=jnp.int32),
        plan.preempted,
        num_cached(state.pool),
        plan.prefix_queries,
        plan.prefix_hits,
        result.recomputed,
        num_pinned(state.pool, state.header.now),
        ahead.limit,
        state.controller.chunks,
        jnp.sum(plan.chunk_slot != NO_SLOT, dtype=jnp.int32),
        ahead.rows,
        ahead.decodes,
        ahead.prefills,
        ahead.chunks,
        ahead.places,
    )
    columns = (
        result.token,
        lax.bitcast_convert_type(result.logprob, jnp.int32),
        result.finish,
        slots.phase,
        slots.wait_reason,
        slots.cached,
    )
    return jnp.concatenate([jnp.stack(counters), *columns])


class OutboxView:
    """The host's view of one outbox: named columns [R] and counters, no copies."""

    def __init__(self, buffer: np.ndarray) -> None:
        self._counters = buffer[: len(COUNTERS)]
        self._columns = buffer[len(COUNTERS) :].reshape(len(COLUMNS), -1)

    @classmethod
    def idle(cls, config: EngineConfig) -> OutboxView:
        """What an engine without requests would report."""
        view = cls(np.zeros(len(COUNTERS) + len(COLUMNS) * config.max_slots, np.int32))
        for name in ("next_places", "running_limit"):
            view._counters[COUNTERS.index(name)] = config.max_running
        view._counters[COUNTERS.index("chunk_limit")] = config.max_chunks
        view._columns[COLUMNS.index("token")] = NO_TOKEN
        return view

    def counter(self, name: str) -> int:
        """One of `COUNTERS`."""
        return int(self._counters[COUNTERS.index(name)])

    def column(self, name: str) -> np.ndarray:
        """One of `COLUMNS`, [R]; `logprob` as float32, the others int32. `token` is -1 where none is new."""
        column = self._columns[COLUMNS.index(name)]
        return column.view(np.float32) if name == "logprob" else column

    def news(self) -> np.ndarray:
        """Slots with a new token."""
        return np.flatnonzero(self.column("token") != NO_TOKEN)
