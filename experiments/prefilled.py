"""States of the engine that have computed their prompts, made without the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jbatch.config import Bucket, EngineConfig, UserError
from jbatch.core.inbox import InboxBuilder, Placement
from jbatch.core.state import EngineState, KVPages, Phase, init_state
from jbatch.core.step import begin, commit, make_batch
from jbatch.request import Request, SamplingParams


def schedule_only(
    state: EngineState, inbox: jax.Array, *, config: EngineConfig, bucket: Bucket
) -> tuple[EngineState, jax.Array]:
    """A step without the model: the schedule part, with some token for every row."""
    state, plan = begin(state, inbox, config=config, bucket=bucket)
    batch = make_batch(state.slots, plan, config)
    # Some token made from all of the batch, so that nothing of it is left out as unused.
    token = 2 + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(batch)) % 2
    rows = bucket.decode + bucket.chunks
    return commit(state, plan, jnp.full(rows, token, jnp.int32), jnp.zeros(rows, jnp.float32), config=config)


def prefilled(config: EngineConfig, kv: KVPages, prompts: list[tuple[int, ...]]) -> EngineState:
    """A state whose slots have computed their prompts as far as the scheduler is concerned."""
    bucket = config.largest_bucket
    run = jax.jit(partial(schedule_only, config=config, bucket=bucket), donate_argnums=0)
    state = init_state(config, KVPages(k=(), v=()))
    sampling = SamplingParams(temperature=0, max_tokens=config.max_model_len // 2)
    todo = [(slot, Request(prompt, sampling)) for slot, prompt in enumerate(prompts)]
    while todo or bool(jnp.any(state.slots.length - state.slots.computed > 1)):
        inbox = InboxBuilder(config)
        while todo and not inbox.full:
            slot, request = todo.pop(0)
            inbox.admit(request, Placement(slot, arrival=slot, limit=len(request.prompt) + sampling.max_tokens))
        state, _ = run(state, jnp.asarray(inbox.buffer))
    ready = jnp.sum((state.slots.phase == Phase.RUNNING) & (state.slots.length - state.slots.computed == 1))
    if ready < len(prompts):
        raise UserError(f"{config.num_pages} pages are too few for {len(prompts)} slots of {len(prompts[0])} tokens")
    return replace(state, kv=kv)
