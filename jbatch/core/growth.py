"""What memory the running requests will still want, from the lengths of the outputs seen so far."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jbatch.config import EngineConfig
from jbatch.core.pages import pages_for
from jbatch.core.state import EngineState

_MOMENTS = 16


def expected_output(state: EngineState, config: EngineConfig) -> jax.Array:
    """Tokens [R] that each slot is still expected to generate, a page at least."""
    slots, mean = state.slots, state.controller.output_tokens
    generated = (slots.length - slots.prompt_len).astype(jnp.float32)
    # One that has gone on for longer than most is given another quarter of the mean.
    left = jnp.minimum(jnp.maximum(mean - generated, mean / 4), (slots.limit - slots.length).astype(jnp.float32))
    return jnp.maximum(left.astype(jnp.int32), config.page_size)


def growth(length: jax.Array, left: jax.Array, busy: jax.Array, page_size: int) -> jax.Array:
    """Pages [R] that the slots before each one will want at most besides those of their known tokens.

    Looks at a few moments until the last of them ends: those that go on have grown by then, the others have given their
    pages back. (Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA Guarantees", looks at each end.)

    Args:
      length, left: [R] tokens known and tokens expected to come, in the order in which slots hold pages.
      busy: [R] bool, the slots that count.
    """
    steps = jnp.arange(_MOMENTS + 1, dtype=jnp.int32)[:, None]
    moment = (jnp.max(jnp.where(busy, left, 0)) * steps + _MOMENTS - 1) // _MOMENTS
    now = pages_for(length, page_size)
    then = pages_for(length + jnp.minimum(left, moment[1:]), page_size)
    change = jnp.where(busy, jnp.where(left > moment[:-1], then - now, -now), 0)
    total = jnp.cumsum(change, axis=1) - change
    return jnp.maximum(jnp.max(total, axis=0), 0)
