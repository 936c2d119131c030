"""What a caller asks for and what it gets back. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. `temperature == 0` is greedy.

    Attributes:
      temperature: divides the logits; 0 means greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens with at least this probability.
      min_p: drop tokens less likely than `min_p` times the most likely one.
      seed: makes sampling reproducible whatever else is in the batch; None draws a fresh one.
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


@dataclass(frozen=True)
class Request:
    """One prompt to complete.

    Attributes:
      prompt: token ids, at least one.
      sampling: how to draw tokens.
      priority: lower runs first, as in vLLM.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """One step's news of one request.

    Attributes:
      request_id: the id `Engine.submit` returned.
      token: the new token's id, or None when only the finish is news.
      logprob: natural log-probability of `token` under the model's unscaled distribution.
      finish_reason: set on the last output of a request, else None.
    """

    request_id: int
    token: int | None
    logprob: float
    finish_reason: FinishReason | None
