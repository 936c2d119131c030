"""Load on an engine: real prompts and arrivals; closed loops, in which clients wait for answers, and open ones."""

from __future__ import annotations

import csv
import itertools
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

import numpy as np
from tqdm import tqdm

from jbatch.engine import Engine
from jbatch.request import Output, Request, SamplingParams
from jbatch.telemetry import Snapshot
from jbatch.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
PROMPTS = DATA / "prompts.jsonl"

Workload = Literal["conversation", "code"]


@dataclass(frozen=True)
class Arrival:
    """A request of a recorded workload."""

    seconds: float
    """When it came, after the first."""
    prompt_tokens: int
    output_tokens: int


def azure_arrivals(workload: Workload, count: int) -> list[Arrival]:
    """The first `count` requests, at most 512, of a service (Azure LLM inference trace 2023, CC-BY-4.0)."""
    with (DATA / f"azure_{workload}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[:count]
    return [Arrival(float(r["seconds"]), int(r["prompt_tokens"]), int(r["output_tokens"])) for r in rows]


def pieces(tokenizer: Tokenizer, chats: int = 240) -> Iterator[tuple[int, ...]]:
    """Endless long pieces of real text to cut prompts from, each from another place."""
    text = tuple(itertools.chain.from_iterable(chat_prompts(tokenizer, chats)))
    for step in itertools.count():
        at = step * 97 % len(text)
        yield (*text[at:], *text[:at])


def chat_prompts(tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """Token ids of `count` real questions, templated as chats; the file starts anew where it ends."""
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    chats = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(count)]
    return [tuple(tokenizer.encode(tokenizer.apply_chat_template(chat))) for chat in chats]


def greedy(prompt: tuple[int, ...], output_tokens: int, tenant: str = "") -> Request:
    """A greedy request that generates just so many tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    return Request(prompt, sampling, tenant=tenant)


def output_lengths(mean: int, count: int, seed: int = 0) -> list[int]:
    """`count` numbers of tokens, uniform from half of `mean` to one and a half times as many."""
    return np.random.default_rng(seed).integers(mean // 2, mean * 3 // 2, count, endpoint=True).tolist()


def make_requests(prompts: list[tuple[int, ...]], output_tokens: int) -> list[Request]:
    """Greedy requests that generate `output_tokens` on average."""
    lengths = output_lengths(output_tokens, len(prompts))
    return [greedy(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


@dataclass
class Timeline:
    """When one request's tokens arrived, in seconds of `time.perf_counter`."""

    submitted: float
    tokens: list[float]

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.tokens[0] - self.submitted

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; not a number for a single token."""
        if len(self.tokens) < 2:
            return float("nan")
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


@dataclass(frozen=True)
class LoadResult:
    """What one run of `closed_loop` saw."""

    concurrency: int
    begun: float
    drained: float
    """When the last request was sent: from then on clients fall idle, which would count against concurrency."""
    timelines: list[Timeline]
    before: Snapshot
    after: Snapshot
    """As of `drained`."""

    @property
    def seconds(self) -> float:
        """Time during which every client was busy."""
        return self.drained - self.begun

    @property
    def output_tokens(self) -> int:
        """Tokens that came while every client was busy."""
        return sum(at <= self.drained for line in self.timelines for at in line.tokens)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model while every client was busy, prompt and output."""
        return computed_tokens(self.before, self.after)

    @property
    def padding_share(self) -> float:
        """Share of computed rows that held no token."""
        return padding_share(self.before, self.after)

    def percentile(self, name: str, q: float) -> float:
        """The q-th percentile of "ttft" or "tpot" over the requests, in seconds."""
        return percentile(self.timelines, name, q)


def closed_loop(engine: Engine, requests: Sequence[Request], concurrency: int) -> LoadResult:
    """Runs all requests with `concurrency` of them at once, behind a progress bar."""
    inbox: SimpleQueue[tuple[float, list[Output]]] = SimpleQueue()
    timelines: dict[int, Timeline] = {}
    todo: Iterator[Request] = iter(requests)

    def submit() -> None:
        request = next(todo, None)
        if request is not None:
            begun = time.perf_counter()
            timelines[engine.submit(request, lambda news: inbox.put((time.perf_counter(), news)))] = Timeline(begun, [])

    before = after = engine.snapshot()
    begun = drained = time.perf_counter()
    for _ in range(concurrency):
        submit()
    finished = 0
    with tqdm(total=len(requests), desc=f"concurrency {concurrency:2d}", unit="req") as bar:
        while finished < len(requests):
            at, news = inbox.get()
            ended = _hear(at, news, timelines)
            finished += ended
            bar.update(ended)
            for _ in range(min(ended, len(requests) - len(timelines))):
                submit()
                after, drained = engine.snapshot(), at
    return LoadResult(concurrency, begun, drained, list(timelines.values()), before, after)


def _hear(at: float, news: list[Output], timelines: dict[int, Timeline]) -> int:
    """Notes when tokens came; returns how many requests ended."""
    for output in news:
        if output.token is not None:
            timelines[output.request_id].tokens.append(at)
    return sum(output.finish_reason is not None for output in news)


def open_loop(engine: Engine, sends: Sequence[tuple[float, Request]], label: str) -> list[Timeline]:
    """Sends each request at its time in seconds, whether or not those before it have ended; waits for all.

    Timelines are in the order of `sends` and begin when a request was due, so that a late sender counts.
    """
    inbox: SimpleQueue[tuple[float, list[Output]]] = SimpleQueue()
    timelines: dict[int, Timeline] = {}
    places: dict[int, Timeline] = {}
    todo = deque(sorted(range(len(sends)), key=lambda i: sends[i][0]))
    begun, finished = time.perf_counter(), 0
    with tqdm(total=len(sends), desc=label, unit="req") as bar:
        while finished < len(sends):
            while todo and begun + sends[todo[0]][0] <= time.perf_counter():
                due, request = sends[todo[0]]
                id_ = engine.submit(request, lambda news: inbox.put((time.perf_counter(), news)))
                places[todo.popleft()] = timelines[id_] = Timeline(begun + due, [])
            try:
                left = begun + sends[todo[0]][0] - time.perf_counter() if todo else None
                at, news = inbox.get(timeout=None if left is None else max(left, 0.0))
            except Empty:
                continue
            ended = _hear(at, news, timelines)
            finished += ended
            bar.update(ended)
    return [places[i] for i in range(len(sends))]


def percentile(timelines: Sequence[Timeline], name: str, q: float) -> float:
    """The q-th percentile of "ttft" or "tpot" over the requests, in seconds."""
    return float(np.nanpercentile([getattr(line, name) for line in timelines], q))


def computed_tokens(before: Snapshot, after: Snapshot) -> int:
    """Tokens that went through the model in between, prompt and output."""
    return sum(getattr(after, name) - getattr(before, name) for name in ("decode_tokens", "prefill_tokens"))


def padding_share(before: Snapshot, after: Snapshot) -> float:
    """Share of the rows computed in between that held no token."""
    return 1 - computed_tokens(before, after) / (after.computed_rows - before.computed_rows)
