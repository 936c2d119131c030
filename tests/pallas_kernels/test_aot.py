"""Whole engine steps of Llama 3 8B, compiled for an H200 that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.h200 import environment, fetch_plugin
from jbatch.config import UserError

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `aot_step.py` found, in a process of its own: XLA takes its flags once."""
    try:
        plugin = fetch_plugin()
    except UserError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("aot")
    script = Path(__file__).with_name("aot_step.py")
    env = environment(plugin, folder)
    env["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    command = [sys.executable, str(script), str(folder / "report.json"), str(folder)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "report.json").read_text())


STEPS = {
    "decode": {"kv_write": 1, "paged_decode": 1, "merge_states": 1},
    "mixed": {"kv_write": 1, "paged_decode": 1, "merge_states": 1, "paged_prefill": 1},
}
"""Kernels that a layer launches. (64 rows of 8 KV heads are few for 132 multiprocessors, so decode splits tokens.)"""


@pytest.mark.parametrize("step", STEPS)
def test_the_cache_is_updated_in_place(report: dict[str, Any], step: str) -> None:
    """All of it is donated, and nothing as large is made on the way: what is left is mostly logits."""
    assert report[step]["alias_bytes"] >= report["kv_bytes"]
    assert report[step]["temp_bytes"] < 256 << 20


@pytest.mark.parametrize("step", STEPS)
def test_only_kernels_touch_the_cache(report: dict[str, Any], step: str) -> None:
    """No gather, no copy, no fusion takes or gives pages: only custom calls do."""
    assert set(report[step]["kv_uses"]) <= {"parameter", "custom-call", "get-tuple-element", "tuple"}
    calls = len(STEPS[step]) - 1  # `merge_states` sees no pages
    assert report[step]["kv_uses"]["custom-call"] <= calls * report["layers"]


@pytest.mark.parametrize("step", STEPS)
def test_a_layer_launches_each_kernel_once(report: dict[str, Any], step: str) -> None:
    names = Counter(launch["name"] for launch in report[step]["launches"])
    for kernel, count in STEPS[step].items():
        assert names[kernel] == count * report["layers"], kernel


@pytest.mark.parametrize(("step", "layer", "rest"), [("decode", 20, 200), ("mixed", 20, 230)])
def test_launches_are_few(report: dict[str, Any], step: str, layer: int, rest: int) -> None:
    """A layer's launches from one write to the next, and those outside the layers: schedule, sampling, commit.

    What loops and branches launch is not counted: how often they run depends on the requests.
    """
    outer = [launch["name"] for launch in report[step]["launches"] if not launch["nested"]]
    writes = [index for index, name in enumerate(outer) if name == "kv_write"]
    in_layer = max(after - before for before, after in pairwise(writes))
    assert in_layer <= layer
    assert len(outer) - in_layer * report["layers"] <= rest


@pytest.mark.parametrize("step", STEPS)
def test_kernels_fit_the_device(report: dict[str, Any], step: str) -> None:
    """Two programs of attention share a multiprocessor's 228 KB of shared memory."""
    attention = [launch for launch in report[step]["launches"] if launch["name"] in STEPS[step]]
    assert {launch["name"] for launch in attention} == set(STEPS[step])
    assert max(launch["shared_bytes"] for launch in attention) <= 114 << 10
