"""Does a flood of one tenant's requests keep another waiting?

A quiet tenant sends a request now and then: first alone, then beside a tenant that always has more requests waiting
than run, under each policy. Judged by the quiet tenant's time to the first token. Writes fairness.json and
fairness.png.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.load import Timeline, greedy, open_loop, output_lengths, percentile, pieces
from experiments.report import RESULTS, run, save_plot, say, settings_of, table, write_json
from jbatch.config import DEFAULT_MODEL, EngineConfig
from jbatch.controls import Controls, Policy
from jbatch.engine import Engine
from jbatch.models.load import load_model
from jbatch.request import Output, Request

CLAIM = 2.0
"""How many times longer than alone the quiet tenant's first token may take at the 99th percentile under "fair"."""


@dataclass(frozen=True)
class Settings:
    """A quiet tenant alone, and beside a flooding one under each policy."""

    model: str = DEFAULT_MODEL
    """Name, path or hub id of the model."""
    policies: tuple[Policy, ...] = ("fcfs", "fair")
    """Policies to compare."""
    requests: int = 48
    """Requests of the quiet tenant in each run."""
    rate: float = 0.3
    """Its arrivals a second, at random times."""
    prompt_tokens: int = 384
    """Length of its prompts."""
    flood: int = 96
    """Requests that the other tenant has under way at any time."""
    flood_prompt_tokens: int = 64
    """Length of the other tenant's prompts."""
    output_tokens: int = 64
    """Tokens that each request generates on average."""
    running: int = 16
    """Most requests that run at once."""
    quick: bool = False
    """A short look: fewer requests."""
    out: Path = RESULTS
    """Folder for the JSON and the plot."""


def main(settings: Settings) -> None:
    """Runs alone and under every policy, and writes the results."""
    if settings.quick:
        settings = replace(settings, requests=16, rate=1.5)
    loaded = load_model(settings.model, report=say)
    texts = pieces(loaded.tokenizer)
    config = EngineConfig(prefix_caching=False, max_running=settings.running, max_slots=64)
    runs: dict[str, list[Timeline]] = {}
    with Engine(loaded.for_engine(), config, say) as engine:
        engine.warm_up()
        runs["alone"] = open_loop(engine, quiet(settings, texts), "alone")
        for policy in settings.policies:
            engine.set_controls(Controls(policy=policy))
            with flood(engine, settings, texts):
                runs[policy] = open_loop(engine, quiet(settings, texts), policy)
    rows = [_row(name, lines, runs["alone"]) for name, lines in runs.items()]
    write_json(settings.out / "fairness.json", {"settings": settings_of(settings), "runs": rows})
    plot(runs, settings.out / "fairness.png")
    print(table([_rounded(row) for row in rows]))
    print(f"\n{verdict(rows)}\nwritten: {settings.out / 'fairness.json'}, {settings.out / 'fairness.png'}")


def quiet(settings: Settings, texts: Iterator[tuple[int, ...]]) -> list[tuple[float, Request]]:
    """The quiet tenant's requests at exponential intervals; the same times in every run, other texts each time."""
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(1 / settings.rate, settings.requests))
    lengths = output_lengths(settings.output_tokens, settings.requests)
    return [
        (float(at), greedy(next(texts)[: settings.prompt_tokens], length, "quiet"))
        for at, length in zip(times, lengths, strict=True)
    ]


@contextmanager
def flood(engine: Engine, settings: Settings, texts: Iterator[tuple[int, ...]]) -> Iterator[None]:
    """Keeps `settings.flood` requests of another tenant under way, until the block ends."""
    lock = threading.Lock()
    lengths = itertools.cycle(output_lengths(settings.output_tokens, 256, seed=2))
    prompts = itertools.cycle([next(texts)[: settings.flood_prompt_tokens] for _ in range(256)])
    live: set[int] = set()
    over = threading.Event()

    def send() -> None:
        live.add(engine.submit(greedy(next(prompts), next(lengths), "flood"), hear))

    def hear(news: list[Output]) -> None:
        with lock:
            for output in news:
                if output.finish_reason is not None:
                    live.discard(output.request_id)
                    if not over.is_set():
                        send()

    with lock:
        for _ in range(settings.flood):
            send()
    try:
        yield
    finally:
        over.set()
        with lock:
            left = list(live)
        for id_ in left:
            engine.cancel(id_)


def _row(name: str, lines: list[Timeline], alone: list[Timeline]) -> dict[str, Any]:
    figures = {f"ttft p{q} s": percentile(lines, "ttft", q) for q in (50, 90, 99)}
    times = percentile(lines, "ttft", 99) / percentile(alone, "ttft", 99)
    return {"quiet tenant": name, **figures, "p99 over alone": times, "tpot p50 s": percentile(lines, "tpot", 50)}


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the rows say of the claim, in a sentence."""
    times = {row["quiet tenant"]: row["p99 over alone"] for row in rows}
    said = ", ".join(f"{times[name]:.1f} times under {name}" for name in times if name != "alone")
    if not {"fair", "fcfs"} <= times.keys():
        return f"Run fair and fcfs to judge the claim: {said}."
    holds = "holds" if times["fair"] <= CLAIM < times["fcfs"] else "does not hold"
    return f"That only fair keeps the quiet tenant's p99 within {CLAIM:.0f} times of alone {holds}: {said}."


def _rounded(row: dict[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else format(value, ".3f") for name, value in row.items()}


def plot(runs: dict[str, list[Timeline]], path: Path) -> None:
    """The share of requests whose first token had come, over time."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, lines in runs.items():
        axes.ecdf([line.ttft for line in lines], label=name)
    axes.set(title="The quiet tenant", xlabel="time to the first token, seconds", ylabel="share of requests")
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    save_plot(figure, path)


if __name__ == "__main__":
    run(main, Settings, __doc__)
