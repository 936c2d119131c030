"""When requests may enter, by the way of batching."""

from __future__ import annotations

import numpy as np
from harness import Host

from jbatch.config import EngineConfig
from jbatch.controls import Batching, Controls
from jbatch.core.state import Phase, Wait


def make_host(batching: Batching, max_admissions: int = 8, **changes: float) -> Host:
    sizes = {"max_running": 4, "max_slots": 12, "num_pages": 60, "page_size": 4, "chunk_size": 8, "max_chunks": 4}
    config = EngineConfig(max_model_len=48, max_admissions=max_admissions, **sizes)
    return Host(config, controls=Controls(batching=batching, **changes))


def running(host: Host) -> int:
    return int(np.count_nonzero(host.state.slots.phase == Phase.RUNNING))


def submit(host: Host, count: int, *max_tokens: int) -> list[int]:
    """Requests with outputs as long as given, in turns."""
    return [host.submit((100, 101, 102, 103 + i), max_tokens[i % len(max_tokens)]) for i in range(count)]


def sizes_of_batches(host: Host) -> list[int]:
    """How many ran together, each time after nothing did; fails where one enters a batch that runs."""
    sizes, before = [], 0
    while host.busy:
        trace = host.step(seed=host.num_steps)
        ran = int(np.count_nonzero(trace.middle.phase == Phase.RUNNING))
        assert ran <= before or before == 0, "one entered while others ran"
        if before == 0 and ran:
            sizes.append(ran)
        before = running(host)
    return sizes


def test_serial_runs_one_at_a_time_in_order() -> None:
    host = make_host("serial")
    ids = submit(host, 5, 6, 3)
    assert sizes_of_batches(host) == [1] * 5
    assert list(host.finished) == ids


def test_a_static_batch_runs_to_its_end() -> None:
    host = make_host("static")
    submit(host, 6, 9, 2)
    host.step()
    box = host.step().outbox
    assert (box.column("wait_reason") == Wait.BATCHING).sum() == 2
    assert box.counter("next_places") == 0
    assert sizes_of_batches(host)[-1] == 2
    assert len(host.finished) == 6


def test_a_batch_of_more_than_enter_in_a_step_goes_on_filling() -> None:
    host = make_host("static", max_admissions=2)
    submit(host, 9, 12)
    host.step()
    assert running(host) == 2
    host.step()
    assert running(host) == 4
    while host.finished.keys() != set(range(1, 10)):
        host.step(seed=host.num_steps)
        assert len(host.finished) % 4 == 0 or running(host) < 4


def test_a_batch_keeps_its_rows_to_its_end() -> None:
    host = make_host("static")
    submit(host, 4, 9, 2)
    host.step()
    rows = []
    while host.busy:
        rows.append(host.step(seed=0).outbox.counter("next_rows"))
    assert rows == [4] * (len(rows) - 1) + [0]


def test_a_dynamic_batch_waits_for_its_size() -> None:
    host = make_host("dynamic", batch_size=3, batch_delay=100.0)
    submit(host, 2, 5)
    for _ in range(10):
        box = host.step().outbox
    assert running(host) == 0
    assert set(box.column("wait_reason")) == {Wait.NONE, Wait.BATCHING}
    submit(host, 1, 5)
    host.step()
    assert running(host) == 3


def test_a_dynamic_batch_waits_no_longer_than_it_may() -> None:
    host = make_host("dynamic", batch_size=3, batch_delay=0.2)
    submit(host, 2, 5)
    for _ in range(4):  # 0.15 seconds
        host.step()
        assert running(host) == 0
    host.step()
    assert running(host) == 2


def test_threshold_runs_single_requests_until_many_wait() -> None:
    host = make_host("threshold", batch_threshold=3)
    submit(host, 3, 5)
    assert sizes_of_batches(host) == [1, 1, 1]
    submit(host, 6, 5)
    assert sizes_of_batches(host) == [4, 1, 1]


def test_threshold_may_fill_a_batch_one_by_one() -> None:
    host = make_host("threshold", batch_threshold=3, max_admissions=1)
    submit(host, 7, 12)
    for _ in range(6):
        host.step(seed=0)
    assert running(host) == 4
    host.run_until_idle()


def test_a_batch_waits_for_those_that_share_a_prefix() -> None:
    host = make_host("static")
    system = tuple(range(200, 224))
    for i in range(4):
        host.submit((*system, 300 + i), 12, salt=b"everyone")
    for _ in range(5):
        host.step()
    assert running(host) == 4


def test_a_lower_limit_lets_those_that_run_finish() -> None:
    host = make_host("continuous")
    submit(host, 8, 12)
    host.step()
    host.controls = Controls(running_limit=2)
    while len(host.finished) < 4:
        host.step(seed=host.num_steps)
        assert host.preemptions == 0
    host.step()
    assert running(host) == 2
    host.run_until_idle()
