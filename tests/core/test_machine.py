"""A random host drives the step without a model; after each step the invariant of the design must hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from harness import Host
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from jbatch.config import EngineConfig
from jbatch.controls import BATCHINGS, POLICIES, Batching, Controls, Policy
from jbatch.core.inbox import Measured

SCARCE = EngineConfig(
    max_model_len=40,
    max_running=4,
    max_slots=6,
    num_pages=13,
    page_size=4,
    chunk_size=8,
    max_chunks=2,
    max_admissions=3,
)
"""Two long requests fill the pages."""

ROOMY = EngineConfig(
    max_model_len=30,
    max_running=3,
    max_slots=5,
    num_pages=40,
    page_size=2,
    chunk_size=4,
    max_chunks=1,
    max_admissions=2,
)
"""Pages for all: running places are what is short. Neither the length nor the places are powers of two."""

TOTALS: Counter[str] = Counter()
SETTINGS = settings(
    max_examples=25, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


class Machine(RuleBasedStateMachine):
    """Submits, cancels and steps at random; in the end everything must finish in time."""

    config = SCARCE

    @initialize(lag=st.integers(0, 1))
    def begin(self, lag: int) -> None:
        self.host = Host(self.config, lag)

    @rule(
        length=st.integers(1, 39),
        max_tokens=st.one_of(st.integers(1, 6), st.integers(1, 38)),
        priority=st.integers(-1, 1),
        stops=st.frozensets(st.integers(0, 14), max_size=3),
        first=st.one_of(st.just(0), st.integers(0, 11)),
        salt=st.sampled_from([b"tenant a", b"tenant b"]),
        others=st.fixed_dictionaries(
            {
                "tenant": st.integers(0, 2),
                "program": st.integers(-1, 2),
                "pin": st.sampled_from([0.0, 0.0, 1.0]),
                "deadline": st.sampled_from([0.2, 1.0, 60.0]),
            }
        ),
    )
    def submit(
        self,
        length: int,
        max_tokens: int,
        priority: int,
        stops: frozenset[int],
        first: int,
        salt: bytes,
        others: dict[str, float],
    ) -> None:
        length = min(length, self.config.max_request_len - 1)
        self.host.submit(tuple(first + i for i in range(length)), max_tokens, priority, stops, salt, **others)

    @rule(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=5), stop=st.integers(0, 11))
    def submit_many(self, lengths: list[int], stop: int) -> None:
        for length in lengths:
            self.host.submit(tuple(range(length)), 12, stops=frozenset({stop}), salt=b"tenant a")

    @rule(
        policy=st.sampled_from(POLICIES),
        batching=st.sampled_from(("continuous", "continuous", *BATCHINGS)),
        aging=st.sampled_from([0.5, 10.0]),
        tpot=st.sampled_from([(), (), (20.0,), (80.0, 20.0)]),
        seconds=st.sampled_from([0.0, 0.01, 0.03, 2.0]),
    )
    def steer(self, policy: Policy, batching: Batching, aging: float, tpot: tuple[float, ...], seconds: float) -> None:
        sizes = {"batch_size": 3, "batch_delay": 0.3, "batch_threshold": 2}
        self.host.controls = Controls(policy=policy, batching=batching, aging=aging, slo_tpot=tpot, **sizes)
        self.host.measured = Measured(seconds, decodes=2, chunks=len(tpot))

    @rule(nth=st.integers(0, 10))
    def cancel(self, nth: int) -> None:
        if live := sorted(self.host.live):
            self.host.cancel(live[nth % len(live)])

    @rule(slot=st.integers(0, 10))
    def cancel_any(self, slot: int) -> None:
        """Free slots included: the host may not know yet that a request has ended."""
        self.host.cancel(slot % self.config.max_slots)

    @rule(bucket=st.integers(0, 10), seed=st.integers(0, 1000))
    def step(self, bucket: int, seed: int) -> None:
        self.host.step(self.config.buckets[bucket % len(self.config.buckets)], seed)

    @rule(count=st.integers(2, 8), seed=st.integers(0, 1000))
    def largest_steps(self, count: int, seed: int) -> None:
        for i in range(count):
            self.host.step(seed=seed + i)

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.controls = replace(self.host.controls, slo_tpot=())  # a target may take as many steps as it likes
        self.host.run_until_idle()
        assert len(self.host.finished) + len(self.host.cancelled) == self.host.num_ids
        for finish in self.host.finished.values():
            TOTALS[finish[1].name] += 1
        TOTALS.update(steps=self.host.num_steps, preemptions=self.host.preemptions, cancelled=len(self.host.cancelled))


class RoomyMachine(Machine):
    config = ROOMY


class TestScarcePages(Machine.TestCase):
    settings = SETTINGS


class TestRoomyPages(RoomyMachine.TestCase):
    settings = SETTINGS


def test_thousands_of_steps_were_checked_and_everything_happened_often() -> None:
    """Runs after the machines above; says nothing where they were deselected."""
    if TOTALS:
        assert TOTALS["steps"] > 4000, TOTALS
        assert min(TOTALS[what] for what in ("preemptions", "cancelled", "STOP", "LENGTH")) > 40, TOTALS
