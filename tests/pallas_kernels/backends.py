"""The implementations of each operation, with one way to call them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from dense import Problem

from pallas_kernels.attention import Tuning
from pallas_kernels.kv_write import reference as write_reference
from pallas_kernels.kv_write import triton as write_triton
from pallas_kernels.merge_states import reference as merge_reference
from pallas_kernels.merge_states import triton as merge_triton
from pallas_kernels.paged_decode import reference as decode_reference
from pallas_kernels.paged_decode import triton as decode_triton
from pallas_kernels.paged_prefill import reference as prefill_reference
from pallas_kernels.paged_prefill import triton as prefill_triton

BACKENDS = ("xla", "interpret")

_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("kv_write", "xla"): write_reference.kv_write,
    ("kv_write", "interpret"): write_triton.kv_write,
    ("kv_write_int8", "xla"): write_reference.kv_write_int8,
    ("kv_write_int8", "interpret"): write_triton.kv_write_int8,
    ("merge_states", "xla"): merge_reference.merge_states,
    ("merge_states", "interpret"): merge_triton.merge_states,
    ("paged_decode", "xla"): decode_reference.paged_decode,
    ("paged_decode", "interpret"): decode_triton.paged_decode,
    ("paged_prefill", "xla"): prefill_reference.paged_prefill,
    ("paged_prefill", "interpret"): prefill_triton.paged_prefill,
}


def call(operation: str, backend: str, *args: Any, **settings: Any) -> list[np.ndarray]:
    """Runs an operation, compiled in a hurry: interpreted kernels take seconds to optimise and moments to run."""
    function = partial(_FUNCTIONS[operation, backend], **settings)
    if backend == "interpret":
        function = partial(function, interpret=True)
    lowered = jax.jit(function).lower(*args)
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return [np.asarray(part) for part in compiled(*args)]


def decode(p: Problem, backend: str, *scales: np.ndarray, splits: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of a problem of one query a row, in the problem's shapes."""
    settings: dict[str, Any] = {"scale": p.scale, "window": p.window, "soft_cap": p.soft_cap}
    if backend == "interpret":
        settings["tuning"] = Tuning(num_splits=splits)
    cache = (p.k_pages, p.v_pages, p.page_table, p.lengths, p.skipped)
    out, lse = call("paged_decode", backend, p.q[:, 0], *cache, *scales, **settings)
    assert out.dtype == p.q.dtype and lse.dtype == np.float32
    return out.astype(np.float64)[:, None], lse[:, None]


def prefill(
    p: Problem, backend: str, *scales: np.ndarray, splits: int = 1, matmul_rows: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp; zeros and -inf where they mean nothing."""
    settings: dict[str, Any] = {"scale": p.scale, "window": p.window, "soft_cap": p.soft_cap, "causal": p.causal}
    if backend == "interpret":
        settings["tuning"] = Tuning(num_splits=splits, matmul_rows=matmul_rows)
    cache = (p.k_pages, p.v_pages, p.page_table, p.start, p.lengths, p.skipped)
    out, lse = call("paged_prefill", backend, p.q, *cache, *scales, **settings)
    assert out.dtype == p.q.dtype and lse.dtype == np.float32
    real = p.real()[..., None]
    return np.where(real[..., None], out.astype(np.float64), 0.0), np.where(real, lse, -np.inf)
