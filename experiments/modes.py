"""How much does continuous batching gain over batches that run to their end?

Sends the same requests at the same times to one engine under each way of batching: arrivals, prompt lengths and output
lengths of a real service, faster than any of them can serve, so that the time until the last one ends tells throughput.
Writes modes-WORKLOAD.json and modes-WORKLOAD.png.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.load import Workload, azure_arrivals, greedy, open_loop, padding_share, percentile, pieces
from experiments.report import RESULTS, run, save_plot, say, settings_of, table, write_json
from jbatch.config import DEFAULT_MODEL, EngineConfig
from jbatch.controls import Batching, Controls
from jbatch.engine import Engine
from jbatch.models.load import load_model
from jbatch.request import Request

CLAIM = 2.0
"""Throughput of continuous batching over static batches, at least."""


@dataclass(frozen=True)
class Settings:
    """The same arrivals under every way of batching."""

    model: str = DEFAULT_MODEL
    """Name, path or hub id of the model."""
    workload: Workload = "code"
    """Whose arrivals and lengths: of a code assistant (short answers, few long ones) or of a chat service."""
    requests: int = 320
    """Requests sent, at most 512."""
    rate: float = 16.0
    """Arrivals a second, on average."""
    running: int = 32
    """Most requests in a batch."""
    longest_prompt: int = 32
    """Longer prompts are cut to so many tokens: what is left of one that begins with a cached prefix, say."""
    longest_output: int = 512
    """Longer outputs are cut to so many tokens."""
    batchings: tuple[Batching, ...] = ("continuous", "static")
    """Ways of batching to compare, of continuous, static, dynamic, threshold and serial."""
    quick: bool = False
    """A short look: fewer and shorter requests."""
    out: Path = RESULTS
    """Folder for the JSON and the plot."""


def main(settings: Settings) -> None:
    """Runs every way of batching and writes the results."""
    if settings.quick:
        settings = replace(settings, requests=48, rate=20.0, running=16, longest_prompt=64, longest_output=96)
    loaded = load_model(settings.model, report=say)
    sends = make_sends(settings, pieces(loaded.tokenizer))
    rows = []
    config = EngineConfig(prefix_caching=False, max_running=settings.running)
    with Engine(loaded.for_engine(), config, say) as engine:
        engine.warm_up()
        for batching in settings.batchings:
            rows.append(measure(engine, sends, batching))
            print(table([_rounded(rows[-1])]), flush=True)
    result = {"settings": settings_of(settings), "modes": rows}
    name = f"modes-{settings.workload}"
    write_json(settings.out / f"{name}.json", result)
    plot(rows, settings.out / f"{name}.png")
    print(table([_rounded(row) for row in rows]))
    print(f"\n{verdict(rows)}\nwritten: {settings.out / name}.json, .png")


def make_sends(settings: Settings, texts: Iterator[tuple[int, ...]]) -> list[tuple[float, Request]]:
    """When to send what: greedy requests that do not stop by themselves."""
    arrivals = azure_arrivals(settings.workload, settings.requests)
    pace = settings.requests / settings.rate / arrivals[-1].seconds
    return [
        (
            arrival.seconds * pace,
            greedy(
                next(texts)[: min(arrival.prompt_tokens, settings.longest_prompt)],
                min(arrival.output_tokens, settings.longest_output),
            ),
        )
        for arrival in arrivals
    ]


def measure(engine: Engine, sends: list[tuple[float, Request]], batching: Batching) -> dict[str, Any]:
    """One way of batching's figures; times in seconds."""
    engine.set_controls(Controls(batching=batching))
    before, begun = engine.snapshot(), time.perf_counter()
    timelines = open_loop(engine, sends, batching)
    seconds, after = time.perf_counter() - begun, engine.snapshot()
    engine.set_controls(Controls())
    return {
        "batching": batching,
        "seconds": seconds,
        "output tokens/s": sum(len(line.tokens) for line in timelines) / seconds,
        **{f"{n} p{q} s": percentile(timelines, n, q) for n in ("ttft", "tpot") for q in (50, 99)},
        "padding": padding_share(before, after),
    }


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the rows say of the claim, in a sentence."""
    rates = {row["batching"]: row["output tokens/s"] for row in rows}
    if not {"continuous", "static"} <= rates.keys():
        return "Run continuous and static to judge the claim."
    times = rates["continuous"] / rates["static"]
    holds = "holds" if times >= CLAIM else "does not hold"
    return f"Continuous batching gives {CLAIM:.0f} times the throughput of static batches: {holds}, {times:.2f} times."


def _rounded(row: dict[str, Any]) -> dict[str, str]:
    digits = {"seconds": ".0f", "output tokens/s": ".0f", "padding": ".1%"}
    return {name: v if isinstance(v, str) else format(v, digits.get(name, ".3f")) for name, v in row.items()}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput and time to the first token of each way of batching."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [row["batching"] for row in rows][::-1]
    bars = left.barh(names, [row["output tokens/s"] for row in rows][::-1])
    left.bar_label(bars, fmt="%.0f", padding=3)
    left.set(title="Throughput", xlabel="output tokens/s")
    for q, colour in ((99, "tab:gray"), (50, "tab:blue")):
        right.barh(names, [row[f"ttft p{q} s"] for row in rows][::-1], color=colour, label=f"p{q}")
    right.set(title="Time to the first token", xlabel="seconds")
    right.legend()
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    save_plot(figure, path)


if __name__ == "__main__":
    run(main, Settings, __doc__)
