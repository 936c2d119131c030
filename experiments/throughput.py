"""Does continuous batching serve the same prompts at six times the serial rate or more?

Runs the same real prompts through one engine, first one at a time, then by 2, 4, ... 64 clients, each of which sends
its next request when the last has ended. Greedy; each request has its own number of tokens to generate, the same at
every level. Throughput counts while every client is busy. Writes throughput.json and throughput.png.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.load import LoadResult, chat_prompts, closed_loop, make_requests
from experiments.report import RESULTS, run, save_plot, say, settings_of, table, write_json
from jbatch.config import DEFAULT_MODEL, EngineConfig
from jbatch.engine import Engine
from jbatch.models.llama import LlamaConfig
from jbatch.models.load import load_model

CLAIM = 6.0
"""Throughput over serial, the lower end of the 6 to 10 times that continuous batching is said to give."""

JUDGED_AT = 32
"""Concurrency at which the claim is judged."""


@dataclass(frozen=True)
class Settings:
    """Throughput, latency and padding against concurrency, serial first."""

    model: str = DEFAULT_MODEL
    """Name, path or hub id of the model."""
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Requests at once; 1 is the serial baseline."""
    requests: int = 128
    """Requests at each level; more than twice the clients, or little is measured."""
    output_tokens: int = 128
    """Tokens a request generates on average, from half to one and a half times as many."""
    quick: bool = False
    """A short look: fewer levels, requests and tokens."""
    out: Path = RESULTS
    """Folder for the JSON and the plot."""


def main(settings: Settings) -> None:
    """Runs every level and writes the results."""
    if settings.quick:
        settings = replace(settings, concurrency=(1, 8, 32), requests=80, output_tokens=16)
    loaded = load_model(settings.model, report=say)
    requests = make_requests(chat_prompts(loaded.tokenizer, settings.requests), settings.output_tokens)
    config = EngineConfig(prefix_caching=False)  # every level sends the same prompts
    with Engine(loaded.for_engine(), config, say) as engine:
        engine.warm_up()
        results = [closed_loop(engine, requests, level) for level in settings.concurrency]
    peak = matmul_peak()
    rows = [_row(result, results[0], loaded.config, peak) for result in results]
    prompt_tokens = [len(request.prompt) for request in requests]
    write_json(
        settings.out / "throughput.json",
        {
            "settings": settings_of(settings),
            "prompt_tokens": {"mean": float(np.mean(prompt_tokens)), "max": max(prompt_tokens)},
            "matmul_peak_gflops": peak / 1e9,
            "levels": rows,
        },
    )
    plot(rows, settings.out / "throughput.png")
    print(table([_rounded(row) for row in rows]))
    print(f"\n{verdict(rows)}\nwritten: {settings.out / 'throughput.json'}, {settings.out / 'throughput.png'}")


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the rows say of the claim, in a sentence."""
    judged = min(rows, key=lambda row: abs(row["concurrency"] - JUDGED_AT))
    holds = "holds" if judged["times serial"] >= CLAIM else "does not hold"
    times, level = judged["times serial"], judged["concurrency"]
    return f"Batching gives {CLAIM:.0f} times the serial throughput: {holds}, {times:.2f} times at concurrency {level}."


def matmul_peak() -> float:
    """Measured ceiling of arithmetic, in float operations per second: a large square matmul."""
    size = 2048
    x = jnp.ones((size, size), jnp.float32)
    multiply = jax.jit(lambda x: x @ x)
    multiply(x).block_until_ready()
    seconds = []
    for _ in range(7):
        begun = time.perf_counter()
        multiply(x).block_until_ready()
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / min(seconds)


def _row(result: LoadResult, serial: LoadResult, model: LlamaConfig, peak: float) -> dict[str, Any]:
    """One level's figures; times in seconds.

    Utilisation counts the weights' multiplications of tokens computed, padding and attention left out, against the
    measured ceiling.
    """
    row: dict[str, Any] = {
        "concurrency": result.concurrency,
        "output tokens/s": result.output_tokens / result.seconds,
        "times serial": result.output_tokens / result.seconds / (serial.output_tokens / serial.seconds),
    }
    for name in ("ttft", "tpot"):
        for q in (50, 99):
            row[f"{name} p{q} s"] = result.percentile(name, q)
    work = 2 * (model.layer_weights * result.computed_tokens + model.head_weights * result.output_tokens)
    row["padding"] = result.padding_share
    row["utilisation"] = work / result.seconds / peak
    return row


def _rounded(row: dict[str, Any]) -> dict[str, str]:
    digits = {"concurrency": "d", "output tokens/s": ".1f", "times serial": ".2f"}
    return {name: format(value, digits.get(name, ".3f")) for name, value in row.items()}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput against the claim, and latency, over concurrency."""
    levels = [row["concurrency"] for row in rows]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(levels, [row["output tokens/s"] for row in rows], "o-", label="measured")
    serial = rows[0]["output tokens/s"]
    left.axhline(CLAIM * serial, color="tab:gray", linestyle="--", label=f"{CLAIM:.0f} x serial")
    left.set(title="Throughput", ylabel="output tokens/s", ylim=(0, None))
    for row in rows:
        left.annotate(f"{row['times serial']:.1f}x", (row["concurrency"], row["output tokens/s"]), (0, -14),
                      textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
    for name in ("ttft", "tpot"):
        (line,) = right.plot(levels, [row[f"{name} p50 s"] for row in rows], "o-", label=f"{name.upper()} p50")
        right.plot(levels, [row[f"{name} p99 s"] for row in rows], "^:", color=line.get_color(),
                   label=f"{name.upper()} p99")  # fmt: skip
    right.set(title="Latency", ylabel="seconds", yscale="log")
    for axes in (left, right):
        axes.set(xlabel="concurrent requests", xscale="log", xticks=levels, xticklabels=levels)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    save_plot(figure, path)


if __name__ == "__main__":
    run(main, Settings, __doc__)
