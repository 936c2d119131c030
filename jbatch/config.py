"""Configuration of the engine: plain, frozen, checked on construction. Imports no jax."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

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


class Bucket(NamedTuple):
    """The static shape of a step: how many rows of each kind it computes."""

    decode: int
    """Decode rows, one token each."""
    chunks: int
    """Prefill rows, `chunk_size` tokens each."""


def _powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... up to the first that is at least `last`."""
    powers = [1]
    while powers[-1] < last:
        powers.append(powers[-1] * 2)
    return powers


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; all are fixed for its life, since they are shapes of compiled programs."""

    max_model_len: int = 2048
    """Most tokens of one request, prompt and output together; a model that knows fewer positions lowers it."""
    max_running: int = 64
    """Most requests that hold pages at once."""
    max_slots: int = 0
    """Most requests resident on the device: running, or waiting there in policy order. 0: twice `max_running`."""
    max_queue: int = 1024
    """Most requests waiting on the host for a slot; beyond it a request is refused."""
    page_size: int = 16
    """Tokens in a page of KV cache, a power of two."""
    num_pages: int = 2048
    """Pages of KV cache. Page 0 is reserved."""
    chunk_size: int = 16
    """Prompt tokens in one prefill row, a multiple of the page size."""
    max_chunks: int = 16
    """Most prefill rows in one step; the largest step has the next power of two."""
    max_admissions: int = 8
    """Most requests that enter the device in one step."""
    prefix_caching: bool = True
    """Requests that begin with the same tokens share those pages, at once and later on."""
    overlap: bool = True
    """Dispatch a step before reading the one before it."""

    def __post_init__(self) -> None:
        if self.max_slots == 0:
            object.__setattr__(self, "max_slots", 2 * self.max_running)
        for field in fields(self):
            if field.type != "bool" and getattr(self, field.name) < 1:
                raise UserError(f"{field.name} is {getattr(self, field.name)}: it must be at least 1")
        if self.page_size & (self.page_size - 1):
            raise UserError(f"page_size is {self.page_size}: it must be a power of two, such as 16")
        if self.chunk_size % self.page_size:
            raise UserError(
                f"chunk_size is {self.chunk_size}: it must be a multiple of the page size, {self.page_size}"
            )
        if self.max_slots < self.max_running:
            raise UserError(f"max_slots is {self.max_slots}: it must be at least max_running, {self.max_running}, or 0")
        if self.max_request_len < 2:
            raise UserError(
                f"num_pages is {self.num_pages} and max_model_len is {self.max_model_len}: there must be room for a "
                "prompt of one token and its answer, and page 0 is reserved"
            )

    @property
    def pages_per_slot(self) -> int:
        """Length of a slot's row in the page table."""
        return -(-self.max_model_len // self.page_size)

    @property
    def max_request_len(self) -> int:
        """Most tokens a single request can ever hold: bounded by its table row and by all pages there are."""
        return min(self.max_model_len, (self.num_pages - 1) * self.page_size)

    @property
    def largest_bucket(self) -> Bucket:
        """The step shape that no demand exceeds."""
        return self.buckets[-1]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every step shape the engine may compile, smallest work first.

        Steps without prefill come in all powers of two of decode rows, steps with prefill in fewer shapes: an idle
        row is cheap beside a chunk, and every shape costs seconds to compile.
        """
        rows, chunks = _powers_of_two(self.max_running), _powers_of_two(self.max_chunks)
        few, half, all_ = rows[max(0, len(rows) - 4)], rows[max(0, len(rows) - 2)], rows[-1]
        mixed = [Bucket(r, c) for r in {few, half, all_} for c in chunks]
        return tuple(sorted([Bucket(r, 0) for r in rows] + mixed, key=self.rows))

    def rows(self, bucket: Bucket) -> int:
        """Token rows a step of this shape computes."""
        return bucket.decode + bucket.chunks * self.chunk_size
