"""How fast is jbatch beside other servers?

Sends the same requests over HTTP to any OpenAI-compatible servers: closed loops, Poisson arrivals, and requests at once
over one common prefix. One server is measured at a time, in rounds, each in another order, so that a machine that
drifts does so for all alike; figures are medians over the rounds. A server that has a command is started for its turn
only. Nothing else should run. Writes peers.json and peers.png.

  python -m experiments.peers --url jbatch=http://127.0.0.1:8000 other=http://127.0.0.1:8001
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments.http_load import Client, Load, LoadResult, Texts, drive
from experiments.load import percentile
from experiments.report import RESULTS, run, save_plot, say, settings_of, table, write_json
from experiments.servers import Server, parse_servers
from jbatch.config import DEFAULT_MODEL
from jbatch.models.load import find

WARM_UP_TOKENS = 16
"""Length of the answers before anything is measured."""


@dataclass(frozen=True)
class Settings:
    """The same requests to several servers, one at a time."""

    url: tuple[str, ...] = ()
    """NAME=URL of each server."""
    command: tuple[str, ...] = ()
    """NAME=COMMAND that starts a server for its turn, which is stopped afterwards."""
    wait: float = 300.0
    """Seconds that a started server may take until it answers."""
    settle: float = 0.0
    """Seconds to leave a started server alone once it answers: some compile on."""
    rounds: int = 3
    """Turns of each server."""
    concurrency: tuple[int, ...] = (1, 8, 32)
    """Clients at once in the closed loops."""
    requests_each: int = 3
    """Requests of each of those clients, at least 2: throughput counts until the last one is sent."""
    prompt_tokens: int = 128
    """Length of each prompt, which begins like no other."""
    output_tokens: int = 128
    """Tokens each request generates."""
    rate: float = 1.0
    """Poisson arrivals a second, on average; 0 leaves them out."""
    arrivals: int = 32
    """How many arrive."""
    fan_out: int = 32
    """Requests at once over a prefix that none has sent before; 0 leaves them out."""
    prefix_tokens: int = 512
    """Length of that prefix."""
    tail_tokens: int = 32
    """What each of those requests adds to the prefix."""
    fan_out_tokens: int = 64
    """Tokens each of those requests generates."""
    model: str = DEFAULT_MODEL
    """Model that all of them serve: its tokenizer cuts the prompts."""
    quick: bool = False
    """A short look: one round, fewer and shorter requests."""
    out: Path = RESULTS
    """Folder for the JSON and the plot."""


def main(settings: Settings) -> None:
    """Measures every server and writes the results."""
    if settings.quick:
        settings = replace(settings, rounds=1, requests_each=2, output_tokens=16, arrivals=8, fan_out_tokens=16)
    servers = parse_servers(settings.url, settings.command)
    texts = Texts(find(settings.model, say).open().tokenizer)
    measured = asyncio.run(measure(settings, servers, texts))
    rows = summary(measured)
    write_json(settings.out / "peers.json", {"settings": settings_of(settings), "rows": rows, "rounds": measured})
    plot(rows, settings.out / "peers.png")
    print(table([_rounded(row) for row in rows]))
    print(f"\n{verdict(rows)}\nwritten: {settings.out / 'peers.json'}, {settings.out / 'peers.png'}")


async def measure(settings: Settings, servers: list[Server], texts: Texts) -> list[dict[str, Any]]:
    """One row for each load of each server in each round."""
    rows = []
    for number in range(settings.rounds):
        warm_up, *loads = make_loads(settings, texts, number)  # new ones: a server that runs on has cached the last
        turn = number % len(servers)
        for server in servers[turn:] + servers[:turn]:
            async with server.up(settings.wait, settings.settle) as client:
                await drive(client, warm_up)
                for load in loads:
                    rows.append({"round": number, **await measure_load(client, load)})
    return rows


def make_loads(settings: Settings, texts: Texts, seed: int) -> Iterator[Load]:
    """The loads of a round, a short one to warm up first."""

    def prompts(count: int) -> list[str]:
        return [texts.cut(settings.prompt_tokens) for _ in range(count)]

    most = max((*settings.concurrency, settings.fan_out, 1))
    yield Load("warm-up", prompts(most), WARM_UP_TOKENS, most)
    for clients in settings.concurrency:
        yield Load(f"{clients} at once", prompts(clients * settings.requests_each), settings.output_tokens, clients)
    if settings.rate:
        gaps = np.random.default_rng(seed).exponential(1 / settings.rate, settings.arrivals)
        name, due = f"{settings.rate:g} arrivals/s", tuple(np.cumsum(gaps).tolist())
        yield Load(name, prompts(settings.arrivals), settings.output_tokens, due=due)
    if settings.fan_out:
        over = texts.over_prefix(settings.fan_out, settings.prefix_tokens, settings.tail_tokens)
        yield Load(f"fan-out of {settings.fan_out}", over, settings.fan_out_tokens, settings.fan_out)


async def measure_load(client: Client, load: Load) -> dict[str, Any]:
    """One load's figures; times in seconds."""
    result = await drive(client, load)
    tokens = sum(len(line.tokens) for line in result.timelines)
    if tokens < (expected := len(load.prompts) * load.output_tokens):
        say(f"{client.name}, {load.name}: {tokens} of {expected} tokens came, some answers ended early")
    return {
        "load": load.name,
        "server": client.name,
        "output tokens/s": result.tokens_per_second(_judged_until(load, result)),
        **{f"{n} p{q} s": percentile(result.timelines, n, q) for n in ("ttft", "tpot") for q in (50, 99)},
        "seconds": result.ended - result.begun,
        "output_tokens": tokens,
        "prompt_tokens": sorted(result.prompt_tokens),
        "client cpu": result.client_share,
    }


