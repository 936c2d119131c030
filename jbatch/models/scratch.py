"""Directories for what is written whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".new-"
STALE_SECONDS = 24 * 3600


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """An empty directory in `parent`, which is made if need be; it is gone afterwards.

    Removes those that a killed process has left there, once they are a day old. Raises OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{PREFIX}*"):
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=PREFIX, ignore_cleanup_errors=True) as directory:
        yield Path(directory)
