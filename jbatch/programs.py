"""Compiled steps, one a bucket: the largest first, the others in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jbatch.config import Bucket, EngineConfig, cache_dir

Program = Callable[..., Any]


def keep_compiled_programs() -> None:
    """Lets the next start take compiled programs from the user's cache directory, unless JAX has one set already."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "programs"))


class Programs:
    """Hands out a compiled step for a demand. `compile_bucket` must be safe to call from another thread."""

    def __init__(
        self, config: EngineConfig, compile_bucket: Callable[[Bucket], Program], report: Callable[[str], None]
    ) -> None:
        self._config = config
        self._compile_bucket = compile_bucket
        self._report = report
        self._ready: dict[Bucket, Program] = {}  # replaced whole, so readers need no lock
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._specialise, name="jbatch-specialise")

    def start(self) -> None:
        """Compiles the largest bucket, which serves any demand, then starts on the others in the background."""
        keep_compiled_programs()
        self._compile(self._config.largest_bucket)
        self._thread.start()

    def stop(self) -> None:
        """Ends the background work after the program it is compiling, without waiting for that."""
        self._stop.set()

    def wait(self) -> None:
        """Blocks until every bucket is compiled. Raises what kept one from it, unless `stop` did."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets ready to use."""
        return tuple(self._ready)

    def choose(self, demand: Bucket) -> tuple[Bucket, Program]:
        """The compiled step of fewest rows that covers `demand`; the largest where none does."""
        covering = [b for b in self._ready if b.decode >= demand.decode and b.chunks >= demand.chunks]
        bucket = min(covering, key=self._config.rows, default=self._config.largest_bucket)
        return bucket, self._ready[bucket]

    def _compile(self, bucket: Bucket) -> None:
        begun = time.monotonic()
        program = self._compile_bucket(bucket)
        self._ready = {**self._ready, bucket: program}
        self._report(
            f"compile: bucket of {bucket.decode} decode rows and {bucket.chunks} chunks, "
            f"{time.monotonic() - begun:.1f} s"
        )

    def _specialise(self) -> None:
        try:
            for bucket in self._config.buckets:
                if self._stop.is_set():
                    return
                if bucket not in self._ready:
                    self._compile(bucket)
        except Exception as error:  # the buckets there are go on serving
            self._failure = error
            self._report(f"compile: failed, larger steps will do ({type(error).__name__}: {error})".splitlines()[0])
