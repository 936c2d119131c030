"""What does scheduling cost? Times the whole step, and the same step without the model and without sampling.

Fills every running slot, then repeats the decode step. The schedule part is all but the forward pass and sampling:
taking the inbox in, ordering, residency, rows, pages, the batch's tokens and tables, commit and outbox. It is timed
in turns with whole steps, which leave nothing of it in the processor's caches, and then by itself under every policy,
in a larger engine whose pages are all in use or cached, so that each step has to evict some.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.load import chat_prompts
from experiments.report import RESULTS, run, say, settings_of, table, write_json
from jbatch.config import DEFAULT_MODEL, Bucket, EngineConfig
from jbatch.controls import POLICIES, Controls, Policy
from jbatch.core.inbox import InboxBuilder, Placement
from jbatch.core.model import Model
from jbatch.core.state import EngineState, KVPages, init_state
from jbatch.core.step import begin, commit, make_batch, step
from jbatch.models.load import load_model
from jbatch.request import Request, SamplingParams

CLAIM = 0.05
"""Share of a whole step, at most."""

CLAIM_ALONE = 1e-3
"""Seconds by itself in the larger engine, at most."""


@dataclass(frozen=True)
class Settings:
    """The schedule part of a decode step with all slots running."""

    model: str = DEFAULT_MODEL
    """Name, path or hub id of the model."""
    running: int = 64
    """Running slots, a power of two."""
    context: int = 128
    """Tokens each slot holds at first; prompts are repeated or cut to it."""
    repeats: int = 25
    """Steps timed of each kind, in turns."""
    slots: int = 256
    """Slots of the larger engine, all of them running."""
    pages: int = 4096
    """Its pages."""
    policies: tuple[Policy, ...] = POLICIES
    """Policies to time in it."""
    out: Path = RESULTS
    """Folder for the JSON."""


def main(settings: Settings) -> None:
    """Times both steps in turns and writes the medians."""
    loaded = load_model(settings.model, report=say)
    config = replace(EngineConfig(), max_running=settings.running, max_slots=2 * settings.running)
    prompts = [
        (prompt * settings.context)[: settings.context] for prompt in chat_prompts(loaded.tokenizer, settings.running)
    ]
    seconds = measure(loaded.for_engine(), config, prompts, settings.repeats)
    whole, schedule = (median(seconds[name]) for name in ("step", "schedule"))
    rows = [
        {"part": "whole step", "median ms": f"{whole * 1e3:.2f}", "share": "100%"},
        {"part": "schedule", "median ms": f"{schedule * 1e3:.3f}", "share": f"{schedule / whole:.2%}"},
    ]
    print(table(rows))
    alone = measure_alone(settings)
    print(table([{"policy": name, "alone, median ms": f"{value * 1e3:.3f}"} for name, value in alone.items()]))
    holds = "holds" if schedule / whole < CLAIM else "does not hold"
    print(f"\nThat scheduling takes under {CLAIM:.0%} of a step {holds}.")
    holds = "holds" if max(alone.values()) < CLAIM_ALONE else "does not hold"
    sizes = f"{settings.slots} slots and {settings.pages} pages"
    print(f"That it takes under {CLAIM_ALONE * 1e3:.0f} ms by itself with {sizes} {holds}.")
    write_json(
        settings.out / "schedule.json",
        {
            "settings": settings_of(settings),
            "step_seconds": whole,
            "schedule_seconds": schedule,
            "alone_seconds": alone,
        },
    )


def measure_alone(settings: Settings) -> dict[str, float]:
    """Median seconds of a step without a model in the larger engine, for each policy."""
    rows = settings.slots
    config = replace(EngineConfig(), max_running=rows, max_slots=rows, num_pages=settings.pages)
    # They grow until all pages are taken; the second half of the steps is timed.
    length = max(1, settings.pages // rows // 2) * config.page_size
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 49152, length).tolist()) for _ in range(rows)]
    bare = jax.jit(partial(_schedule_only, config=config, bucket=Bucket(rows, 0)), donate_argnums=0)
    medians: dict[str, float] = {}
    for policy in settings.policies:
        state = prefilled(config, KVPages(k=(), v=()), prompts)
        nothing = jnp.asarray(InboxBuilder(config, Controls(policy=policy)).buffer)
        seconds: list[float] = []
        for _ in range(2 * length):
            state = _timed(bare, state, nothing, seconds)
        medians[policy] = median(seconds[len(seconds) // 2 :])
    return medians


def measure(model: Model, config: EngineConfig, prompts: list[tuple[int, ...]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each whole step ("step") and of each step without a model ("schedule"), taken in turns."""
    bucket = Bucket(config.max_running, 0)
    whole = jax.jit(partial(step, forward=model.forward, config=config, bucket=bucket), donate_argnums=1)
    bare = jax.jit(partial(_schedule_only, config=config, bucket=bucket), donate_argnums=0)
    full = prefilled(config, model.init_kv(config.num_pages, config.page_size), prompts)
    empty = prefilled(config, KVPages(k=(), v=()), prompts)
    nothing = jnp.asarray(InboxBuilder(config).buffer)
    seconds: dict[str, list[float]] = {"step": [], "schedule": []}
    for _ in range(repeats + 1):  # the first of each compiles
        full = _timed(partial(whole, model.params), full, nothing, seconds["step"])
        empty = _timed(bare, empty, nothing, seconds["schedule"])
    return {name: values[1:] for name, values in seconds.items()}


def _timed(run: Any, state: EngineState, inbox: jax.Array, seconds: list[float]) -> EngineState:
    begun = time.perf_counter()
    state, outbox = run(state, inbox)
    outbox.block_until_ready()
    seconds.append(time.perf_counter() - begun)
    return state


def _schedule_only(
    state: EngineState, inbox: jax.Array, *, config: EngineConfig, bucket: Bucket
) -> tuple[EngineState, jax.Array]:
    state, plan = begin(state, inbox, config=config, bucket=bucket)
    batch = make_batch(state.slots, plan, config)
    # Some token made from all of the batch, so that nothing of it is left out as unused.
    token = 2 + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(batch)) % 2
    rows = bucket.decode + bucket.chunks
    return commit(state, plan, jnp.full(rows, token, jnp.int32), jnp.zeros(rows, jnp.float32), config=config)


def prefilled(config: EngineConfig, kv: KVPages, prompts: list[tuple[int, ...]]) -> EngineState:
    """A state whose slots have computed their prompts as far as the scheduler is concerned."""
    bucket = config.largest_bucket
    run = jax.jit(partial(_schedule_only, config=config, bucket=bucket), donate_argnums=0)
    state = init_state(config, KVPages(k=(), v=()))
    sampling = SamplingParams(temperature=0, max_tokens=config.max_model_len // 2)
    todo = [(slot, Request(prompt, sampling)) for slot, prompt in enumerate(prompts)]
    while todo or bool(jnp.any(state.slots.length - state.slots.computed > 1)):
        inbox = InboxBuilder(config)
        while todo and not inbox.full:
            slot, request = todo.pop(0)
            inbox.admit(request, Placement(slot, arrival=slot, limit=len(request.prompt) + sampling.max_tokens))
        state, _ = run(state, jnp.asarray(inbox.buffer))
    return replace(state, kv=kv)


if __name__ == "__main__":
    run(main, Settings, __doc__)
