"""How large the batch may be, so that latency targets are kept.

After "Optimizing LLM Inference Throughput via Memory-aware and SLA-constrained Dynamic Batching" (arXiv 2503.05248),
whose limit from memory is in `growth`. Here the limit from latency comes from a model of the step time instead of a
search: what a step of so many decode rows takes, and what prompts add to it in the long run.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jbatch.config import EngineConfig
from jbatch.core.header import Header
from jbatch.core.state import Controller, EngineState, Phase

RATE_SECONDS = 10.0
"""Time over which rates are averaged."""

_NEVER = 1e9
_MARGIN = 0.95  # of the target that is aimed at
_FIRST_LIMIT = 8  # requests that run as long as no step time is known
_UPWARDS, _DOWNWARDS = 1.4, 1.5  # how many times longer twice the rows are thought to take, where one is known
_CORRECTION = 0.7, 1.3  # times what is foreseen, at least and at most
_STALL = 3  # times the target: no step is to take longer for prompts; less would mean more of the dearer mixed steps
_OUTLIER = 1.5  # times what was expected: no step counts for more than that
_FADING = 1 / 4096  # of what is known of more rows than run, each step


def set_limits(state: EngineState, config: EngineConfig) -> Controller:
    """Takes in what the header tells of the past, and sets the limits for this step."""
    header = state.header
    controller = _learn_rates(_learn_times(state.controller, header, config.max_chunks), header)
    target = _least(header.slo_tpot_us, state) / 1e3
    targeted, target = target < _NEVER / 1e3, target * _MARGIN
    rows = jnp.arange(1, config.max_running + 1, dtype=jnp.int32)
    # Steps differ from what is foreseen, in shape and since requests with a chunk to compute generate nothing.
    correction = jnp.clip((controller.measured + 1e-3) / (controller.foreseen + 1e-3), *_CORRECTION)
    mean = _mean_time(controller, rows) * correction
    # Not the most that fit: one row more than a power of two costs as much as twice as many.
    rate = jnp.where(mean <= target, _float(rows) / jnp.maximum(mean, 1e-3), 0.0)
    fitting = jnp.where(targeted, 1 + jnp.argmax(rate, axis=0), config.max_running)

    running = jnp.sum(state.slots.phase == Phase.RUNNING, dtype=jnp.int32)
    spare = _STALL * target - _filled(controller.decode_time)[_notch(jnp.maximum(running, 1))]
    chunks = jnp.where(targeted, spare / jnp.maximum(controller.chunk_time, 1e-3), _NEVER)
    chunks = jnp.where(_first_token_in_danger(state, controller), float(config.max_chunks), chunks)
    return replace(
        controller,
        running=fitting.astype(jnp.int32),
        chunks=jnp.clip(chunks, 1, config.max_chunks).astype(jnp.int32),
    )


def learn_outputs(controller: Controller, generated: jax.Array, done: jax.Array) -> Controller:
    """Takes in the slots that end in this step: `done` [R], after `generated` [R] tokens each."""
    count = jnp.sum(done, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(done, _float(generated), 0.0)) / jnp.maximum(count, 1.0)
    weight = jnp.where(controller.output_tokens > 0, 1 - jnp.float32(0.95) ** count, 1.0)
    learned = controller.output_tokens + weight * (mean - controller.output_tokens)
    return replace(
        controller,
        output_tokens=jnp.where(count > 0, learned, controller.output_tokens),
        finishes=controller.finishes + count / RATE_SECONDS,
    )


def _learn_times(controller: Controller, header: Header, max_chunks: int) -> Controller:
    """From the step that the host has read last."""
    decodes, chunks = _float(header.step_decodes), _float(header.step_chunks)
    notch = _notch(jnp.maximum(header.step_decodes, 1))
    known, any_known = controller.decode_time[notch], jnp.any(controller.decode_time > 0)
    timed = (header.step_us > 0) & (header.step_decodes > 0)
    alone = timed & (header.step_chunks == 0)
    time = _float(header.step_us) / 1e3
    estimated = (known > 0) & (alone | (controller.chunk_time > 0))
    time = jnp.where(estimated, jnp.minimum(time, _OUTLIER * (known + chunks * controller.chunk_time)), time)

    learned = jnp.where(known > 0, known + (time - known) / 16, time)
    at = jnp.arange(controller.decode_time.shape[0], dtype=jnp.int32)
    # What makes this step longer than before, such as longer contexts, does the same to larger ones; and what is known
    # of those fades, so that they are tried again.
    scale = jnp.where(known > 0, learned / jnp.maximum(known, 1e-3), 1.0) * (1 - _FADING)
    decode_time = jnp.where(at > notch, controller.decode_time * scale, controller.decode_time)
    decode_time = jnp.maximum(decode_time, jnp.where((at > notch) & (decode_time > 0), learned, 0.0))
    decode_time = jnp.where(at == notch, learned, decode_time)

    # Each step counts as its chunks do, so that all that chunks added is the sum of what they are thought to add: a
    # step with one chunk adds far more a chunk than one with many.
    added = jnp.maximum(time - _filled(controller.decode_time)[notch], 0.0)
    before = controller.chunk_time
    chunk_time = before + (added - chunks * before) / (4 * max_chunks)
    chunk_time = jnp.where(before > 0, chunk_time, added / jnp.maximum(chunks, 1.0))
    weight = jnp.where(timed, 1 / 64, 0.0)
    expected = _mean_time(controller, jnp.maximum(header.step_decodes, 1))
    compared = jnp.where(expected < _NEVER, weight, 0.0)
    return replace(
        controller,
        decode_time=jnp.where(alone, decode_time, controller.decode_time),
        chunk_time=jnp.where(timed & ~alone & any_known, chunk_time, before),
        decode_rows=controller.decode_rows + weight * (decodes - controller.decode_rows),
        chunk_rows=controller.chunk_rows + weight * (chunks - controller.chunk_rows),
        foreseen=controller.foreseen + compared * (expected * decodes - controller.foreseen),
        measured=controller.measured + compared * (time * decodes - controller.measured),
    )


def _mean_time(controller: Controller, rows: jax.Array) -> jax.Array:
    """How long steps take on average while `rows` requests run, with the chunks that as many of them bring."""
    share = controller.chunk_rows / jnp.maximum(controller.decode_rows, 1.0)
    return _filled(controller.decode_time)[_notch(rows)] + controller.chunk_time * share * _float(rows)


def _learn_rates(controller: Controller, header: Header) -> Controller:
    passed = _float(jnp.maximum(header.now - controller.last, 0)) / 1e3
    kept = jnp.exp(-passed / RATE_SECONDS)
    return replace(
        controller,
        arrivals=controller.arrivals * kept + _float(header.arrived) / RATE_SECONDS,
        finishes=controller.finishes * kept,
        last=header.now,
    )


def _notch(rows: jax.Array) -> jax.Array:
    """The least m for which 2**m covers so many rows, one at least."""
    return 32 - jax.lax.clz(rows - 1)


def _filled(times: jax.Array) -> jax.Array:
    """`times` [M] with guesses where nothing is known: from fewer rows, or else from more."""
    known = [times[i] for i in range(times.shape[0])]
    for i in range(len(known) - 2, -1, -1):
        known[i] = jnp.where(known[i] > 0, known[i], known[i + 1] / _DOWNWARDS)
    for i in range(1, len(known)):
        known[i] = jnp.where(times[i] > 0, times[i], jnp.maximum(known[i], known[i - 1] * _UPWARDS))
    first = jnp.where(1 << jnp.arange(len(known)) <= _FIRST_LIMIT, 0.0, _NEVER)
    return jnp.where(jnp.any(times > 0), jnp.stack(known), first)


def _least(targets: jax.Array, state: EngineState) -> jax.Array:
    """The tightest of `targets` [NUM_CLASSES] among the classes of requests there are; _NEVER where none has one."""
    target = targets[_class(state)]
    counts = (state.slots.phase != Phase.FREE) & (target > 0)
    return jnp.min(jnp.where(counts, _float(target), _NEVER))


def _class(state: EngineState) -> jax.Array:
    return jnp.clip(state.slots.priority, 0, state.header.slo_ttft.shape[0] - 1)


def _first_token_in_danger(state: EngineState, controller: Controller) -> jax.Array:
    """Whether a request has waited for half its target for the first token, or the next to come is bound to."""
    slots, header = state.slots, state.header
    target = header.slo_ttft[_class(state)]
    first = (slots.phase != Phase.FREE) & (slots.length == slots.prompt_len) & (target > 0)
    late = jnp.any(first & (2 * (header.now - slots.submitted) > target))
    waiting = _float(jnp.sum(slots.phase == Phase.WAITING, dtype=jnp.int32) + header.queued)
    seconds = _least(header.slo_ttft, state) / 1e3
    ahead = waiting + jnp.maximum(controller.arrivals - controller.finishes, 0.0) * seconds
    return late | ((waiting > 0) & (seconds < _NEVER / 1e3) & (ahead > controller.finishes * seconds))


def _float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