def _judged_until(load: Load, result: LoadResult) -> float:
    """While every client is busy, where clients send one request after another."""
    return result.drained if len(load.prompts) > load.concurrency > 0 else result.ended


def summary(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, servers of a load side by side in the order of the first round."""
    loads, servers = (list(dict.fromkeys(row[name] for row in measured)) for name in ("load", "server"))
    figures = [name for name, value in measured[0].items() if isinstance(value, float)]
    rows = []
    for load in loads:
        for server in servers:
            ours = [row for row in measured if (row["load"], row["server"]) == (load, server)]
            rows.append({"load": load, "server": server, **{name: median(r[name] for r in ours) for name in figures}})
    return rows


def verdict(rows: list[dict[str, Any]]) -> str:
    """The first server's throughput against the best other one, load by load."""
    ours, *others = dict.fromkeys(row["server"] for row in rows)
    if not others:
        return "Give more than one --url to compare."
    parts = []
    for load in dict.fromkeys(row["load"] for row in rows):
        rates = {row["server"]: row["output tokens/s"] for row in rows if row["load"] == load}
        best = max(others, key=lambda name: rates[name])
        parts.append(f"{rates[ours] / rates[best]:.2f} times {best} ({load})")
    return f"{ours} generates " + ", ".join(parts) + "."


def _rounded(row: dict[str, Any]) -> dict[str, str]:
    digits = {"output tokens/s": ".0f", "seconds": ".1f", "client cpu": ".1%"}
    return {name: v if isinstance(v, str) else format(v, digits.get(name, ".3f")) for name, v in row.items()}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput and latency of each server under each load."""
    servers, loads = (list(dict.fromkeys(row[name] for row in rows)) for name in ("server", "load"))
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = {"output tokens/s": "Throughput", "ttft": "Time to the first token", "tpot": "Time per token after it"}
    width = 0.8 / len(servers)
    for axes, (name, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for i, server in enumerate(servers):
            ours = [row for row in rows if row["server"] == server]
            at = np.arange(len(ours)) + (i - (len(servers) - 1) / 2) * width
            if name == "output tokens/s":
                axes.bar_label(axes.bar(at, [row[name] for row in ours], width, label=server), fmt="%.0f", fontsize=7)
                continue
            p50, p99 = ([row[f"{name} p{q} s"] for row in ours] for q in (50, 99))
            axes.vlines(at, p50, p99, color=f"C{i}")
            axes.plot(at, p50, "o", color=f"C{i}", label=f"{server} p50")
            axes.plot(at, p99, "_", color=f"C{i}", markersize=10, label=f"{server} p99")
            axes.set(yscale="log", ylabel="seconds")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(title=title, xticks=range(len(loads)))
        axes.set_xticklabels(loads, fontsize=8)
        axes.grid(axis="y", which="both", alpha=0.3)
        axes.legend(fontsize=7)
    save_plot(figure, path)


if __name__ == "__main__":
    run(main, Settings, __doc__)
