"""What has been done for whom: the accounts of tenants and of agent programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jbatch.core.state import NO_PROGRAM, Accounts, BatchPlan, EngineState, Phase, SlotTable

OUTPUT_WEIGHT = 2
"""Service that a generated token counts for; a token of the prompt counts for one (Sheng et al. 2024, section 5)."""

_MOST_SERVICE = 2**30  # so that sums of it and a step's do not overflow


def service(slots: SlotTable, plan: BatchPlan) -> jax.Array:
    """What a step does for each slot [R]; `slots` are from before it.

    Tokens of a prompt count once, however often they are computed, and not at all where they were cached.
    """
    end = jnp.minimum(slots.computed + plan.advance, slots.prompt_len)
    prompt = jnp.maximum(end - jnp.maximum(slots.computed, slots.reached), 0)
    return prompt + OUTPUT_WEIGHT * (plan.sample_row >= 0).astype(jnp.int32)


def charge(state: EngineState, plan: BatchPlan, done: jax.Array) -> Accounts:
    """The accounts after a step with `plan`, in which the slots of `done` [R] end.

    Those of tenants say how much more each has got than the active one that has got least. Who has got less than that
    is lifted to it, so nobody saves up service by asking for none.
    """
    slots, given = state.slots, service(state.slots, plan)
    active = (slots.phase != Phase.FREE) & ~done
    tenant = state.accounts.tenant.at[slots.tenant].add(given)
    present = jnp.zeros(tenant.shape, bool).at[slots.tenant].max(active)
    least = jnp.min(jnp.where(present, tenant, _MOST_SERVICE))
    tenant = jnp.where(jnp.any(present), jnp.maximum(tenant - least, 0), tenant)
    program = jnp.where(slots.program == NO_PROGRAM, state.accounts.program.shape[0], slots.program)
    return Accounts(
        tenant=jnp.minimum(tenant, _MOST_SERVICE),
        program=jnp.minimum(state.accounts.program.at[program].add(given, mode="drop"), _MOST_SERVICE),
    )
