"""What every experiment writes: JSON with its setting, and a Markdown table."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import jax
import tyro
from matplotlib.figure import Figure

from jbatch.config import UserError

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"


def setting() -> dict[str, Any]:
    """Where and with what this process runs."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def run(main: Callable[[T], None], settings: type[T], description: str | None) -> None:
    """An experiment's command line: parses its settings and runs it. A `UserError` is one line and exit code 2."""
    try:
        main(tyro.cli(settings, description=description))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def say(line: str) -> None:
    """A line on the way, beside the results."""
    print(line, file=sys.stderr, flush=True)


def save_plot(figure: Figure, path: Path) -> None:
    """Writes a figure as an image; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def settings_of(settings: Any) -> dict[str, Any]:
    """An experiment's settings for its JSON, without the folder it writes to."""
    return {name: value for name, value in asdict(settings).items() if name != "out"}


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Writes the result together with `setting()`; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"setting": setting(), **result}, indent=1) + "\n", encoding="utf-8")


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table; columns are the keys of the first row."""
    heads = list(rows[0])
    lines = [heads, ["---:"] * len(heads), *[[str(row[head]) for head in heads] for row in rows]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
