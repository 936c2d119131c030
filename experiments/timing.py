"""Timing calls that compute on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax


def seconds_of(call: Callable[[], object], *, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after one that does not count; waits for the result each time."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begun)
    return seconds
