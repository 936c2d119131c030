"""The default model on the engine against Hugging Face transformers: tokens equal, log-probabilities close.

Takes about a minute, most of it to compile and run the real model: realism is the point here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jbatch.config import EngineConfig
from jbatch.engine import Engine
from jbatch.models.load import LoadedModel
from jbatch.request import Completion, Request, SamplingParams

GOLDENS = np.load(Path(__file__).parent / "goldens" / "smollm2.npz")
CONFIG = EngineConfig(max_model_len=1024, max_running=16, max_slots=48, num_pages=600, max_chunks=8)


def golden_prompts() -> list[tuple[int, ...]]:
    ends = np.cumsum(GOLDENS["prompt_lengths"])
    return [tuple(part.tolist()) for part in np.split(GOLDENS["prompts"], ends[:-1])]


@pytest.fixture(scope="module")
def completions(smollm2: LoadedModel) -> list[Completion]:
    sampling = SamplingParams(temperature=0, max_tokens=GOLDENS["tokens"].shape[1], ignore_eos=True)
    with Engine(smollm2.for_engine(), CONFIG) as engine:
        return engine.generate(Request(prompt, sampling) for prompt in golden_prompts())


def test_enough_goldens() -> None:
    requests, tokens = GOLDENS["tokens"].shape
    assert requests >= 32
    assert tokens == 64


def test_greedy_tokens_equal_transformers(completions: list[Completion]) -> None:
    tokens = np.array([completion.tokens for completion in completions])
    np.testing.assert_array_equal(tokens, GOLDENS["tokens"])


def test_logprobs_equal_transformers(completions: list[Completion]) -> None:
    logprobs = np.array([completion.logprobs for completion in completions])
    np.testing.assert_allclose(logprobs, GOLDENS["logprobs"], atol=1e-3)
