"""The device's side of the engine: state, compiled steps, and the steps whose results are still under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jbatch.config import Bucket, EngineConfig
from jbatch.core.inbox import InboxBuilder, Measured, inbox_size
from jbatch.core.model import Model
from jbatch.core.outbox import OutboxView
from jbatch.core.state import EngineState, Phase, Wait, init_state
from jbatch.core.step import step
from jbatch.programs import Program, Programs
from jbatch.recording import Recorder
from jbatch.telemetry import Snapshot


@dataclass(frozen=True)
class _InFlight:
    """A dispatched step that the host has not read."""

    outbox: jax.Array
    bucket: Bucket
    inbox: InboxBuilder
    sent: float


class Stepper:
    """Dispatches steps and reads them in order, for one thread. `telemetry` may be read from any."""

    def __init__(
        self, model: Model, config: EngineConfig, report: Callable[[str], None], recorder: Recorder | None = None
    ) -> None:
        self._params = model.params
        self._config = config
        self._recorder = recorder
        self._state = init_state(config, model.init_kv(config.num_pages, config.page_size))
        self._in_flight: deque[_InFlight] = deque()
        self._last = OutboxView.idle(config)
        self._host_seconds = 0.0
        self._wait_seconds = 0.0
        self._read_at = 0.0
        self._measured = Measured()
        self.programs = Programs(config, step_compiler(model, self._state, config), report)
        pages = config.num_pages - 1
        self.telemetry = Snapshot(
            pages_total=pages,
            pages_free=pages,
            running_limit=self._last.counter("running_limit"),
            chunk_limit=self._last.counter("chunk_limit"),
        )

    @property
    def in_flight(self) -> int:
        """Steps dispatched and not read."""
        return len(self._in_flight)

    def dispatch(self, inbox: InboxBuilder) -> None:
        """Sends a step to the device; returns at once."""
        begun = time.perf_counter()
        bucket, program = self.programs.choose(self._demand(inbox))
        self._state, outbox = program(self._params, self._state, jax.device_put(inbox.buffer))
        self._in_flight.append(_InFlight(outbox, bucket, inbox, begun))
        self._measured = Measured()
        if self._recorder:
            self._recorder.dispatched(bucket, inbox.buffer)
        self._host_seconds += time.perf_counter() - begun

    def read(self) -> tuple[OutboxView, InboxBuilder]:
        """Waits for the oldest step under way; returns its outbox and the inbox it was given."""
        begun = time.perf_counter()
        oldest = self._in_flight.popleft()
        buffer = np.asarray(oldest.outbox)
        self._last = OutboxView(buffer)
        now = time.perf_counter()
        self._wait_seconds += now - begun
        # It began when it was sent, or when the one before it had ended.
        seconds, self._read_at = now - max(self._read_at, oldest.sent), now
        self._measured = Measured(seconds, self._last.counter("decode_tokens"), self._last.counter("chunk_rows"))
        if self._recorder:
            self._recorder.read(buffer)
        self._account(oldest.bucket)
        return self._last, oldest.inbox

    @property
    def measured(self) -> Measured:
        """What the step read last took, until it has been told with an inbox."""
        return self._measured

    @property
    def idle(self) -> bool:
        """Whether all that are on the device wait, and the next step would let none of them in."""
        entering = any(flight.inbox.admitted_chunks for flight in self._in_flight)
        return not entering and self._last.counter("next_decodes") + self._last.counter("next_prefills") == 0

    def surely_ends(self, left: np.ndarray) -> bool:
        """Whether the step under way ends every request; `left` [M] is how many tokens each may still generate."""
        if len(self._in_flight) != 1 or self._in_flight[0].inbox.admitted_chunks:
            return False
        decodes = self._last.counter("next_decodes")
        return decodes == len(left) and decodes <= self._in_flight[0].bucket.decode and bool(np.all(left == 1))

    def _demand(self, inbox: InboxBuilder) -> Bucket:
        """Rows wanted: what the last outbox foresaw, less what steps under way do of it, plus what has come since.

        An estimate, one step stale; the step itself obeys whatever bucket it gets.
        """
        places = self._last.counter("next_places")
        decodes = self._last.counter("next_decodes") + self._last.counter("next_prefills")
        decodes = max(decodes, self._last.counter("next_rows"))
        chunks = self._last.counter("next_chunks")
        for each, done in [(flight.inbox, flight.bucket.chunks) for flight in self._in_flight] + [(inbox, 0)]:
            entering = each.admitted_chunks[:places]
            places -= len(entering)
            decodes += len(entering)
            chunks = max(chunks + sum(entering) - done, 0)
        # Rounded down to a power of two, so that chunk rows are full: the rest follows in the next step, which costs
        # less than rows of padding.
        chunks = min(chunks, self._last.counter("chunk_limit"))
        return Bucket(min(decodes, self._config.max_running), 1 << chunks.bit_length() >> 1)

    def _account(self, bucket: Bucket) -> None:
        last, total, took = self._last, self.telemetry, self._measured
        if took.decodes or took.chunks:
            mean = total.step_seconds
            total = replace(total, step_seconds=mean + (took.seconds - mean) / 16 if mean else took.seconds)
        phase = last.column("phase")
        reasons = np.bincount(last.column("wait_reason")[phase != Phase.FREE], minlength=len(Wait))
        self.telemetry = replace(
            total,
            running=int(np.count_nonzero(phase == Phase.RUNNING)),
            waiting=int(np.count_nonzero(phase == Phase.WAITING)),
            stalled_by_reason={reason.name.lower(): int(reasons[reason]) for reason in Wait if reason},
            pages_free=last.counter("free_pages"),
            pages_cached=last.counter("cached_pages"),
            steps=total.steps + 1,
            decode_tokens=total.decode_tokens + last.counter("decode_tokens"),
            prefill_tokens=total.prefill_tokens + last.counter("prefill_tokens"),
            computed_rows=total.computed_rows + self._config.rows(bucket),
            output_tokens=total.output_tokens + len(last.news()),
            finished=total.finished + int(np.count_nonzero(last.column("finish"))),
            preemptions=total.preemptions + last.counter("preempted"),
            prefix_queries=total.prefix_queries + last.counter("prefix_queries"),
            prefix_hits=total.prefix_hits + last.counter("prefix_hits"),
            recomputed_tokens=total.recomputed_tokens + last.counter("recomputed_tokens"),
            pages_pinned=last.counter("pinned_pages"),
            running_limit=last.counter("running_limit"),
            chunk_limit=last.counter("chunk_limit"),
            host_seconds=self._host_seconds,
            wait_seconds=self._wait_seconds,
        )


def step_compiler(model: Model, state: EngineState, config: EngineConfig) -> Callable[[Bucket], Program]:
    """A function that compiles the step of a bucket; it holds shapes only, so the state may be donated meanwhile."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (model.params, state))
    inbox = jax.ShapeDtypeStruct((inbox_size(config),), jnp.int32)

    def compile_bucket(bucket: Bucket) -> Program:
        run = partial(step, forward=model.forward, config=config, bucket=bucket)
        return jax.jit(run, donate_argnums=1).lower(*shapes, inbox).compile()

    return compile_bucket
