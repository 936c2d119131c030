"""What each policy promises, on a host without a model. The harness moreover checks the order of every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from harness import Host, Trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jbatch.config import EngineConfig
from jbatch.controls import POLICIES, Controls, Policy
from jbatch.core.accounts import OUTPUT_WEIGHT
from jbatch.core.state import Phase, Wait

SIZES = {
    "max_model_len": 48,
    "max_running": 3,
    "max_slots": 12,
    "num_pages": 60,
    "page_size": 4,
    "chunk_size": 8,
    "max_chunks": 2,
    "max_admissions": 4,
}


def make_host(policy: Policy, aging: float = 10.0, tick: float = 0.05, **changes: int) -> Host:
    return Host(EngineConfig(**{**SIZES, **changes}), controls=Controls(policy=policy, aging=aging), tick=tick)


def prompt(length: int, first: int = 100) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def entered(host: Host, trace: Trace) -> list[int]:
    """Ids of the requests that hold pages since this step."""
    middle, before = trace.middle, trace.before
    ran = (before.phase == Phase.RUNNING) & (before.arrival == middle.arrival)
    return middle.arrival[(middle.phase == Phase.RUNNING) & ~ran].tolist()


# ---- nobody starves ----

arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps until it comes
        st.integers(1, 30),  # its prompt
        st.integers(1, 10),  # its output
        st.integers(0, 2),  # its class
        st.integers(-1, 2),  # its program
    ),
    min_size=5,
    max_size=40,
)


@pytest.mark.parametrize("policy", ["priority", "fcfs", "shortest", "prefix", "program"])
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(arrivals=arrivals)
def test_nobody_is_overtaken_by_those_that_come_too_much_later(policy: Policy, arrivals: list[tuple[int, ...]]) -> None:
    """Within the aging periods that the policy states, whatever the load; `fcfs` allows for none at all."""
    aging = 0.4  # eight steps
    host = make_host(policy, aging)
    classes: dict[int, tuple[float, int]] = {}

    def step() -> None:
        came = set(entered(host, host.step(seed=host.num_steps)))
        waiting = [shadow.id for slot, shadow in host.live.items() if host.state.slots.phase[slot] == Phase.WAITING]
        for late in came - set(host.finished):
            for early in waiting:
                (late_at, late_class), (early_at, early_class) = classes[late], classes[early]
                periods = early_class - late_class if policy == "priority" else 0 if policy == "fcfs" else 1
                deferred = host.state.slots.wait_reason[host.slot_of(early)] == Wait.PREFIX
                assert deferred or late_at < early_at + max(periods, 0) * aging or late_at <= early_at

    for wait, length, output, class_, program in arrivals:
        for _ in range(wait):
            step()
        id_ = host.submit(prompt(length), output, class_, program=program, salt=b"everyone")
        classes[id_] = host.now, class_
    while host.busy:
        step()
    assert len(host.finished) == len(arrivals)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_preempted_return_before_new_ones(policy: Policy) -> None:
    """Two grow until one has to go; those that come meanwhile wait until it is back."""
    host = make_host(policy, num_pages=14, max_model_len=48)
    old = [
        host.submit(prompt(16), 30, deadline=20.0, program=0, salt=b"tenant a"),
        host.submit(prompt(15, 200), 30, deadline=30.0, program=0, salt=b"tenant b"),
    ]
    while not host.preemptions:
        host.step(seed=host.num_steps)
    lost = next(id_ for id_ in old if host.state.slots.phase[host.slot_of(id_)] == Phase.WAITING)
    young = [host.submit(prompt(2, 300 + i), 2, deadline=5.0, program=-1) for i in range(3)]
    while host.state.slots.phase[host.slot_of(lost)] == Phase.WAITING:
        trace = host.step(seed=host.num_steps)
        if host.state.slots.phase[host.slot_of(lost)] == Phase.WAITING:
            assert not set(entered(host, trace)) & set(young)
    host.run_until_idle()


# ---- edf ----


def test_the_earliest_deadline_enters_first_and_missed_ones_last() -> None:
    host = make_host("edf", max_running=1)
    host.submit(prompt(4), 8)
    host.step()
    missed, late, early = (host.submit(prompt(4), 2, deadline=deadline) for deadline in (0.06, 30.0, 9.0))
    for _ in range(3):
        host.step()
    assert host.state.slots.wait_reason[host.slot_of(missed)] == Wait.DEADLINE
    host.run_until_idle()
    assert list(host.finished)[1:] == [early, late, missed]


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.floats(0.1, 5.0)), min_size=3, max_size=30))
def test_no_later_deadline_enters_while_an_earlier_one_waits(requests: list[tuple[int, int, float]]) -> None:
    host = make_host("edf")
    due: dict[int, float] = {}
    for wait, length, deadline in requests:
        for _ in range(wait):
            _check_deadlines(host, due)
        due[host.submit(prompt(length), 6, deadline=round(deadline, 3))] = round(host.now + round(deadline, 3), 3)
    while host.busy:
        _check_deadlines(host, due)


def _check_deadlines(host: Host, due: dict[int, float]) -> None:
    now = host.now
    before = {shadow.id for shadow in host.live.values() if shadow.preempted}
    came = set(entered(host, host.step(seed=host.num_steps))) - before
    phase = host.state.slots.phase
    waiting = [shadow.id for slot, shadow in host.live.items() if phase[slot] == Phase.WAITING]
    in_time = [due[id_] for id_ in waiting if due[id_] > now]
    assert all(due[id_] <= min(in_time, default=1e9) or due[id_] <= now for id_ in came)


# ---- shortest, prefix, program ----


def test_the_shortest_goes_first() -> None:
    host = make_host("shortest", max_running=1)
    host.submit(prompt(4), 4)
    host.step()
    long, short, middle = (host.submit(prompt(length), output) for length, output in ((9, 9), (3, 2), (12, 2)))
    host.run_until_idle()
    assert list(host.finished)[1:] == [short, middle, long]


def test_those_with_most_of_their_prompt_cached_go_together() -> None:
    host = make_host("prefix", max_running=1, num_pages=100)
    system = prompt(24)
    host.submit((*system, 1), 2, salt=b"everyone")
    host.run_until_idle()
    host.submit(prompt(4, 400), 4)
    host.step()
    ids = [
        host.submit((*system, 9), 2, salt=b"everyone") if i % 2 else host.submit(prompt(20, 500), 2) for i in range(6)
    ]
    host.run_until_idle()
    assert list(host.finished)[2:] == ids[1::2] + ids[::2]


def test_the_program_served_least_goes_first() -> None:
    host = make_host("program", max_running=1)
    for _ in range(3):  # program 1 has had its share
        host.submit(prompt(20), 8, program=1)
    host.run_until_idle()
    host.submit(prompt(4), 6)
    host.step()
    heavy, light = (host.submit(prompt(4), 2, program=program) for program in (1, 2))
    lone = host.submit(prompt(4), 2)
    host.run_until_idle()
    assert list(host.finished)[4:] == [light, lone, heavy]


# ---- fair ----


class Tenants:
    """Tenants that always have requests waiting, and what each has been served."""

    def __init__(self, host: Host, sizes: dict[int, tuple[int, int]], backlog: int = 3) -> None:
        self.host, self.sizes, self.backlog = host, sizes, backlog
        self.owner: dict[int, int] = {}
        self.service: Counter[int] = Counter()

    def step(self) -> None:
        """Refills, steps, and counts prompt tokens computed for the first time and tokens generated."""
        waiting = Counter(shadow.tenant for shadow in [*self.host.queue, *self._waiting()])
        for tenant, (length, output) in self.sizes.items():
            for _ in range(self.backlog - waiting[tenant]):
                self.owner[self.host.submit(prompt(length), output, tenant=tenant)] = tenant
        before = self.host.state.slots.reached.copy(), self.host.state.slots.arrival.copy()
        trace = self.host.step(seed=self.host.num_steps)
        self._count(trace, *before)

    def _waiting(self) -> list[Any]:
        phase = self.host.state.slots.phase
        return [shadow for slot, shadow in self.host.live.items() if phase[slot] == Phase.WAITING]

    def _count(self, trace: Trace, reached: np.ndarray, arrival: np.ndarray) -> None:
        slots = trace.middle
        for slot in np.flatnonzero(trace.plan.advance):
            tenant = self.owner[int(slots.arrival[slot])]
            known = max(int(slots.computed[slot]), int(reached[slot]) if arrival[slot] == slots.arrival[slot] else 0)
            end = min(int(slots.computed[slot] + trace.plan.advance[slot]), int(slots.prompt_len[slot]))
            self.service[tenant] += max(end - known, 0) + OUTPUT_WEIGHT * int(trace.plan.sample_row[slot] >= 0)


@pytest.mark.parametrize(
    "sizes",
    [
        {0: (8, 8), 1: (8, 8)},
        {0: (40, 2), 1: (2, 30)},
        {0: (30, 4), 1: (4, 4), 2: (2, 40)},
    ],
    ids=["alike", "prompts against outputs", "three"],
)
@pytest.mark.parametrize("num_pages", [200, 16])
def test_the_service_of_backlogged_tenants_stays_close(sizes: dict[int, tuple[int, int]], num_pages: int) -> None:
    """Sheng et al. 2024, theorem 4.4: two that always wait are at most 2 max(prompt, weight * batch) apart."""
    host = make_host("fair", max_running=4, max_slots=20, num_pages=num_pages)
    tenants = Tenants(host, sizes)
    bound = 2 * max(SIZES["max_model_len"], OUTPUT_WEIGHT * 4 * SIZES["max_model_len"])
    gaps = []
    for _ in range(500):
        tenants.step()
        gaps.append(max(tenants.service[t] for t in sizes) - min(tenants.service[t] for t in sizes))
    assert sum(tenants.service.values()) > 4 * bound
    assert max(gaps) <= bound, max(gaps)
    assert host.preemptions < 2 * len(host.finished), "they take each other's places again and again"


def test_first_come_first_served_lets_one_tenant_take_more() -> None:
    """What `fair` is for: the same load without it."""
    host = make_host("fcfs", max_running=4, max_slots=20, num_pages=200)
    tenants = Tenants(host, {0: (40, 2), 1: (2, 30)})
    for _ in range(500):
        tenants.step()
    assert abs(tenants.service[0] - tenants.service[1]) > 2 * OUTPUT_WEIGHT * 4 * SIZES["max_model_len"]


def test_a_quiet_tenant_gets_a_place_at_once_and_only_one() -> None:
    host = make_host("fair", max_running=4, max_slots=12)
    flood = [host.submit(prompt(4), 30, tenant=0) for _ in range(8)]
    for _ in range(3):
        host.step()
    quiet = host.submit(prompt(4), 12, tenant=1)
    host.step()
    phase = host.state.slots.phase
    assert phase[host.slot_of(quiet)] == Phase.RUNNING
    assert sum(phase[host.slot_of(id_)] == Phase.RUNNING for id_ in flood) == 3
    assert host.preemptions == 1
    while quiet not in host.finished:
        host.step(seed=host.num_steps)
    assert host.preemptions == 1, "the flood took the place back"
    host.run_until_idle()


def test_who_asks_for_nothing_saves_up_nothing() -> None:
    host = make_host("fair", max_running=2, max_slots=20)
    tenants = Tenants(host, {0: (8, 8)})
    for _ in range(100):
        tenants.step()
    tenants.sizes[1] = (8, 8)
    before = tenants.service[0]
    for _ in range(100):
        tenants.step()
    assert tenants.service[0] - before > tenants.service[1] / 2


# ---- all of them ----


@pytest.mark.parametrize("policy", POLICIES)
def test_the_clock_may_wrap_around(policy: Policy) -> None:
    """Milliseconds as int32: after 24.8 days they turn negative."""
    orders = []
    for now in (1000.0, 2**31 / 1e3 - 1.0):
        host = make_host(policy, aging=0.4, max_running=2, num_pages=24)
        host.now = round(now // 0.4 * 0.4, 3)
        for i in range(30):
            host.submit(prompt(3 + 7 * i % 20), 3 + i % 5, i % 3, deadline=0.5 + i % 4, tenant=i % 2, program=i % 3)
            host.step(seed=i)
        host.run_until_idle()
        orders.append(list(host.finished))
    assert orders[0] == orders[1]


def test_a_policy_may_change_while_requests_wait() -> None:
    host = make_host("fcfs", max_running=1)
    host.submit(prompt(4), 6)
    host.step()
    long, short = host.submit(prompt(20), 9), host.submit(prompt(2), 2)
    host.step()
    host.controls = Controls(policy="shortest")
    host.run_until_idle()
    assert list(host.finished)[1:] == [short, long]
