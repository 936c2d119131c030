"""How long requests will take, by the steps of the past. Imports no jax."""

from __future__ import annotations

import math

from jbatch.config import EngineConfig
from jbatch.request import Request
from jbatch.telemetry import Snapshot


def retry_after(past: Snapshot, queued: int) -> int:
    """Seconds, from 1 to 60, until the queue has moved on by its length, at the rate of the past."""
    if not past.finished:
        return 1
    return min(60, math.ceil(queued * (past.host_seconds + past.wait_seconds) / past.finished) or 1)


def seconds_to_answer(request: Request, ahead: int, past: Snapshot, config: EngineConfig) -> float:
    """Time until the answer to `request` ends, with `ahead` requests waiting before it; 0 where nothing is known."""
    if not past.finished or not (ahead or past.running):
        return 0.0  # a device that idles may be as quick as ever
    mean, limit = past.output_tokens / past.finished, max(1, past.running_limit)
    # A place falls free each time one of those that run ends; they have `mean` steps each.
    turns = ahead + 1 if past.running + ahead >= limit else 0
    prompt = math.ceil(len(request.prompt) / (config.chunk_size * max(1, past.chunk_limit)))
    return (turns * mean / limit + prompt + min(mean, request.sampling.max_tokens)) * past.step_seconds
