"""The controller against a simulated device whose step times are known."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest
from harness import Host

from jbatch.config import EngineConfig
from jbatch.controls import Controls
from jbatch.core.inbox import Measured
from jbatch.core.state import Phase, Wait

CONFIG = EngineConfig(
    max_model_len=96, max_running=32, max_slots=48, num_pages=900, page_size=4, chunk_size=8, max_chunks=8
)


class Device:
    """A host whose steps take 5 ms, 1 ms for each decode row of the engine's bucket, and 4 ms a chunk row.

    Its requests generate from half to one and a half times as many tokens as `output`.
    """

    def __init__(
        self, controls: Controls, clients: int, output: int = 40, priority: int = 0, row_ms: float = 1.0
    ) -> None:
        self.host = Host(CONFIG, controls=controls, tick=0.0)
        self.clients, self.output, self.priority, self.row_ms = clients, output, priority, row_ms
        self.begun: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.tpot: list[float] = []
        self.ttft: list[float] = []

    def step(self) -> Measured:
        """Keeps so many requests under way, and times their tokens."""
        host = self.host
        for _ in range(self.clients - len(host.live) - len(host.queue)):
            length = self.output // 2 + len(self.begun) * 17 % (self.output + 1)
            self.begun[host.submit(tuple(range(100, 130)), length, self.priority)] = host.now
        trace = host.step(seed=host.num_steps)
        decodes, chunks = np.count_nonzero(trace.plan.decode_slot >= 0), np.count_nonzero(trace.plan.chunk_slot >= 0)
        fitting = [b.decode for b in CONFIG.buckets if b.decode >= decodes and (b.chunks > 0) == (chunks > 0)]
        rows = min(fitting) if decodes else 0
        host.measured = Measured(1e-3 * (5 + self.row_ms * rows + 4 * int(chunks)), int(decodes), int(chunks))
        host.now = round(host.now + host.measured.seconds, 3)
        for slot in trace.outbox.news().tolist():
            self._token(int(trace.middle.arrival[slot]))
        return host.measured

    def _token(self, id_: int) -> None:
        now = self.host.now
        if id_ not in self.first:
            self.first[id_] = now
            self.ttft.append(now - self.begun[id_])
        elif id_ in self.host.finished:
            self.tpot.append((now - self.first[id_]) / (len(self.host.finished[id_][0]) - 1))

    def running(self) -> int:
        return int(np.count_nonzero(self.host.state.slots.phase == Phase.RUNNING))


@pytest.mark.parametrize(("target", "least", "most"), [(30.0, 13, 16), (50.0, 13, 16), (56.0, 32, 32)])
def test_as_many_run_as_the_target_allows(target: float, least: int, most: int) -> None:
    """16 rows take 21 ms and prompts add 6.4 ms in the long run; 32 take 37 ms and 12.8."""
    device = Device(Controls(slo_tpot=(target,)), clients=40)
    for _ in range(400):
        device.step()
    limit = int(device.host.state.controller.running)
    assert least <= limit <= most
    assert mean(device.tpot[-100:]) * 1e3 <= target
    if limit < 32:
        waits = device.host.state.slots.wait_reason[device.host.state.slots.phase == Phase.WAITING]
        assert Wait.SLO in waits.tolist()


@pytest.mark.parametrize("limit", [4, 8, 16])
def test_a_limit_that_keeps_the_target_is_found(limit: int) -> None:
    """A tenth above what so many take leaves room for the margin, not for a wrong estimate."""
    fixed = Device(Controls(running_limit=limit), clients=40)
    for _ in range(500):
        fixed.step()
    took = mean(fixed.tpot[-2 * limit :]) * 1e3
    device = Device(Controls(slo_tpot=(1.1 * took,)), clients=40)
    for _ in range(500):
        device.step()
    assert int(device.host.state.controller.running) == limit
    assert mean(device.tpot[-2 * limit :]) * 1e3 <= 1.1 * took


@pytest.mark.parametrize("outlier", [0.5, 5.0])
def test_a_slow_step_lowers_the_limit_only_for_a_while(outlier: float) -> None:
    device = Device(Controls(slo_tpot=(55.0,)), clients=40, output=12)
    for _ in range(150):
        device.step()
    before = int(device.host.state.controller.running)
    while device.step().chunks:
        pass
    device.host.measured = device.host.measured._replace(seconds=outlier)
    for _ in range(300):
        device.step()
    assert int(device.host.state.controller.running) >= before - 2


def test_more_are_tried_where_it_costs_little() -> None:
    """A step takes as long for 32 rows as for one."""
    device = Device(Controls(slo_tpot=(40.0,)), clients=40, row_ms=0.1)
    for _ in range(200):
        device.step()
    assert int(device.host.state.controller.running) == 32


def test_without_a_target_nothing_is_limited() -> None:
    device = Device(Controls(), clients=40)
    for _ in range(60):
        device.step()
    running = []
    for _ in range(20):
        device.step()
        running.append(device.running())
    assert max(running) == int(device.host.state.controller.running) == 32
    assert int(device.host.state.controller.chunks) == CONFIG.max_chunks


def test_an_impossible_target_leaves_one_running() -> None:
    device = Device(Controls(slo_tpot=(1.0,)), clients=10)
    for _ in range(300):
        device.step()
    assert int(device.host.state.controller.running) == 1
    assert len(device.host.finished) > 2


def test_no_step_takes_more_than_three_times_the_target_for_prompts() -> None:
    device = Device(Controls(slo_tpot=(10.5,)), clients=4)
    for _ in range(60):
        device.step()
    assert max(device.step().seconds for _ in range(100)) <= 3 * 10.5e-3


def test_prompts_get_all_rows_while_first_tokens_are_late() -> None:
    calm, hasty = (Device(Controls(slo_tpot=(10.5,), slo_ttft=ttft), clients=16) for ttft in ((), (30.0,)))
    for device in (calm, hasty):
        for _ in range(100):
            device.step()
    assert int(calm.host.state.controller.chunks) < CONFIG.max_chunks
    assert int(hasty.host.state.controller.chunks) == CONFIG.max_chunks


def test_the_tightest_target_of_those_present_counts() -> None:
    controls = Controls(slo_tpot=(24.0, 90.0))
    strict, loose = Device(controls, clients=40), Device(controls, clients=40, priority=1)
    for device in (strict, loose):
        for _ in range(200):
            device.step()
    assert int(strict.host.state.controller.running) <= 16
    assert int(loose.host.state.controller.running) == 32


def test_expected_outputs_keep_preemption_rare() -> None:
    """Where outputs are long, fewer enter once their length has been learned."""
    config = EngineConfig(
        max_model_len=96, max_running=16, max_slots=24, num_pages=120, page_size=4, chunk_size=8, max_chunks=8
    )
    host = Host(config)
    preempted = []
    for _ in range(6):
        before = host.preemptions, len(host.finished)
        for _ in range(100):
            for _ in range(20 - len(host.live) - len(host.queue)):
                host.submit(tuple(range(100, 108)), 60)
            host.step(seed=host.num_steps)
        preempted.append((host.preemptions - before[0]) / (len(host.finished) - before[1] or 1))
    assert host.state.controller.output_tokens == pytest.approx(60, abs=1)
    assert preempted[-1] < preempted[0] / 3 or preempted[-1] < 0.05, preempted
