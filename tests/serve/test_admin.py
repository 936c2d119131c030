"""Controls, read and changed over HTTP. What they refuse is in `test_errors`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from jbatch.controls import Controls

CONTROLS = "/admin/controls"


@pytest.fixture
def changeable(live) -> Iterator:
    """The shared server, which gets its controls back."""
    before = live.engine.controls
    yield live
    live.engine.set_controls(before)


def test_controls_change_while_requests_run(changeable):
    live = changeable
    before = httpx.get(live.base + CONTROLS).json()
    assert before["policy"] == "priority" and before["slo_ttft"] == []
    endless = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", live.base + "/v1/completions", json=endless) as stream:
        lines = stream.iter_lines()  # dropped, it would close the connection
        next(lines)
        some = {"policy": "fair", "running_limit": 2, "aging": 5, "slo_ttft": [500, 1000.5]}
        assert httpx.patch(live.base + CONTROLS, json=some).json() == {**before, **some}
        assert httpx.patch(live.base + CONTROLS, json={"aging": 7}).json() == {**before, **some, "aging": 7}
        with live.client() as client:
            reply = client.completions.create(model="tiny", prompt="y", extra_body={"ignore_eos": True})
        assert reply.usage.completion_tokens == 16
        assert next(line for line in lines if line).startswith("data: {")
    assert live.engine.controls == Controls(policy="fair", running_limit=2, aging=7, slo_ttft=(500, 1000.5))
    assert httpx.get(live.base + CONTROLS).json() == httpx.patch(live.base + CONTROLS, json={}).json()
