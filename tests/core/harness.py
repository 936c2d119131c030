"""A host without a model: drives `begin` and `commit`, and checks each step against plain numpy.

`Host` reads every outbox one step late where asked to, as the engine does, and reuses a slot only after it has read
that its request ended. It keeps a shadow of what each slot must hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from checks import check_batch, check_outbox, check_plan, check_state

from jbatch.config import Bucket, EngineConfig
from jbatch.controls import Controls
from jbatch.core.inbox import InboxBuilder, Measured, Placement
from jbatch.core.model import Batch
from jbatch.core.outbox import OutboxView
from jbatch.core.state import NO_PROGRAM, BatchPlan, EngineState, Finish, KVPages, Phase, SlotTable, init_state
from jbatch.core.step import begin, commit, make_batch
from jbatch.request import Request, SamplingParams


class Trace(NamedTuple):
    """One step, taken apart; all numpy."""

    before: SlotTable
    middle: SlotTable
    plan: BatchPlan
    batch: Batch
    after: EngineState
    outbox: OutboxView
    tokens: np.ndarray
    cancelled: list[int]  # slots whose requests the inbox ended


@dataclass
class Shadow:
    """What a slot's request must look like."""

    id: int
    prompt: tuple[int, ...]
    limit: int
    priority: int
    stops: frozenset[int]
    salt: bytes
    submitted: float = 0.0
    due: float = 0.0
    tenant: int = 0
    program: int = NO_PROGRAM
    pin: float = 0.0
    preempted: bool = False
    sampled: list[int] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.sampled]

    def written(self, position: int) -> tuple[bytes, int]:
        """Tells the keys and values at a position from all others."""
        return self.salt, hash(tuple(self.known[: position + 1]))

    def key(self, controls: Controls, now: float, running: bool) -> tuple[float, ...] | None:
        """Its place among others, lower first; None where that takes more than a request tells."""
        period = round(self.submitted * 1e3) // round(controls.aging * 1e3)
        late = not running and round(self.due * 1e3) <= round(now * 1e3)
        ranks = {
            "fcfs": (0, 0),
            "priority": (self.priority + period, 0),
            "edf": (int(late), round(self.due * 1e3)),
            "shortest": (period, self.limit),
        }
        if controls.policy not in ranks:
            return None
        level, score = ranks[controls.policy]
        return level, 0 if running else 1 if self.preempted else 2, 0 if running else score, self.id


@cache
def compiled_step(config: EngineConfig, bucket: Bucket) -> Any:
    """begin, make_batch and commit of one bucket in one program, with what lies between them."""

    def run(state: EngineState, inbox: jax.Array, token: jax.Array) -> tuple[Any, ...]:
        middle, plan = begin(state, inbox, config=config, bucket=bucket)
        batch = make_batch(middle.slots, plan, config)
        logprob = -jnp.arange(token.shape[0], dtype=jnp.float32)
        return middle.slots, plan, batch, *commit(middle, plan, token, logprob, config=config)

    return jax.jit(run)


