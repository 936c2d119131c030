"""Does the adaptive batch size hold a latency target, and what does that cost in throughput?

Keeps many clients busy, first under fixed limits of running requests, then under targets for the time per output token
(`--slo-tpot`), with no limit set. Writes adaptive.json and adaptive.png: throughput over time per output token, the
curve of the fixed limits and the points that the targets lead to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.load import chat_prompts, closed_loop, make_requests
from experiments.report import RESULTS, run, save_plot, say, settings_of, table, write_json
from jbatch.config import DEFAULT_MODEL, EngineConfig
from jbatch.controls import Controls
from jbatch.engine import Engine
from jbatch.models.load import load_model
from jbatch.request import Request


@dataclass(frozen=True)
class Settings:
    """Fixed limits against latency targets, under the same load."""

    model: str = DEFAULT_MODEL
    """Name, path or hub id of the model."""
    limits: tuple[int, ...] = (8, 16, 24, 32)
    """Fixed limits of running requests; the last one is all that the engine runs."""
    targets: tuple[float, ...] = ()
    """Targets for the mean time per output token, in milliseconds; none: 10% above what each limit but the last led to,
    so that the limit holds it and larger ones do not."""
    clients: int = 48
    """Requests under way at any time, more than run."""
    requests: int = 96
    """Requests of each run."""
    output_tokens: int = 64
    """Tokens a request generates on average, from half to one and a half times as many."""
    quick: bool = False
    """A short look: fewer limits, targets, requests and tokens."""
    out: Path = RESULTS
    """Folder for the JSON and the plot."""


def main(settings: Settings) -> None:
    """Runs every limit and every target, and writes the results."""
    if settings.quick:
        settings = replace(settings, limits=(8, 32), clients=40, requests=60, output_tokens=24)
    loaded = load_model(settings.model, report=say)
    requests = make_requests(chat_prompts(loaded.tokenizer, settings.requests), settings.output_tokens)
    config = EngineConfig(prefix_caching=False, max_running=settings.limits[-1])
    with Engine(loaded.for_engine(), config, say) as engine:
        engine.warm_up()
        fixed = [
            {"limit": limit, **measure(engine, requests, settings, Controls(running_limit=limit))}
            for limit in settings.limits
        ]
        targets = settings.targets or [round(1.1 * row["tpot mean ms"], 1) for row in fixed[:-1]]
        adaptive = [
            {"target ms": target, **measure(engine, requests, settings, Controls(slo_tpot=(target,)))}
            for target in targets
        ]
    result = {"settings": settings_of(settings), "fixed": fixed, "adaptive": adaptive}
    write_json(settings.out / "adaptive.json", result)
    plot(fixed, adaptive, settings.out / "adaptive.png")
    print(table([_rounded(row) for row in fixed]))
    print(table([_rounded(row) for row in adaptive]))
    print("\n" + "\n".join(verdict(row, fixed) for row in adaptive))
    print(f"written: {settings.out / 'adaptive.json'}, {settings.out / 'adaptive.png'}")


def measure(engine: Engine, requests: list[Request], settings: Settings, controls: Controls) -> dict[str, float]:
    """One run's figures, after a shorter one under the same controls, in which the controller learns."""
    engine.set_controls(controls)
    closed_loop(engine, requests[: settings.requests // 2], settings.clients)
    result = closed_loop(engine, requests, settings.clients)
    tpot = [line.tpot for line in result.timelines]
    return {
        "output tokens/s": result.output_tokens / result.seconds,
        "tpot mean ms": float(np.nanmean(tpot)) * 1e3,
        "tpot p99 ms": result.percentile("tpot", 99) * 1e3,
        "ttft p50 s": result.percentile("ttft", 50),
    }


def verdict(row: dict[str, float], fixed: list[dict[str, float]]) -> str:
    """What a target led to, beside the fixed limits."""
    target, mean, rate = row["target ms"], row["tpot mean ms"], row["output tokens/s"]
    held = [other for other in fixed if other["tpot mean ms"] <= target]
    kept = "holds" if mean <= target else "misses"
    said = f"A target of {target:.0f} ms: the controller {kept} it ({mean:.0f} ms) at {rate:.0f} tokens/s; "
    if not held:
        return said + "no fixed limit does."
    best = max(held, key=lambda other: other["output tokens/s"])
    missed = [str(other["limit"]) for other in fixed if other not in held]
    return (
        said + f"the best fixed limit that holds it is {best['limit']}, at {best['output tokens/s']:.0f}"
        f" ({rate / best['output tokens/s']:.2f} times that); missed by {', '.join(missed) or 'none'}."
    )


def _rounded(row: dict[str, Any]) -> dict[str, str]:
    return {name: format(value, ".2f" if name.endswith(" s") else ".0f") for name, value in row.items()}


def plot(fixed: list[dict[str, float]], adaptive: list[dict[str, float]], path: Path) -> None:
    """Throughput over time per output token."""

    def points(rows: list[dict[str, float]]) -> tuple[list[float], list[float]]:
        return [row["tpot mean ms"] for row in rows], [row["output tokens/s"] for row in rows]

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*points(fixed), "o-", color="tab:gray", label="fixed limit of running requests")
    for row in fixed:
        at = row["tpot mean ms"], row["output tokens/s"]
        axes.annotate(f"{row['limit']}", at, (6, -10), textcoords="offset points", fontsize=8)
    for i, row in enumerate(adaptive):
        colour = f"C{i}"
        axes.axvline(row["target ms"], color=colour, linestyle="--", linewidth=1)
        axes.plot(*points([row]), "*", color=colour, markersize=14, label=f"target of {row['target ms']:.0f} ms")
    axes.set(xlabel="mean time per output token, ms", ylabel="output tokens/s", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    save_plot(figure, path)


if __name__ == "__main__":
    run(main, Settings, __doc__)
