"""Where does a step's time go, and how does it grow? Times steps by bucket and context, and splits some into parts.

Fills slots to a context, then repeats a bucket's step. A trace of XLA's operations splits it into matmul, attention,
sampling and schedule, as far as the trace names them; parts that run beside each other add up to more than the step.
Writes profile.json and profile.png: decode steps over rows at each context. The JSON's steps are what a simulator fits
its step times to.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from experiments.load import chat_prompts
from experiments.prefilled import prefilled
from experiments.report import RESULTS, run, save_plot, say, settings_of, table, write_json
from jbatch.config import DEFAULT_MODEL, Bucket, EngineConfig
from jbatch.core.inbox import InboxBuilder
from jbatch.core.model import Model
from jbatch.core.state import init_state
from jbatch.core.step import step
from jbatch.models.load import load_model
from jbatch.programs import keep_compiled_programs

EDGE = 1.3
"""Most that one row more may cost, at the edge of a bucket."""

PARTS = ("matmul", "attention", "sampling", "schedule", "rest", "untraced")


@dataclass(frozen=True)
class Settings:
    """Decode steps by rows and context, and the parts of some."""

    model: str = DEFAULT_MODEL
    """Name, path or hub id of the model."""
    running: int = 64
    """Most decode rows."""
    contexts: tuple[int, ...] = (128, 256, 384)
    """Tokens each slot holds at first."""
    parts: tuple[int, ...] = (1, 8, 32, 64)
    """Decode rows of the steps that are split, at the first context."""
    repeats: int = 9
    """Steps of each kind; medians count."""
    quick: bool = False
    """A short look: few rows, one context."""
    out: Path = RESULTS
    """Folder for the JSON and the plot."""


def main(settings: Settings) -> None:
    """Times, splits, plots and writes."""
    if settings.quick:
        settings = replace(settings, running=8, contexts=(128,), parts=(8,), repeats=5)
    loaded = load_model(settings.model, report=say)
    config = replace(EngineConfig(), max_running=settings.running)
    prompts = chat_prompts(loaded.tokenizer, settings.running)
    keep_compiled_programs()
    rows: list[dict[str, float]] = []
    splits: list[dict[str, Any]] = []
    for bucket in (bucket for bucket in config.buckets if not bucket.chunks):
        timed = Step(loaded.for_engine(), config, bucket)
        for context in settings.contexts:
            timed.fill([(prompt * context)[:context] for prompt in prompts[: bucket.decode]])
            seconds = median(timed.run() for _ in range(settings.repeats))
            say(f"{bucket.decode} decode rows of {context} tokens: {seconds * 1e3:.1f} ms")
            rows.append({"context": context, "decode rows": bucket.decode, "ms": seconds * 1e3})
            if context == settings.contexts[0] and bucket.decode in settings.parts:
                splits.append({"decode rows": bucket.decode, **split(timed)})
    write_json(settings.out / "profile.json", {"settings": settings_of(settings), "steps": rows, "parts": splits})
    plot(rows, settings.out / "profile.png")
    print(table([{name: format(value, ".4g") for name, value in row.items()} for row in rows]))
    print(table(splits))
    print("\n" + verdict(rows))


class Step:
    """The step of one bucket, compiled as the engine compiles it."""

    def __init__(self, model: Model, config: EngineConfig, bucket: Bucket) -> None:
        self._model, self._config = model, config
        self._inbox = jnp.asarray(InboxBuilder(config).buffer)
        self._state = init_state(config, model.init_kv(config.num_pages, config.page_size))
        whole = partial(step, forward=model.forward, config=config, bucket=bucket)
        self._program = jax.jit(whole, donate_argnums=1).lower(model.params, self._state, self._inbox).compile()
        self.text = self._program.as_text() or ""

    def fill(self, prompts: list[tuple[int, ...]]) -> None:
        """Begins anew with a slot for each prompt, computed; and runs once."""
        self._state = prefilled(self._config, self._state.kv, prompts)
        self.run()

    def run(self) -> float:
        """Seconds of one step."""
        begun = time.perf_counter()
        self._state, outbox = self._program(self._model.params, self._state, self._inbox)
        outbox.block_until_ready()
        return time.perf_counter() - begun


def split(timed: Step) -> dict[str, str]:
    """Milliseconds of one step by part, and the share of sampling and schedule."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step_ms = 1e3 * timed.run()
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    part_of = {name: _part(scope) for name, scope in re.findall(r"%?([\w.-]+) = .*op_name=\"([^\"]*)\"", timed.text)}
    spent: dict[str, float] = defaultdict(float)
    for name, milliseconds in _own_time(events):
        if name in part_of:
            spent[part_of[name]] += milliseconds
    spent["untraced"] = max(0.0, step_ms - sum(spent.values()))
    shares = (spent["sampling"] + spent["schedule"]) / sum(spent.values())
    return {part: f"{spent[part]:.2f}" for part in PARTS} | {"schedule + sampling": f"{shares:.1%}"}


def _own_time(events: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Names and milliseconds of a trace's events, each without the events inside it."""
    result: list[tuple[str, float]] = []
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            by_thread[event["tid"]].append(event)
    for thread in by_thread.values():
        inside: list[tuple[float, int]] = []  # end of each event under way, and its place in the result
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while inside and inside[-1][0] <= event["ts"]:
                inside.pop()
            if inside:
                name, left = result[inside[-1][1]]
                result[inside[-1][1]] = name, left - event["dur"] / 1e3
            inside.append((event["ts"] + event["dur"], len(result)))
            result.append((event["name"], event["dur"] / 1e3))
    return result


def _part(scope: str) -> str:
    """Part of a step that an operation belongs to, by the scopes it was written in."""
    for part, mark in (("attention", "attention"), ("sampling", "sample"), ("schedule", "schedule")):
        if f"/{mark}/" in scope:
            return part
    return "matmul" if "dot_general" in scope else "rest"


def verdict(rows: list[dict[str, float]]) -> str:
    """What the worst edge of a bucket costs."""
    lines = []
    for context in sorted({row["context"] for row in rows}):
        steps = [(row["decode rows"], row["ms"]) for row in rows if row["context"] == context]
        ratio, rows_before = max(((b[1] / a[1], a[0]) for a, b in itertools.pairwise(steps)), default=(1.0, 0))
        holds = "holds" if ratio <= EDGE else "does not hold"
        lines.append(
            f"At {context:.0f} tokens one row more costs {ratio:.2f} times the step at most, behind {rows_before:.0f} "
            f"rows: that no edge costs more than {EDGE} {holds}."
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Step time over decode rows, a line for each context, as stairs of the buckets."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for context in sorted({row["context"] for row in rows}):
        steps = [row for row in rows if row["context"] == context]
        edges = [0.0] + [row["decode rows"] for row in steps]
        axes.stairs([row["ms"] for row in steps], edges, baseline=None, label=f"{context:.0f} tokens each")
    axes.set(xlabel="decode rows in use", ylabel="milliseconds a step", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    save_plot(figure, path)


if __name__ == "__main__":
    run(main, Settings, __doc__)
