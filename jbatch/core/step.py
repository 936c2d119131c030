"""The whole engine in one pure function: `step(params, state, inbox) -> (state, outbox)`.

`begin` and `commit` are the step without the model; a simulator runs them with tokens of its own.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jbatch.config import Bucket, EngineConfig
from jbatch.core.accounts import charge
from jbatch.core.controller import learn_outputs, set_limits
from jbatch.core.demand import demand
from jbatch.core.inbox import admit
from jbatch.core.model import Batch, Forward, Params
from jbatch.core.outbox import StepResult, pack_outbox
from jbatch.core.pages import pin, release, unshared
from jbatch.core.prefix import extend_digests, register
from jbatch.core.sample import SamplingRows, sample
from jbatch.core.schedule import schedule
from jbatch.core.state import NO_SLOT, NO_TOKEN, BatchPlan, EngineState, Finish, Phase, SlotTable


def step(
    params: Params,
    state: EngineState,
    inbox: jax.Array,
    *,
    forward: Forward,
    config: EngineConfig,
    bucket: Bucket,
) -> tuple[EngineState, jax.Array]:
    """Takes the inbox in, plans a batch, computes it, samples, and settles the result.

    Args:
      params: the model's weights.
      state: donated by the caller's `jit`.
      inbox: [`inbox_size(config)`] int32, from an `InboxBuilder`.
      forward: the model, static.
      config, bucket: static.

    Returns:
      The state after the step and an outbox for `OutboxView`.
    """
    with jax.named_scope("schedule"):
        state, plan = begin(state, inbox, config=config, bucket=bucket)
        batch = make_batch(state.slots, plan, config)
    logits, kv = forward(params, state.kv, batch)
    with jax.named_scope("sample"):
        token, logprob = sample(logits, _sampling_rows(state.slots, plan))
    with jax.named_scope("schedule"):
        return commit(replace(state, kv=kv), plan, token, logprob, config=config)


def begin(
    state: EngineState, inbox: jax.Array, *, config: EngineConfig, bucket: Bucket
) -> tuple[EngineState, BatchPlan]:
    """Admission and scheduling: the first half of a step."""
    state = admit(state, inbox, config)
    return schedule(replace(state, controller=set_limits(state, config)), config, bucket)


def commit(
    state: EngineState, plan: BatchPlan, token: jax.Array, logprob: jax.Array, *, config: EngineConfig
) -> tuple[EngineState, jax.Array]:
    """Stores the tokens [S + C] that rows sampled, ends what is done, frees its pages: the second half of a step."""
    before = slots = state.slots
    sampled = plan.sample_row >= 0
    token = jnp.where(sampled, token[plan.sample_row], NO_TOKEN)
    logprob = jnp.where(sampled, logprob[plan.sample_row], 0.0)

    index = jnp.arange(token.shape[0], dtype=jnp.int32)
    at = jnp.where(sampled, slots.length, slots.tokens.shape[1])  # past the end: dropped
    tokens = slots.tokens.at[index, at].set(token, mode="drop", unique_indices=True)
    length = slots.length + sampled.astype(jnp.int32)
    stopped = sampled & jnp.any(token[:, None] == slots.stop_tokens, axis=1)
    full = sampled & (length >= slots.limit)
    finish = jnp.where(stopped, Finish.STOP, jnp.where(full, Finish.LENGTH, Finish.NONE)).astype(jnp.int32)

    rows = plan.decode_slot.shape[0], plan.chunk_slot.shape[0]
    most = rows[0] + rows[1] * (config.chunk_size // config.page_size + 1)
    state = register(state, plan.advance, most=most, page_size=config.page_size)
    done = finish != Finish.NONE
    accounts = charge(state, plan, done)
    controller = learn_outputs(state.controller, length - slots.prompt_len, done)
    pin_ms = jnp.where(done, slots.pin, 0)
    pool = pin(state.pool, slots.page_table, pin_ms, state.header.now, state.header.max_pinned)
    pool, page_table = release(pool, slots.page_table, done)
    computed = slots.computed + plan.advance
    slots = replace(
        slots,
        phase=jnp.where(done, Phase.FREE, slots.phase),
        computed=computed,
        reached=jnp.maximum(slots.reached, computed),
        length=length,
        tokens=tokens,
        page_table=page_table,
        own=unshared(pool.refs, page_table),
    )
    slots = replace(slots, digests=extend_digests(slots, sampled, config.page_size))
    pool = replace(pool, clock=pool.clock + 1)
    state = replace(state, slots=slots, pool=pool, accounts=accounts, controller=controller)
    recomputed = jnp.sum(jnp.clip(before.reached - before.computed, 0, plan.advance), dtype=jnp.int32)
    news = StepResult(token=token, logprob=logprob, finish=finish, recomputed=recomputed)
    return state, pack_outbox(state, plan, demand(state, plan, config), news)


def make_batch(slots: SlotTable, plan: BatchPlan, config: EngineConfig) -> Batch:
    """The plan in terms of tokens, positions and pages."""
    within = jnp.arange(config.chunk_size, dtype=jnp.int32)
    chunk_position = plan.chunk_start[:, None] + within  # [C, Q]
    in_chunk = within < plan.chunk_len[:, None]
    decode_position = jnp.maximum(slots.length[plan.decode_slot] - 1, 0)
    in_decode = plan.decode_slot != NO_SLOT

    slot = jnp.concatenate([plan.decode_slot, jnp.repeat(plan.chunk_slot, config.chunk_size)])
    position = jnp.concatenate([decode_position, chunk_position.reshape(-1)])
    used = jnp.concatenate([in_decode, in_chunk.reshape(-1)])
    position = jnp.where(used, position, 0)
    page = slots.page_table[slot, position // config.page_size]
    rows = plan.decode_slot.shape[0]
    last_of_chunk = rows + jnp.arange(plan.chunk_slot.shape[0], dtype=jnp.int32) * config.chunk_size
    last_of_chunk += jnp.maximum(plan.chunk_len - 1, 0)
    return Batch(
        tokens=jnp.where(used, slots.tokens[slot, position], 0),
        positions=position,
        page=jnp.where(used, page, -1),
        offset=position % config.page_size,
        decode_table=slots.page_table[plan.decode_slot],
        decode_lengths=jnp.where(in_decode, decode_position + 1, 0),
        chunk_table=slots.page_table[plan.chunk_slot],
        chunk_start=plan.chunk_start,
        chunk_lengths=plan.chunk_start + plan.chunk_len,
        logit_rows=jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), last_of_chunk]),
    )


def _sampling_rows(slots: SlotTable, plan: BatchPlan) -> SamplingRows:
    slot = jnp.concatenate([plan.decode_slot, plan.chunk_slot])
    return SamplingRows(
        temperature=jnp.where(slot == NO_SLOT, 0.0, slots.temperature[slot]),
        top_k=slots.top_k[slot],
        top_p=slots.top_p[slot],
        min_p=slots.min_p[slot],
        seed=slots.seed[slot],
        position=slots.length[slot],
    )
