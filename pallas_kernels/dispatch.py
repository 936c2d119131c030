"""Which implementation of an operation runs: by device, or by the environment variable `JBATCH_KERNELS`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import jax
from jax import lax

VARIABLE = "JBATCH_KERNELS"

Mode = Literal["auto", "xla", "pallas", "interpret"]
"""auto: Pallas on NVIDIA GPUs, plain XLA elsewhere; xla: plain XLA everywhere; pallas: the kernels, whatever the
device; interpret: the kernels run by Pallas's interpreter, on any device and slowly."""

MODES: tuple[Mode, ...] = ("auto", "xla", "pallas", "interpret")

_LARGEST_OFFSET = 2**31
"""Kernels count elements in 32 bits."""

_log = logging.getLogger(__name__)


@cache
def mode() -> Mode:
    """The mode in force, read from the environment once. Raises ValueError, one line, for an unknown one."""
    name = os.environ.get(VARIABLE) or "auto"
    if name not in MODES:
        raise ValueError(f"{VARIABLE} is {name!r}: it must be one of {', '.join(MODES)}")
    return name


def dispatch(
    reference: Callable[..., Any], kernel: Callable[..., Any], *args: Any, unsupported: str | None, **settings: Any
) -> Any:
    """Calls one of the two with `args`, arrays or None, and the static `settings`.

    Args:
      reference: the operation in plain XLA.
      kernel: the operation in Pallas; takes `interpret` besides.
      args: handed to either.
      unsupported: why the kernel cannot take these shapes, one line; None where it can.
      settings: handed to either.
    """
    chosen = mode()
    run_reference = partial(reference, **settings)
    if chosen == "xla":
        return run_reference(*args)
    if unsupported is not None:
        if chosen != "auto" or jax.default_backend() == "gpu":
            _tell(unsupported)
        return run_reference(*args)
    run_kernel = partial(kernel, **settings, interpret=chosen == "interpret")
    if chosen != "auto":
        return run_kernel(*args)
    return lax.platform_dependent(*args, cuda=run_kernel, default=run_reference)


def unsupported_pages(k_pages: jax.Array, q: jax.Array) -> str | None:
    """Why no kernel takes pages [P, page_size, K, D] and queries or new keys [..., D] like these; None if one does."""
    pages, page_size, kv_heads, dim = k_pages.shape
    kinds = "float32", "bfloat16", "float16"
    if q.dtype.name not in kinds or k_pages.dtype.name not in (*kinds, "int8", "float8_e4m3fn"):
        return f"no kernel for {q.dtype} queries and {k_pages.dtype} pages: plain XLA runs instead"
    if not 16 <= dim <= 256:
        return f"no kernel for heads of size {dim}, only for 16 to 256: plain XLA runs instead"
    if pages * page_size * kv_heads * dim > _LARGEST_OFFSET:
        return f"no kernel for more than {_LARGEST_OFFSET} keys or values in one array: plain XLA runs instead"
    return None


@cache
def _tell(reason: str) -> None:
    """Once for each reason."""
    _log.warning(reason)