class Host:
    """Submits, cancels, steps; every step is checked."""

    def __init__(
        self, config: EngineConfig, lag: int = 0, controls: Controls | None = None, tick: float = 0.05
    ) -> None:
        self.config = config
        self.lag = lag
        self.controls = controls or Controls()
        self.tick = tick  # seconds between steps
        self.now = 1000.0
        self.measured = Measured()  # told with the next inbox
        self.state = jax.tree.map(np.asarray, init_state(config, KVPages(k=(), v=())))
        self.live: dict[int, Shadow] = {}  # by slot: what the device holds
        self.queue: list[Shadow] = []
        self.seen_free = set(range(config.max_slots))  # slots the host knows to be free
        self.unread: deque[list[int]] = deque()  # slots that each unread step freed
        self.cancels: list[int] = []
        self.finished: dict[int, tuple[list[int], Finish]] = {}
        self.cancelled: set[int] = set()
        self.preemptions = 0
        self.content: dict[tuple[int, int], tuple[bytes, int]] = {}  # what was written to (page, offset)
        self.num_ids = 0
        self.num_steps = 0

    # ---- what a user does ----

    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        priority: int = 0,
        stops: frozenset[int] = frozenset(),
        salt: bytes | None = None,
        deadline: float = 60.0,
        **others: Any,
    ) -> int:
        """Queues a request; it shares pages with those of the same salt, with none by default.

        `others` are the tenant, the program, and the seconds to pin its pages for.
        """
        self.num_ids += 1
        limit = min(len(prompt) + max_tokens, self.config.max_request_len)
        salt = salt or self.num_ids.to_bytes(8, "big")
        times = {"submitted": self.now, "due": self.now + deadline}
        self.queue.append(Shadow(self.num_ids, prompt, limit, priority, stops, salt, **times, **others))
        return self.num_ids

    def cancel(self, slot: int) -> None:
        """Asks to end whatever the slot holds; the next step does it."""
        self.cancels.append(slot)

    def slot_of(self, id_: int) -> int:
        return next(slot for slot, shadow in self.live.items() if shadow.id == id_)

    @property
    def busy(self) -> bool:
        return bool(self.live or self.queue)

    # ---- a step ----

    def step(self, bucket: Bucket | None = None, seed: int = 0) -> Trace:
        """One step with tokens of a random generator; checks all that must hold."""
        bucket = bucket or self.config.largest_bucket
        cancelled = self._cancel_now()
        inbox = self._fill_inbox()
        self.cancels = []
        before = self.state.slots
        rows = bucket.decode + bucket.chunks
        tokens = np.random.default_rng(seed).integers(0, 12, rows).astype(np.int32)
        out = jax.device_get(compiled_step(self.config, bucket)(self.state, inbox.buffer, tokens))
        middle, plan, batch, self.state, packed = out
        trace = Trace(before, middle, plan, batch, self.state, OutboxView(packed), tokens, cancelled)
        self.num_steps += 1
        self.now = round(self.now + self.tick, 3)
        check_plan(self, trace, bucket)
        check_batch(self, trace)
        self._settle(trace)
        check_state(self)
        check_outbox(self, trace)
        return trace

    def run_until_idle(self, seed: int = 0) -> int:
        """Steps with the largest bucket and no more arrivals; fails if that takes longer than it may."""
        bound = steps_to_finish(self)
        taken = 0
        while self.busy:
            self.step(seed=seed + taken)
            taken += 1
            assert taken <= bound, f"requests are left after {bound} steps: {self.live}, {self.queue}"
        return taken

    def _cancel_now(self) -> list[int]:
        """Slots whose requests the cancellations end; the others are free on the device already."""
        hit = sorted(set(self.cancels) & set(self.live))
        self.cancelled.update(self.live.pop(slot).id for slot in hit)
        return hit

    def _fill_inbox(self) -> InboxBuilder:
        places = min(len(self.seen_free - set(self.cancels)), self.config.max_admissions)
        queued = max(len(self.queue) - places, 0)
        inbox = InboxBuilder(self.config, self.controls, self.now, self.measured._replace(queued=queued))
        for slot in self.cancels:
            inbox.cancel(slot, 0)
        self.queue.sort(key=lambda shadow: (shadow.key(self.controls, self.now, False) or (0,), shadow.id))
        # A slot may have been cancelled without having been seen free; it must not be reused in the same step.
        places = sorted(self.seen_free - set(self.cancels))
        while self.queue and places and not inbox.full:
            shadow, slot = self.queue.pop(0), places.pop(0)
            self.seen_free.remove(slot)
            self.live[slot] = shadow
            sampling = SamplingParams(max_tokens=shadow.limit - len(shadow.prompt), temperature=0.5)
            request = Request(shadow.prompt, sampling, shadow.priority)
            names = ("limit", "salt", "submitted", "due", "tenant", "program", "pin")
            stops, given = tuple(shadow.stops), {name: getattr(shadow, name) for name in names}
            inbox.admit(request, Placement(slot, arrival=shadow.id, seed=shadow.id, stop_tokens=stops, **given))
        return inbox

    def _settle(self, trace: Trace) -> None:
        """Applies the step to the shadows, as the docstrings tell it."""
        freed = list(trace.cancelled)
        for slot, shadow in self.live.items():
            ran = trace.before.phase[slot] == Phase.RUNNING and trace.before.arrival[slot] == shadow.id
            shadow.preempted |= bool(ran and trace.middle.phase[slot] == Phase.WAITING)
        for slot, shadow in list(self.live.items()):
            row = trace.plan.sample_row[slot]
            if row < 0:
                continue
            token = int(trace.tokens[row])
            shadow.sampled.append(token)
            stop, full = token in shadow.stops, len(shadow.known) >= shadow.limit
            if stop or full:
                self.finished[shadow.id] = (shadow.sampled, Finish.STOP if stop else Finish.LENGTH)
                del self.live[slot]
                freed.append(slot)
        self.unread.append(freed)
        while len(self.unread) > self.lag:
            self.seen_free.update(self.unread.popleft())
        self.preemptions += int(trace.plan.preempted)


def steps_to_finish(host: Host) -> int:
    """Steps after which every request must have ended, if none arrives and every step has the largest bucket.

    Whoever has most to lose keeps its pages, so each step brings some request on by a bucket's chunks, or by a token.
    Once per request a step may pass until the host reads that a slot is free, and some until a batch is collected. What
    the preempted compute again is allowed for by counting all of it twice.
    """
    per_step = host.config.largest_bucket.chunks * host.config.chunk_size
    collecting = 2 + round(host.controls.batch_delay / host.tick)
    requests = [*host.live.values(), *host.queue]
    steps = sum(-(-shadow.limit // per_step) + shadow.limit - len(shadow.known) for shadow in requests)
    return 2 * steps + len(requests) * (1 + host.lag + collecting)
