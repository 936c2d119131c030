"""Policies, ways of batching and targets on a running engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from engines import Gate, Recorder, endless, mixed_requests, serving, sizes

from jbatch.config import UserError
from jbatch.controls import BATCHINGS, POLICIES, Controls
from jbatch.engine import Engine
from jbatch.request import Completion, DeadlineError, Request, RequestError, SamplingParams

REQUESTS = [
    replace(request, tenant=f"tenant {i % 3}", program=f"program {i % 5}", deadline=30.0 + i, pin_seconds=i % 2)
    for i, request in enumerate(mixed_requests(48))
]


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    """What each request gives when nothing else runs and nothing is cached."""
    with serving(sizes(prefix_caching=False)) as engine:
        return [engine.generate([request])[0] for request in REQUESTS]


@pytest.fixture(scope="module")
def scarce() -> Iterator[Engine]:
    """Pages for a few requests at a time."""
    with serving(sizes(num_pages=20)) as engine:
        yield engine


@pytest.mark.parametrize(
    "controls",
    [
        *(Controls(policy=policy) for policy in POLICIES),
        *(Controls(batching=batching, batch_delay=0.01, batch_threshold=20) for batching in BATCHINGS[1:]),
        Controls(slo_tpot=(1.0,), slo_ttft=(1.0,)),
        Controls(running_limit=3),
    ],
    ids=str,
)
def test_controls_change_no_tokens(controls: Controls, scarce: Engine, alone: list[Completion]) -> None:
    scarce.set_controls(controls)
    try:
        got = scarce.generate(REQUESTS)
    finally:
        scarce.set_controls(Controls())
    for mine, theirs in zip(got, alone, strict=True):
        assert (mine.tokens, mine.finish_reason) == (theirs.tokens, theirs.finish_reason)
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


def test_that_was_with_a_lack_of_pages(scarce: Engine) -> None:
    """Runs after the tests above; says nothing where they were deselected."""
    seen = scarce.snapshot()
    if seen.finished > 500:
        assert seen.preemptions > 0 and seen.prefix_hits > 0


def order_of_first_tokens(engine: Engine, requests: list[Request], controls: Controls) -> list[int]:
    """Which request gets its first token when, all sent while one other runs alone."""
    heard = Recorder()
    gate = Gate()
    first = engine.submit(endless(6), gate)
    gate.wait()
    ids = [engine.submit(request, heard) for request in requests]
    engine.set_controls(controls)
    gate.open()
    gate.wait_for([first])
    heard.wait_for(ids)
    engine.set_controls(Controls())
    return [ids.index(id_) for id_ in heard.outputs]


@pytest.mark.parametrize(
    ("controls", "expected"),
    [
        (Controls(policy="fcfs", running_limit=1), [0, 1, 2, 3]),
        (Controls(policy="priority", running_limit=1), [3, 0, 1, 2]),
        (Controls(policy="edf", running_limit=1), [2, 1, 3, 0]),
        (Controls(policy="shortest", running_limit=1), [1, 3, 2, 0]),
    ],
    ids=lambda value: value.policy if isinstance(value, Controls) else "",
)
def test_a_policy_put_in_force_orders_those_that_wait(controls: Controls, expected: list[int]) -> None:
    def ask(tokens: int, deadline: float, priority: int) -> Request:
        return replace(endless(tokens, tuple(range(30, 40 + tokens))), deadline=deadline, priority=priority)

    requests = [ask(20, 50.0, 1), ask(4, 20.0, 1), ask(9, 10.0, 1), ask(6, 40.0, 0)]
    with serving(sizes(prefix_caching=False)) as engine:
        assert order_of_first_tokens(engine, requests, controls) == expected


def test_a_deadline_that_would_be_missed_is_refused_at_once(scarce: Engine) -> None:
    """Where the device is busy: one that idles may be as quick as ever."""
    scarce.generate([endless(40)])
    urgent = replace(endless(40), deadline=1e-3)
    heard, gate = Recorder(), Gate()
    heard.wait_for([scarce.submit(urgent, heard)])  # no other policy looks at it
    scarce.set_controls(Controls(policy="edf"))
    heard.wait_for([scarce.submit(urgent, heard)])
    scarce.submit(endless(60), gate)
    gate.wait()
    try:
        with pytest.raises(DeadlineError, match=r"would take some \d+\.\d s and is due in 0\.0 s") as refused:
            scarce.submit(urgent, print)
        assert 0 < refused.value.wait < 60
        gate.open()
        scarce.generate([replace(endless(40), deadline=60.0)])
    finally:
        scarce.set_controls(Controls())


def test_tenants_share_no_pages(scarce: Engine) -> None:
    prompt = tuple(range(40, 57))
    before = scarce.snapshot().prefix_hits

    def hits(**owner: str) -> int:
        nonlocal before
        scarce.generate([Request(prompt, SamplingParams(max_tokens=1), **owner)])
        now = scarce.snapshot().prefix_hits
        before, found = now, now - before
        return found

    assert hits(tenant="one") == 0
    assert hits(tenant="two") == 0
    assert hits(tenant="on", cache_salt="e") == 0
    assert hits(tenant="one") == 16


def test_cached_tokens_are_told(scarce: Engine) -> None:
    heard = Recorder()
    request = Request(tuple(range(100, 130)), SamplingParams(max_tokens=2, ignore_eos=True), tenant="told")
    for expected in (0, 24):
        id_ = scarce.submit(request, heard)
        heard.wait_for([id_])
        assert [output.cached_tokens for output in heard.outputs[id_]] == [expected] * 2


def test_a_limit_beyond_the_sizes_is_refused(scarce: Engine) -> None:
    with pytest.raises(UserError, match="at most max_running, 16"):
        scarce.set_controls(Controls(running_limit=17))
    with pytest.raises(UserError, match="at most max_running, 16"):
        Engine(scarce._model, scarce.config, controls=Controls(running_limit=17))
    assert scarce.controls == Controls()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"policy": "best"}, "policy is 'best': it must be one of priority, fcfs"),
        ({"batching": "none"}, "batching is 'none'"),
        ({"running_limit": -1}, "running_limit is -1"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"aging": 0.0}, "aging is 0.0"),
        ({"aging": float("nan")}, "aging is nan"),
        ({"batch_delay": -1.0}, "batch_delay"),
        ({"slo_tpot": (0.0,)}, "slo_tpot"),
        ({"slo_ttft": (1.0,) * 5}, "slo_ttft"),
        ({"pinned_share": 1.5}, "pinned_share"),
    ],
)
def test_controls_that_make_no_sense_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        Controls(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tenant": 3}, "tenant"),
        ({"program": "\ud800"}, "program"),
        ({"deadline": 0.0}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"pin_seconds": -1.0}, "pin_seconds"),
        ({"pin_seconds": 1e9}, "pin_seconds"),
    ],
)
def test_requests_that_make_no_sense_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as error:
        Request((1,), **fields)
    assert error.value.param == param


def test_a_dynamic_batch_goes_after_its_delay(scarce: Engine) -> None:
    scarce.set_controls(Controls(batching="dynamic", batch_size=16, batch_delay=0.3))
    try:
        begun = time.monotonic()
        scarce.generate([endless(1)] * 2)
        assert time.monotonic() - begun >= 0.3
    finally:
        scarce.set_controls(Controls())
