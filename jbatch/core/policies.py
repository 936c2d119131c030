"""Who goes first. A policy gives every slot a level and a score, lower first; equal ones go by arrival.

A waiting slot of a lower level displaces running ones of a higher level. Within a level nobody is displaced: there the
score decides who enters next and who gets rows first, and a lack of pages costs those their place who lose least by it.

Most policies put the period of `aging` in which a request came into its level. So whatever the scores, nobody is
overtaken by those of its class that come more than `aging` later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jbatch.config import EngineConfig
from jbatch.controls import POLICIES, Policy
from jbatch.core.prefix import find
from jbatch.core.state import NO_PAGE, NO_PROGRAM, EngineState, Fairness, KVPages, Phase, SlotTable

Rank = tuple[jax.Array, jax.Array]
"""Level and score [R], int32."""

OUTPUT_WEIGHT = 2
"""Service that a generated token counts for; a token of the prompt counts for one (Sheng et al. 2024, section 5)."""

_CLASS_BOUND = 2**29
_MOST_SERVICE = 2**30  # so that sums of it and a step's do not overflow


def rank(state: EngineState, config: EngineConfig) -> Rank:
    """Level and score of every slot under the policy in force; those of free slots mean nothing."""
    branches = [_using(_POLICIES[name], config) for name in POLICIES]
    return lax.switch(state.header.policy, branches, replace(state, kv=KVPages(k=(), v=())))


def _using(policy: Callable[[EngineState, EngineConfig], Rank], config: EngineConfig) -> Callable[[EngineState], Rank]:
    return lambda state: policy(state, config)


def _period(state: EngineState) -> jax.Array:
    """The period of `aging` in which each request came, counted from the running one."""
    return (state.slots.submitted - state.header.aging_window) // jnp.maximum(state.header.aging, 1)


def _nothing(state: EngineState) -> jax.Array:
    return jnp.zeros_like(state.slots.phase)


def _fcfs(state: EngineState, config: EngineConfig) -> Rank:
    """Arrival alone."""
    return _nothing(state), _nothing(state)


def _priority(state: EngineState, config: EngineConfig) -> Rank:
    """Lower classes first; to have come one period earlier counts as much as one class.

    So a request of class p is overtaken by one of a class q < p only if that one comes less than p - q periods after
    it.
    """
    return jnp.clip(state.slots.priority, -_CLASS_BOUND, _CLASS_BOUND) + _period(state), _nothing(state)


def _edf(state: EngineState, config: EngineConfig) -> Rank:
    """The earliest deadline first; those who wait and have missed theirs come last."""
    left = state.slots.deadline - state.header.now
    return ((left <= 0) & (state.slots.phase == Phase.WAITING)).astype(jnp.int32), left


def _shortest(state: EngineState, config: EngineConfig) -> Rank:
    """Least remaining work first: tokens to compute until the longest answer it may give ends."""
    return _period(state), state.slots.limit - state.slots.computed


def _prefix(state: EngineState, config: EngineConfig) -> Rank:
    """The longest cached prefix first, so that those who share pages run together while the pages are there.

    Looks at 1, 2, 4, ... pages rather than at all: a page is cached only where those before it are, or were just now.
    """
    slots = state.slots
    depths = [1 << i for i in range(config.pages_per_slot.bit_length())]
    depths = [depth for depth in depths if depth <= config.pages_per_slot]
    column = jnp.asarray(depths, jnp.int32) - 1
    cached = find(state.pool, state.index, slots.digests[:, column]) != NO_PAGE  # [R, log N]
    cached &= column < ((slots.length - 1) // config.page_size)[:, None]
    return _period(state), -jnp.max(jnp.where(cached, column + 1, 0), axis=1)


def _fair(state: EngineState, config: EngineConfig) -> Rank:
    """The tenant served least first: virtual token counters (Sheng et al. 2024, "Fairness in Serving LLMs").

    A request's score is its tenant's counter and the prompts of the same tenant that wait before it, as if each had
    been charged for already. If the tenant of the lowest counter has nothing running it moreover takes a place from one
    that has several, so a flood of requests does not keep another tenant waiting for one of them to end.
    """
    slots, service = state.slots, state.fairness.tenant
    busy, running = slots.phase != Phase.FREE, slots.phase == Phase.RUNNING
    older = slots.arrival[None] < slots.arrival[:, None]
    before = jnp.where(running[None] == running[:, None], older, running[None])
    before &= (slots.tenant[None] == slots.tenant[:, None]) & busy[None]  # [R, R]: the second goes before the first
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    charged = jnp.sum(jnp.where(before & ~running[None], slots.length[None], 0), axis=1, dtype=jnp.int32)

    mine = service[slots.tenant]
    least = jnp.min(jnp.where(busy, mine, 2**31 - 1))
    return -((place == 0) & (running | (mine == least))).astype(jnp.int32), mine + charged


def _program(state: EngineState, config: EngineConfig) -> Rank:
    """Least attained service of the whole program first, in powers of two (Autellix: Luo et al. 2025).

    A request of no program counts by itself.
    """
    slots = state.slots
    attained = jnp.where(slots.program == NO_PROGRAM, slots.reached, state.fairness.program[slots.program])
    return _period(state), 32 - lax.clz(attained)


_POLICIES: dict[Policy, Callable[[EngineState, EngineConfig], Rank]] = {
    "priority": _priority,
    "fcfs": _fcfs,
    "edf": _edf,
    "shortest": _shortest,
    "prefix": _prefix,
    "fair": _fair,
    "program": _program,
}


def charge(fairness: Fairness, slots: SlotTable, service: jax.Array, active: jax.Array) -> Fairness:
    """Adds `service` [R] to the accounts of those it was done for; `active` [R] are the requests that go on.

    Counters of tenants say how much more each has got than the active one that has got least. Who has got less than
    that is lifted to it, so nobody saves up service by asking for none.
    """
    tenant = fairness.tenant.at[slots.tenant].add(service)
    present = jnp.zeros(tenant.shape, bool).at[slots.tenant].max(active)
    least = jnp.min(jnp.where(present, tenant, _MOST_SERVICE))
    tenant = jnp.where(jnp.any(present), jnp.maximum(tenant - least, 0), tenant)
    program = jnp.where(slots.program == NO_PROGRAM, fairness.program.shape[0], slots.program)
    return Fairness(
        tenant=jnp.minimum(tenant, _MOST_SERVICE),
        program=jnp.minimum(fairness.program.at[program].add(service, mode="drop"), _MOST_SERVICE),
    )


def holding_order(state: EngineState, ranks: Rank) -> jax.Array:
    """Slots [R] in the order in which they hold pages, free ones last.

    By level; then those that run, those that would have most to compute again first; then the preempted; then the
    others, by score.
    """
    slots, (level, score) = state.slots, ranks
    running = slots.phase == Phase.RUNNING
    standing = jnp.where(running, 0, jnp.where(slots.preemptions > 0, 1, 2))
    within = jnp.where(running, -slots.computed, score)
    return _sorted(slots.phase == Phase.FREE, level, standing, within, slots.arrival)


def row_order(state: EngineState, ranks: Rank, resident: jax.Array) -> jax.Array:
    """Slots [R] in the order in which they get rows: those in `resident` [R] by level and score."""
    return _sorted(~resident, *ranks, state.slots.arrival)


def _sorted(*keys: jax.Array) -> jax.Array:
    keys = tuple(key.astype(jnp.int32) for key in keys)
    index = jnp.arange(keys[0].shape[0], dtype=jnp.int32)
    return lax.sort((*keys, index), num_keys=len(keys))[-1]
