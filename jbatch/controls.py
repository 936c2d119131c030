"""What may be changed while an engine runs: policy, way of batching, limits and latency targets. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from jbatch.config import UserError

Policy = Literal["priority", "fcfs", "edf", "shortest", "prefix", "fair", "program"]
Batching = Literal["continuous", "serial", "static", "dynamic", "threshold"]

POLICIES: tuple[Policy, ...] = get_args(Policy)
BATCHINGS: tuple[Batching, ...] = get_args(Batching)

NUM_CLASSES = 4
"""Priority classes with latency targets of their own: 0, 1, 2, and 3 with all above it."""


@dataclass(frozen=True)
class Controls:
    """Settings that take effect with the next step. Raises `UserError` where one makes no sense.

    Attributes:
      policy: who goes first. priority: lower classes, with aging. fcfs: arrival. edf: the earliest deadline. shortest:
        least remaining work. prefix: most of the prompt cached. fair: the tenant served least. program: the agent
        program served least.
      batching: when requests may enter. continuous: at every step. To compare with it: serial (one request at a time),
        static (a batch runs to its end), dynamic (static, but a batch waits for batch_size requests or batch_delay),
        threshold (one at a time until more than batch_threshold wait, then a batch).
      running_limit: most requests that run at once, where that is to be fewer than max_running; 0 for no fewer.
      aging: seconds of waiting that count as much as one priority class.
      batch_size: requests that a dynamic batch waits for.
      batch_delay: seconds that the first request of a dynamic batch waits at most.
      batch_threshold: waiting requests above which threshold batching makes a batch.
      slo_ttft: target for the time to the first token in milliseconds, for priority classes 0, 1, 2 and above; the last
        one given holds for the rest. While it is in danger, prompts get all the rows there are.
      slo_tpot: target for the mean time per output token in milliseconds, given like slo_ttft. No more requests run
        than keep it.
      pinned_share: share of the pages that may be kept for requests which asked for it with pin_seconds.
    """

    policy: Policy = "priority"
    batching: Batching = "continuous"
    running_limit: int = 0
    aging: float = 10.0
    batch_size: int = 8
    batch_delay: float = 0.1
    batch_threshold: int = 50
    slo_ttft: tuple[float, ...] = ()
    slo_tpot: tuple[float, ...] = ()
    pinned_share: float = 0.25

    def __post_init__(self) -> None:
        def need(condition: bool, name: str, what: str) -> None:
            if not condition:
                raise UserError(f"{name} is {getattr(self, name)!r}: it must be {what}")

        need(self.policy in POLICIES, "policy", f"one of {', '.join(POLICIES)}")
        need(self.batching in BATCHINGS, "batching", f"one of {', '.join(BATCHINGS)}")
        for field in fields(self):
            if field.type == "int":
                value = getattr(self, field.name)
                need(isinstance(value, int) and 0 <= value < 2**31, field.name, "a whole number, 0 or more")
        need(0.001 <= self.aging <= 1e6, "aging", "from 0.001 to 1e6 seconds")
        need(0 <= self.batch_delay <= 1e6, "batch_delay", "from 0 to 1e6 seconds")
        need(0 <= self.pinned_share <= 1, "pinned_share", "from 0 to 1")
        for name in ("slo_ttft", "slo_tpot"):
            targets = tuple(getattr(self, name))
            object.__setattr__(self, name, targets)
            sound = len(targets) <= NUM_CLASSES and all(0 < target <= 1e6 for target in targets)
            need(sound, name, f"at most {NUM_CLASSES} times, each above 0 and at most 1e6 ms")
