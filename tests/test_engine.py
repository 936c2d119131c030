"""Whatever shares the batch, a request gets what it gets alone; and each shape is compiled once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from engines import Gate, Recorder, endless, mixed_requests, serving, sizes
from tiny import EOS, TINY, TINY_ENGINE, tiny_model, tiny_params

from jbatch.config import Bucket, EngineConfig
from jbatch.engine import Engine
from jbatch.programs import Program, Programs
from jbatch.request import Completion, Request, SamplingParams

REQUESTS = mixed_requests(64)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serving(sizes()) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    """What each request gives when nothing else runs and nothing is cached."""
    with serving(sizes(prefix_caching=False)) as engine:
        return [engine.generate([request])[0] for request in REQUESTS]


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.finish_reason == theirs.finish_reason
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


def test_the_requests_are_a_fair_mix(alone: list[Completion]) -> None:
    assert {completion.finish_reason for completion in alone} == {"stop", "length"}
    for request, completion in zip(REQUESTS, alone, strict=True):
        stops = {*request.sampling.stop_token_ids} | (set() if request.sampling.ignore_eos else {EOS})
        assert not stops & set(completion.tokens[:-1])
        assert (completion.tokens[-1] in stops) == (completion.finish_reason == "stop")
        if completion.finish_reason == "length":
            assert len(completion.tokens) == request.sampling.max_tokens


def test_sixty_four_at_once_give_what_each_gives_alone(engine: Engine, alone: list[Completion]) -> None:
    assert_same(engine.generate(REQUESTS), alone)


def test_order_and_priority_change_no_tokens(engine: Engine, alone: list[Completion]) -> None:
    backwards = [Request(r.prompt, r.sampling, priority=i % 3) for i, r in enumerate(REQUESTS)][::-1]
    assert_same(engine.generate(backwards)[::-1], alone)


def test_a_request_may_be_given_twice_at_once(engine: Engine, alone: list[Completion]) -> None:
    assert_same(engine.generate([REQUESTS[1]] * 12), [alone[1]] * 12)


@pytest.mark.parametrize("shared", [48, 136])
def test_shared_prefixes_change_no_tokens(engine: Engine, shared: int) -> None:
    """At once, then again when all is cached, then with the answers as part of the prompts.

    From 64 tokens on decode rows attend together to what they share.
    """
    common = tuple(20 + (shared + i) % 47 for i in range(shared))
    requests = [Request((*common, 70 + i, 71), SamplingParams(temperature=0, max_tokens=8 + i)) for i in range(16)]
    with serving(sizes(prefix_caching=False)) as plain:
        expected = plain.generate(requests)
        second = [Request((*r.prompt, *e.tokens, 5), r.sampling) for r, e in zip(requests, expected, strict=True)]
        expected_second = plain.generate(second)
        assert plain.snapshot().prefix_hits == 0
    before = engine.snapshot()
    assert_same(engine.generate(requests), expected)
    once = engine.snapshot()
    assert once.prefill_tokens - before.prefill_tokens == shared + 16 * 2
    assert once.prefix_queries - before.prefix_queries == 16 * (shared + 2)
    assert once.prefix_hits - before.prefix_hits == 15 * shared
    assert_same(engine.generate(requests), expected)
    assert_same(engine.generate(second), expected_second)
    assert engine.snapshot().prefix_hits - once.prefix_hits > 2 * 16 * shared


def test_a_salt_keeps_a_prefix_to_its_owner(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=1)
    for salt, hits in (("mine", 0), ("theirs", 0), ("mine", 32)):
        before = engine.snapshot().prefix_hits
        engine.generate([Request(tuple(range(40, 75)), sampling, cache_salt=salt)])
        assert engine.snapshot().prefix_hits - before == hits


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"max_running": 64, "max_slots": 64, "num_pages": 1024}, id="all running"),
        pytest.param({"overlap": False}, id="no overlap"),
        pytest.param({"max_chunks": 1, "chunk_size": 8}, id="one small chunk a step"),
        pytest.param({"page_size": 1, "chunk_size": 5, "max_running": 3, "num_pages": 600}, id="odd sizes"),
    ],
)
def test_sizes_change_no_tokens(changes: dict[str, int], alone: list[Completion]) -> None:
    with serving(sizes(**changes)) as engine:
        assert_same(engine.generate(REQUESTS), alone)


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_changes_no_tokens(overlap: bool, alone: list[Completion]) -> None:
    with serving(sizes(num_pages=60, page_size=2, overlap=overlap)) as engine:
        assert_same(engine.generate(REQUESTS), alone)
        assert engine.snapshot().preemptions > 0


def test_a_long_prompt_gets_its_rows_at_every_step() -> None:
    """The host sizes a step before it has read the one under way: what that one computes is not all there is."""
    config = replace(TINY_ENGINE, max_running=2, max_slots=4, max_chunks=2)
    with Engine(tiny_model(), config, print) as engine:
        engine.warm_up()
        engine.generate([Request(tuple(range(5, 165)), SamplingParams(temperature=0, max_tokens=1))])
        assert engine.snapshot().steps <= 6  # of two rows of 16 tokens each, and one that came too late to be left out


def test_an_unseeded_request_is_drawn_afresh(engine: Engine) -> None:
    request = Request((3, 4), SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True))
    first, second = engine.generate([request, request])
    assert first.tokens != second.tokens


# ---- the model itself ----


class PlainLlama:
    """The tiny model in float64: no pages, no batch, the whole sequence anew for each token."""

    def __init__(self) -> None:
        self._params = jax.tree.map(lambda x: np.asarray(x, np.float64), tiny_params())

    def log_probabilities(self, tokens: list[int]) -> np.ndarray:
        """Of the token after `tokens`, [V]."""
        x = self._params["embedding"][tokens]
        for i in range(TINY.num_hidden_layers):
            layer = self._params["layers"][i]
            x = x + self._attention(layer, self._norm(x, layer["attention_norm"]))
            gate, up = (self._norm(x, layer["mlp_norm"]) @ layer[name].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"].T
        logits = self._norm(x[-1], self._params["final_norm"]) @ self._params["embedding"].T
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + TINY.rms_norm_eps) * weight

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        half = TINY.head_dim // 2
        angle = np.arange(len(x))[:, None] * TINY.rope_theta ** (-np.arange(half) / half)
        left, right = x[:, :half], x[:, half:]
        return np.concatenate(
            [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)], axis=-1
        )

    def _attention(self, layer: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        heads, kv_heads, dim = TINY.num_attention_heads, TINY.num_key_value_heads, TINY.head_dim
        parts = np.split((x @ layer["qkv"].T).reshape(len(x), -1, dim), [heads, heads + kv_heads], axis=1)
        future = np.triu(np.ones((len(x), len(x)), bool), 1)
        mixed = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            q, k, v = self._rotate(parts[0][:, head]), self._rotate(parts[1][:, shared]), parts[2][:, shared]
            weights = np.exp(np.where(future, -np.inf, q @ k.T / np.sqrt(dim)))
            mixed.append(weights @ v / weights.sum(-1, keepdims=True))
        return np.concatenate(mixed, axis=-1) @ layer["out"].T


def test_greedy_tokens_equal_a_plain_float64_model(engine: Engine) -> None:
    rng = np.random.default_rng(2)
    prompts = [tuple(rng.integers(2, TINY.vocab_size, length).tolist()) for length in (1, 5, 16, 17, 40, 64)]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    model = PlainLlama()
    for prompt, completion in zip(
        prompts, engine.generate(Request(prompt, sampling) for prompt in prompts), strict=True
    ):
        known = list(prompt)
        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):
            expected = model.log_probabilities(known)
            assert token == expected.argmax()
            assert abs(logprob - expected[token]) < 1e-4
            known.append(token)


# ---- compiled programs ----


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Names of functions as XLA compiles them, from any thread, as jax itself tells."""
    names: list[str] = []

    def listen(event: str, duration: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """The bucket of every step."""
    buckets: list[Bucket] = []
    choose = Programs.choose

    def spy(self: Programs, demand: Bucket) -> tuple[Bucket, Program]:
        buckets.append(choose(self, demand)[0])
        return choose(self, demand)

    monkeypatch.setattr(Programs, "choose", spy)
    return buckets


def test_each_bucket_is_compiled_once_and_none_while_serving(compiles: list[str], chosen: list[Bucket]) -> None:
    config = EngineConfig(
        max_model_len=96, max_running=2, max_slots=4, num_pages=64, page_size=8, chunk_size=8, max_chunks=2
    )
    engine = Engine(tiny_model(), config)
    compiles.clear()  # the making of arrays
    engine.start()
    engine.warm_up()
    assert len(compiles) == len(config.buckets)
    compiles.clear()
    mixed_trace(engine)
    assert compiles == []
    assert set(chosen) == set(config.buckets)
    assert set(engine.snapshot().buckets) == set(config.buckets)
    engine.stop()


def mixed_trace(engine: Engine) -> None:
    """Alone and by twos, prompts of one chunk and of several, newcomers beside a decode, a crowd, a cancellation."""
    short, long = endless(6, prompt=(4, 5, 6)), endless(6, prompt=tuple(range(2, 18)))
    for request in (short, long):
        engine.generate([request])
        beside_a_decode(engine, request)
    engine.generate(Request(r.prompt, r.sampling) for r in mixed_requests(24, seed=3))
    gate = Gate()
    id_ = engine.submit(short, gate)
    gate.wait()
    engine.cancel(id_)
    gate.open()
    gate.wait_for([id_])


def beside_a_decode(engine: Engine, request: Request) -> None:
    """Runs `request` and another that has its first token already."""
    gate, sink = Gate(), Recorder()
    first = engine.submit(endless(12), gate)
    gate.wait()
    second = engine.submit(request, sink)
    gate.open()
    gate.wait_for([first])
    sink.wait_for([second])


def test_the_engine_serves_before_the_small_buckets_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their compilation is held back until a request has been served."""
    config = EngineConfig(
        max_model_len=48, max_running=1, max_slots=2, num_pages=32, page_size=8, chunk_size=8, max_chunks=1
    )
    served = threading.Event()
    compile_ = Programs._compile

    def held_back(self: Programs, bucket: Bucket) -> None:
        assert bucket == config.largest_bucket or served.wait(60)
        compile_(self, bucket)

    monkeypatch.setattr(Programs, "_compile", held_back)
    with Engine(tiny_model(), config) as engine:
        assert len(engine.generate([endless(4)])[0].tokens) == 4
        assert engine.snapshot().buckets == (config.largest_bucket,)
        served.set()
        engine.warm_up()
        assert set(engine.snapshot().buckets) == set(config.buckets)
