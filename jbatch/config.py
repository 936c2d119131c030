"""Configuration of the engine: plain, frozen, checked on construction. Imports no jax."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"


class UserError(Exception):
    """Something the user can mend. Its text is one line: what is wrong and what to do."""


def cache_dir() -> Path:
    """Where jbatch keeps models and compiled programs.

    `JBATCH_CACHE` if set, else `jbatch` under `XDG_CACHE_HOME` (default `~/.cache`).
    """
    if override := os.environ.get("JBATCH_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jbatch"
