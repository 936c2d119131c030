"""Engines for the tests of the host loop: few buckets, random requests, sinks that record or hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from tiny import TINY, TINY_ENGINE, tiny_model

from jbatch.config import Bucket, EngineConfig
from jbatch.engine import Engine
from jbatch.programs import Program
from jbatch.request import Output, Request, SamplingParams

PATIENCE = 60.0
"""Seconds after which a wait counts as a hang."""


class OneBucket(EngineConfig):
    """Only the largest shape, so that a test compiles once."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return super().buckets[-1:]


def sizes(**changes: int | bool) -> OneBucket:
    """The tiny engine's sizes, with changes, and one bucket."""
    return OneBucket(**{**vars(TINY_ENGINE), **changes})


_COMPILED: dict[tuple[EngineConfig, Bucket], Program] = {}


def make_engine(config: EngineConfig, report: Callable[[str], None] = print) -> Engine:
    """A tiny engine, not started. Engines of the same sizes share their compiled programs, to save the tests time."""
    engine = Engine(tiny_model(), config, report)
    compile_bucket = engine._stepper.programs._compile_bucket

    def compile_once(bucket: Bucket) -> Program:
        if (config, bucket) not in _COMPILED:
            _COMPILED[config, bucket] = compile_bucket(bucket)
        return _COMPILED[config, bucket]

    engine._stepper.programs._compile_bucket = compile_once
    return engine


@contextmanager
def serving(config: EngineConfig) -> Iterator[Engine]:
    """A tiny engine that has compiled all its buckets."""
    with make_engine(config) as engine:
        engine.warm_up()
        yield engine


def mixed_requests(count: int, seed: int = 0) -> list[Request]:
    """Short and long prompts and outputs, greedy and seeded, with and without an end of their own."""
    rng = np.random.default_rng(seed)
    return [_request(rng, greedy=i % 2 == 0) for i in range(count)]


def _request(rng: np.random.Generator, greedy: bool) -> Request:
    length = int(rng.choice([1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 60]))
    sampling = SamplingParams(
        temperature=0.0 if greedy else float(rng.uniform(0.3, 1.5)),
        top_k=int(rng.choice([0, 0, 5, 40])),
        top_p=float(rng.choice([1.0, 0.9, 0.5])),
        min_p=float(rng.choice([0.0, 0.05])),
        seed=int(rng.integers(0, 2**40)),
        max_tokens=int(rng.integers(1, 28)),
        stop_token_ids=tuple(rng.integers(2, TINY.vocab_size, int(rng.integers(0, 5))).tolist()),
        ignore_eos=bool(rng.integers(2)),
    )
    return Request(tuple(rng.integers(2, TINY.vocab_size, length).tolist()), sampling)


def endless(max_tokens: int = 120, prompt: tuple[int, ...] = (5, 6, 7), priority: int = 0) -> Request:
    """A request that ends at `max_tokens` and never before."""
    return Request(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True), priority)


class Recorder:
    """A sink that keeps what it hears, and can wait for ends."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[Output]] = {}
        self._news = threading.Condition()

    def __call__(self, outputs: list[Output]) -> None:
        with self._news:
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            self._news.notify_all()

    def wait_for(self, ids: list[int]) -> None:
        """Until each of the requests has ended."""
        with self._news:
            assert self._news.wait_for(lambda: all(self.reasons(id_) for id_ in ids), PATIENCE), "some never ended"

    def reasons(self, id_: int) -> list[str]:
        """All finish reasons heard for a request: there should be one."""
        return [output.finish_reason for output in self.outputs.get(id_, []) if output.finish_reason]

    def check(self, id_: int, *allowed: str) -> None:
        """Exactly one finish, of an allowed kind, with nothing after it, and a token in all the others."""
        outputs = self.outputs[id_]
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].finish_reason in allowed
        assert all(output.token is not None for output in outputs[:-1])


class Gate(Recorder):
    """A sink that holds the engine's thread each time it has heard so many outputs, until `open`."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self._at = at or (1,)
        self._heard = 0
        self._reached, self._opened = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, outputs: list[Output]) -> None:
        super().__call__(outputs)
        before, self._heard = self._heard, self._heard + len(outputs)
        if any(before < at <= self._heard for at in self._at):
            self._reached.release()
            assert self._opened.acquire(timeout=PATIENCE), "nobody opened the gate"

    def wait(self) -> None:
        assert self._reached.acquire(timeout=PATIENCE), "the gate was never reached"

    def open(self) -> None:
        self._opened.release()


def assert_pages_free(engine: Engine) -> None:
    """On the device, once the engine has stopped; and no slot is taken."""
    state = engine._stepper._state
    assert np.asarray(state.pool.refs).tolist() == [1] + [0] * (engine.config.num_pages - 1)
    assert np.all(np.asarray(state.slots.page_table) == -1)
    assert np.all(np.asarray(state.slots.phase) == 0)
