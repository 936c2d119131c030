"""What does the prefix cache save when requests begin alike?

First one request at a time: time to the first token with a prefix nobody has sent before, and then with the same prefix
and another ending. Then a fan-out: many requests at once over one new prefix, with the cache and without. Prefixes and
endings are cut from real questions, a new place each time. Writes prefix.json.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from statistics import median

from tqdm import tqdm

from experiments.load import greedy, pieces
from experiments.report import RESULTS, run, say, settings_of, table, write_json
from jbatch.config import DEFAULT_MODEL, EngineConfig
from jbatch.engine import Engine
from jbatch.models.load import load_model
from jbatch.request import Output, Request

CLAIM = 4.0
"""How many times sooner the first token comes with a cached prefix, at least."""


@dataclass(frozen=True)
class Settings:
    """Time to the first token with a cold and a warm prefix, and a fan-out with and without the cache."""

    model: str = DEFAULT_MODEL
    """Name, path or hub id of the model."""
    prefix_tokens: int = 512
    """Tokens that requests have in common."""
    tail_tokens: int = 32
    """Tokens of each request after those."""
    repeats: int = 8
    """New prefixes for the first part."""
    fan_out: int = 32
    """Requests at once over one prefix."""
    output_tokens: int = 64
    """Tokens that each request of the fan-out generates."""
    out: Path = RESULTS
    """Folder for the JSON."""


@dataclass(frozen=True)
class FanOut:
    """One burst of requests over one prefix."""

    seconds: float
    prefill_tokens: int
    hits: int


def main(settings: Settings) -> None:
    """Runs both parts and writes the results."""
    loaded = load_model(settings.model, report=say)
    texts = pieces(loaded.tokenizer)
    model, config = loaded.for_engine(), EngineConfig()
    with Engine(model, config, say) as engine:
        engine.warm_up()
        cold, warm = first_tokens(engine, settings, texts)
        cached = fan_out(engine, settings, texts)
    with Engine(model, replace(config, prefix_caching=False), say) as engine:
        engine.warm_up()
        plain = fan_out(engine, settings, texts)
    report(settings, cold, warm, cached, plain)


def requests_over(
    prefix: tuple[int, ...], texts: Iterator[tuple[int, ...]], count: int, settings: Settings, output_tokens: int
) -> list[Request]:
    """`count` greedy requests that begin with `prefix` and end each in its own way."""
    return [greedy((*prefix, *next(texts)[: settings.tail_tokens]), output_tokens) for _ in range(count)]


def first_tokens(
    engine: Engine, settings: Settings, texts: Iterator[tuple[int, ...]]
) -> tuple[list[float], list[float]]:
    """Seconds to the first token of lone requests: with new prefixes, and with prefixes sent just before."""
    cold, warm = [], []
    for _ in tqdm(range(settings.repeats), desc="first tokens", unit="prefix"):
        prefix = next(texts)[: settings.prefix_tokens]
        first, second = requests_over(prefix, texts, 2, settings, output_tokens=1)
        cold.append(_seconds(engine, first))
        warm.append(_seconds(engine, second))
    return cold, warm


def _seconds(engine: Engine, request: Request) -> float:
    news: SimpleQueue[list[Output]] = SimpleQueue()
    begun = time.perf_counter()
    engine.submit(request, news.put)
    news.get()
    return time.perf_counter() - begun


def fan_out(engine: Engine, settings: Settings, texts: Iterator[tuple[int, ...]]) -> FanOut:
    """Sends a burst over a new prefix and waits for all of it."""
    prefix = next(texts)[: settings.prefix_tokens]
    requests = requests_over(prefix, texts, settings.fan_out, settings, settings.output_tokens)
    before, begun = engine.snapshot(), time.perf_counter()
    engine.generate(requests)
    seconds, after = time.perf_counter() - begun, engine.snapshot()
    return FanOut(seconds, after.prefill_tokens - before.prefill_tokens, after.prefix_hits - before.prefix_hits)


def report(settings: Settings, cold: list[float], warm: list[float], cached: FanOut, plain: FanOut) -> None:
    """Prints and writes what came out."""
    generated = settings.fan_out * settings.output_tokens
    rows = [
        {
            "fan-out": name,
            "seconds": f"{result.seconds:.2f}",
            "output tokens/s": f"{generated / result.seconds:.0f}",
            "prefill tokens": result.prefill_tokens,
            "hits": result.hits,
        }
        for name, result in (("prefix cache", cached), ("without", plain))
    ]
    sooner = median(cold) / median(warm)
    print(table(rows))
    print(f"\nFirst token: {median(cold) * 1e3:.0f} ms with a new prefix, {median(warm) * 1e3:.0f} ms with a warm one.")
    print(f"{CLAIM:.0f} times sooner {'holds' if sooner >= CLAIM else 'does not hold'}: {sooner:.1f} times (medians).")
    write_json(
        settings.out / "prefix.json",
        {
            "settings": settings_of(settings),
            "cold_first_token_seconds": cold,
            "warm_first_token_seconds": warm,
            "fan_out": {"cached": vars(cached), "plain": vars(plain)},
        },
    )


if __name__ == "__main__":
    run(main, Settings, __doc__)
