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
from jbatch.core.accounts import OUTPUT_WEIGHT
from jbatch.core.order import sorted_by
from jbatch.core.prefix import find
from jbatch.core.state import NO_PAGE, NO_PROGRAM, EngineState, KVPages, Phase

Rank = tuple[jax.Array, jax.Array]
"""Level, from -2**29 to 2**29, and score [R], int32."""

_BOUND = 2**28


def rank(state: EngineState, config: EngineConfig) -> Rank:
    """Level and score of every slot under the policy in force; those of free slots mean nothing."""
    branches = [lambda state, policy=_POLICIES[name]: policy(state, config) for name in POLICIES]
    # Without the pages of keys and values, which a conditional might copy.
    return lax.switch(state.header.policy, branches, replace(state, kv=KVPages(k=(), v=())))


def overdue(state: EngineState) -> jax.Array:
    """Slots [R] that wait behind all others since their deadline has passed, under the policy that looks at it."""
    left = state.slots.deadline - state.header.now
    return (state.header.policy == POLICIES.index("edf")) & (left <= 0) & (state.slots.phase == Phase.WAITING)


def _period(state: EngineState) -> jax.Array:
    """The period of `aging` in which each request came, counted from the running one."""
    period = (state.slots.submitted - state.header.aging_window) // jnp.maximum(state.header.aging, 1)
    return jnp.clip(period, -_BOUND, _BOUND)


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
    return jnp.clip(state.slots.priority, -_BOUND, _BOUND) + _period(state), _nothing(state)


def _edf(state: EngineState, config: EngineConfig) -> Rank:
    """The earliest deadline first; those who wait and have missed theirs come last."""
    return overdue(state).astype(jnp.int32), state.slots.deadline - state.header.now


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
    been charged for already. If the tenant of the lowest counter runs less than an equal share of the requests that
    run, it moreover takes places from those that run more, so a flood of requests does not keep another tenant waiting
    for one of them to end.
    """
    slots, service = state.slots, state.accounts.tenant
    busy, running = slots.phase != Phase.FREE, slots.phase == Phase.RUNNING
    older = slots.arrival[None] < slots.arrival[:, None]
    before = jnp.where(running[None] == running[:, None], older, running[None])
    before &= (slots.tenant[None] == slots.tenant[:, None]) & busy[None]  # [R, R]: the second goes before the first
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    charged = jnp.sum(jnp.where(before & ~running[None], slots.length[None], 0), axis=1, dtype=jnp.int32)

    mine = service[slots.tenant]
    least = jnp.min(jnp.where(busy, mine, 2**31 - 1))
    active = jnp.sum(jnp.zeros(service.shape, bool).at[slots.tenant].max(busy), dtype=jnp.int32)
    share = jnp.maximum(jnp.sum(running, dtype=jnp.int32) // jnp.maximum(active, 1), 1)
    return -((place < share) & (running | (mine == least))).astype(jnp.int32), mine + charged


def _program(state: EngineState, config: EngineConfig) -> Rank:
    """Least attained service of the whole program first, in powers of two (Autellix: Luo et al. 2025).

    A request of no program counts by itself.
    """
    slots = state.slots
    prompt = jnp.maximum(jnp.minimum(slots.reached, slots.prompt_len) - slots.cached, 0)
    alone = prompt + OUTPUT_WEIGHT * (slots.length - slots.prompt_len)
    attained = jnp.where(slots.program == NO_PROGRAM, alone, state.accounts.program[slots.program])
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


def holding_order(state: EngineState, ranks: Rank) -> jax.Array:
    """Slots [R] in the order in which they hold pages, free ones last.

    By level; then those that run, those that would have most to compute again first; then the preempted; then the
    others, by score.
    """
    slots, (level, score) = state.slots, ranks
    running = slots.phase == Phase.RUNNING
    standing = jnp.where(running, 0, jnp.where(slots.preemptions > 0, 1, 2))
    within = jnp.where(running, -slots.computed, score)
    return sorted_by(_last(slots.phase == Phase.FREE, 3 * level + standing), within, slots.arrival)


def row_order(state: EngineState, ranks: Rank, resident: jax.Array) -> jax.Array:
    """Slots [R] in the order in which they get rows: those in `resident` [R] by level and score."""
    level, score = ranks
    return sorted_by(_last(~resident, level), score, state.slots.arrival)


def _last(these: jax.Array, level: jax.Array) -> jax.Array:
    """`level` [R] with a higher one than any for `these` [R]: a sort takes longer with every key."""
    return jnp.where(these, 2**31 - 1, level)
