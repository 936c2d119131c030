"""What a caller asks for and what it gets back. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]

INT32_MAX = 2**31 - 1
DEFAULT_DEADLINE = 60.0
"""Seconds after which a request without a deadline counts as due."""
MAX_DEADLINE = 86_400.0
MAX_PIN = 3_600.0


class RequestError(ValueError):
    """A request that cannot be served as asked. Its text is one line; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(Exception):
    """No room for another waiting request. `retry_after` is a hint in seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; retry in {retry_after} s")
        self.retry_after = retry_after


class DeadlineError(Exception):
    """A request that would not end before its deadline. `wait` is how long it would take from now, in seconds."""

    def __init__(self, deadline: float, wait: float) -> None:
        super().__init__(f"the answer would take some {wait:.1f} s and is due in {deadline:.1f} s")
        self.wait = wait


class EngineStoppedError(Exception):
    """The engine takes no more requests: it is draining, stopped, or failed."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Raises `RequestError` where a value is out of its range.

    Attributes:
      temperature: divides the logits, at most 1e6; below 1e-5 means greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens with at least this probability, in (0, 1].
      min_p: drop tokens less likely than `min_p` times the most likely one, in [0, 1].
      seed: makes sampling reproducible whatever else is in the batch; None draws a fresh one. Taken modulo 2**31.
      max_tokens: most tokens to generate, at least 1.
      stop_token_ids: token ids that end the request (the model's end-of-sequence ids are added).
      ignore_eos: do not end at the model's end-of-sequence tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def need(condition: bool, name: str, what: str) -> None:
            if not condition:
                raise RequestError(f"{name} is {getattr(self, name)}: it must be {what}", name)

        need(0 <= self.temperature <= 1e6, "temperature", "from 0 to 1e6")
        need(0 <= self.top_k <= INT32_MAX, "top_k", "0 (keep all) or a positive number")
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        need(self.seed is None or isinstance(self.seed, int), "seed", "a whole number")
        need(1 <= self.max_tokens <= INT32_MAX, "max_tokens", "at least 1")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5


@dataclass(frozen=True)
class Request:
    """One prompt to complete. Raises `RequestError` where it makes no sense whatever the engine.

    Attributes:
      prompt: token ids, at least one.
      sampling: how to draw tokens.
      priority: lower runs first, as in vLLM; those beyond 2**28 either way count alike.
      cache_salt: only requests of equal salts share cached prefixes, so none can find out what others have sent.
      tenant: on whose account it runs. Tenants share nothing, and the policy "fair" serves them equally.
      program: the agent program it is a step of, if any; the policy "program" goes by what a whole program has got.
      deadline: seconds from submission in which the answer must end, for the policy "edf".
      pin_seconds: how long its pages are kept after its end, for a next turn that begins with it; at most an hour.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    program: str = ""
    deadline: float | None = None
    pin_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(self.prompt))
        if not self.prompt:
            raise RequestError("the prompt is empty: it needs at least one token", "prompt")
        if abs(self.priority) > INT32_MAX:
            raise RequestError(f"priority is {self.priority}: it must fit in 32 bits", "priority")
        for name in ("cache_salt", "tenant", "program"):
            try:
                getattr(self, name).encode()
            except (AttributeError, UnicodeEncodeError):
                raise RequestError(f"{name} must be text that can be encoded as UTF-8", name) from None
        if self.deadline is not None and not 0 < self.deadline <= MAX_DEADLINE:
            raise RequestError(f"deadline is {self.deadline}: it must be above 0 and at most a day", "deadline")
        if not 0 <= self.pin_seconds <= MAX_PIN:
            raise RequestError(f"pin_seconds is {self.pin_seconds}: it must be from 0 to {MAX_PIN:.0f}", "pin_seconds")


@dataclass(frozen=True, slots=True)
class Output:
    """One step's news of one request.

    Attributes:
      request_id: the id `Engine.submit` returned.
      token: the new token's id, or None when only the finish is news.
      logprob: natural log-probability of `token` under the model's unscaled distribution.
      finish_reason: set on the last output of a request, else None.
      cached_tokens: tokens of its prompt found in the prefix cache when it first ran.
    """

    request_id: int
    token: int | None
    logprob: float
    finish_reason: FinishReason | None
    cached_tokens: int = 0


Sink = Callable[[list[Output]], None]
"""Takes a step's outputs, on the engine's thread: it must be quick and must not raise."""


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
