"""The measurements of `experiments.kernels`, each a function without arguments that returns rows for a table."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.engine_step import LLAMA3_8B, step_seconds
from pallas_kernels import dispatch
from pallas_kernels.attention import Tuning
from pallas_kernels.kv_write import reference as write_reference
from pallas_kernels.kv_write import triton as write_triton
from pallas_kernels.paged_decode import reference as decode_reference
from pallas_kernels.paged_decode import triton as decode_triton
from pallas_kernels.paged_decode.shapes import SHAPES as DECODE_SHAPES
from pallas_kernels.paged_decode.shapes import DecodeShape
from pallas_kernels.paged_prefill import reference as prefill_reference
from pallas_kernels.paged_prefill import triton as prefill_triton
from pallas_kernels.paged_prefill.shapes import SHAPES as PREFILL_SHAPES
from pallas_kernels.shapes import MODELS, HeadShape
from pallas_kernels.shared_prefix import group_rows, shared_prefix_decode
from pallas_kernels.shared_prefix.shapes import SHAPES as SHARED_SHAPES

LEAST_BYTES = 1 << 30
"""Keys and values that calls go through in turn, far more than the second-level cache holds."""

Row = dict[str, Any]


def seconds(calls: Sequence[Callable[[], Any]], least: float = 0.2) -> float:
    """Seconds of a call, the best of three rounds that go through `calls` in turn for `least` seconds each."""
    jax.block_until_ready([call() for call in calls])
    begun = time.perf_counter()
    jax.block_until_ready([call() for call in calls])
    rounds = max(1, int(least / max(time.perf_counter() - begun, 1e-6)))
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(rounds):
            last = [call() for call in calls]
        jax.block_until_ready(last)
        best = min(best, (time.perf_counter() - begun) / rounds / len(calls))
    return best


def ceilings() -> Row:
    """What the device itself reaches: a copy of 2 GiB, read and written, and a bfloat16 matmul of 8192 cubed."""
    source = jnp.zeros((1 << 30,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))
    square = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    return {
        "copy_gb_s": 2 * source.nbytes / seconds([partial(copy, source)]) / 1e9,
        "matmul_tflop_s": 2 * 8192**3 / seconds([partial(multiply, square, square)]) / 1e12,
    }


class Cache:
    """Random pages, and page tables that go through them in random order."""

    def __init__(self, model: HeadShape, rows: int, length: int, dtype: Any = jnp.bfloat16, least: int = LEAST_BYTES):
        self.model = model
        width = -(-length // model.page_size)
        page_bytes = 2 * model.page_size * model.kv_heads * model.dim * jnp.dtype(dtype).itemsize
        self.copies = max(1, -(-least // (rows * width * page_bytes)))
        """Disjoint sets of pages for `rows` requests."""
        self.pages = self.copies * rows * width
        shape = (self.pages + 1, model.page_size, model.kv_heads, model.dim)
        draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
        self.k, self.v = (draw(key) for key in jax.random.split(jax.random.key(length)))
        order = np.random.default_rng(rows).permutation(self.pages).astype(np.int32) + 1
        self.tables = jnp.asarray(order.reshape(self.copies, rows, width))
        self.token_bytes = page_bytes / model.page_size

    def queries(self, *rows: int) -> jax.Array:
        """Random queries [rows, H, D]."""
        shape = (*rows, self.model.heads, self.model.dim)
        return jax.random.normal(jax.random.key(1), shape, self.k.dtype)

    @property
    def settings(self) -> dict[str, Any]:
        """Of a kernel's call."""
        return {
            "scale": self.model.dim**-0.5,
            "window": self.model.window,
            "soft_cap": self.model.soft_cap,
        }


LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
"""Relative norm of the difference from the reference that is allowed."""


def correctness(
    models: Sequence[str] = tuple(MODELS), rows: int = 16, length: int = 1024, interpret: bool = False
) -> list[Row]:
    """Relative norm of the difference from the reference in float32, on lengths of all kinds; poison is not read."""
    results = []
    for name, dtype in itertools.product(models, LIMITS):
        cache = Cache(MODELS[name], rows, length, jnp.dtype(dtype), least=0)
        lengths = jnp.asarray(np.random.default_rng(2).integers(0, length + 1, rows), jnp.int32)
        used = _used(cache, np.asarray(lengths), np.asarray(cache.tables[0]))
        k, v = (jnp.where(used, pages, jnp.nan) for pages in (cache.k, cache.v))
        with jax.default_matmul_precision("highest"):
            pairs = {
                "paged_decode": _decoded(cache, k, v, lengths, interpret),
                "paged_decode, int8": _decoded_int8(cache, used, lengths, interpret),
                "paged_prefill": _prefilled(cache, k, v, lengths, interpret),
                "kv_write": _written(cache, k, v, interpret),
            }
            if cache.model.window is None:
                pairs["shared_prefix"] = _shared(cache, length, interpret)
        for operation, (got, wanted) in pairs.items():
            error = _error(got, wanted)
            holds = error < LIMITS[dtype]
            results.append({"operation": operation, "model": name, "dtype": dtype, "error": error, "holds": holds})
    return results


def _error(got: jax.Array, wanted: jax.Array) -> float:
    """Relative norm of the difference; huge where a number is none."""
    left, right = (np.nan_to_num(np.asarray(x.astype(jnp.float32), np.float64), nan=1e9) for x in (got, wanted))
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


def _used(cache: Cache, lengths: np.ndarray, tables: np.ndarray) -> jax.Array:
    """Where requests have tokens, to be laid over pages."""
    used = np.zeros(cache.k.shape[:2], bool)
    for length, row in zip(lengths, tables, strict=True):
        at = np.arange(length)
        used[row[at // cache.model.page_size], at % cache.model.page_size] = True
    return jnp.asarray(used)[..., None, None]


def _decoded(
    cache: Cache, k: jax.Array, v: jax.Array, lengths: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    q, table = cache.queries(lengths.shape[0]), cache.tables[0]
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    got, _ = decode_triton.paged_decode(q, k, v, table, lengths, **cache.settings, interpret=interpret)
    wanted, _ = decode_reference.paged_decode(wide_q, wide_k, wide_v, table, lengths, **cache.settings)
    return got, wanted


def _decoded_int8(cache: Cache, used: jax.Array, lengths: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """From pages of 8 bits, poison in the factors; the reference is given what those stand for."""
    q, table = cache.queries(lengths.shape[0]), cache.tables[0]
    (k, k_scale), (v, v_scale) = (write_reference.quantise(x.astype(jnp.float32)) for x in (cache.k, cache.v))
    wide_k, wide_v = k.astype(jnp.float32) * k_scale[..., None], v.astype(jnp.float32) * v_scale[..., None]
    k_scale, v_scale = (jnp.where(used[..., 0], x, jnp.nan) for x in (k_scale, v_scale))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    got, _ = decode_triton.paged_decode(q, k, v, table, lengths, **scales, **cache.settings, interpret=interpret)
    wanted, _ = decode_reference.paged_decode(q.astype(jnp.float32), wide_k, wide_v, table, lengths, **cache.settings)
    return got, wanted


def _prefilled(
    cache: Cache, k: jax.Array, v: jax.Array, lengths: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The last 48 tokens of each request, zeros where a chunk has no token."""
    q, table, start = cache.queries(lengths.shape[0], 48), cache.tables[0], jnp.maximum(lengths - 48, 0)
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    got, _ = prefill_triton.paged_prefill(q, k, v, table, start, lengths, **cache.settings, interpret=interpret)
    wanted, _ = prefill_reference.paged_prefill(wide_q, wide_k, wide_v, table, start, lengths, **cache.settings)
    real = (start[:, None] + jnp.arange(48) < lengths[:, None])[..., None, None]
    return jnp.where(real, got, 0), jnp.where(real, wanted, 0)


def _shared(cache: Cache, length: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """All rows over the first half of the first one's pages, and lengths of all kinds behind."""
    rows, page_size = cache.tables.shape[1], cache.model.page_size
    shared = length // 2 // page_size
    table = cache.tables[0].at[:, :shared].set(cache.tables[0][0, :shared])
    tails = np.random.default_rng(5).integers(1, length - shared * page_size, rows)
    lengths = jnp.asarray(shared * page_size + tails, jnp.int32)
    groups = group_rows(table, lengths, page_size)
    if not bool(jnp.any(groups.place >= 0)):
        raise ValueError(f"{rows} rows of {length} tokens share too little to be grouped")
    used = _used(cache, np.asarray(lengths), np.asarray(table))
    q, k, v = cache.queries(rows), *(jnp.where(used, pages, jnp.nan) for pages in (cache.k, cache.v))
    settings: dict[str, Any] = {"scale": cache.model.dim**-0.5, "soft_cap": cache.model.soft_cap}
    with _using("interpret" if interpret else "auto"):
        got, _ = shared_prefix_decode(q, k, v, table, lengths, groups, **settings)
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    return got, decode_reference.paged_decode(wide_q, wide_k, wide_v, table, lengths, **settings)[0]


def _written(cache: Cache, k: jax.Array, v: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Pages after a write, by the kernel and by the reference, unwritten poison taken for zeros."""
    rng, tokens = np.random.default_rng(3), min(64, cache.pages)
    page = jnp.asarray(np.where(rng.random(tokens) < 0.3, -1, rng.permutation(cache.pages)[:tokens] + 1), jnp.int32)
    offset = jnp.asarray(rng.integers(0, cache.model.page_size, tokens), jnp.int32)
    new = jax.random.normal(jax.random.key(4), (2, tokens, cache.model.kv_heads, cache.model.dim), k.dtype)
    got = write_triton.kv_write(new[0], new[1], k, v, page, offset, interpret=interpret)
    wanted = write_reference.kv_write(new[0], new[1], k, v, page, offset)
    clean = [jnp.nan_to_num(jnp.stack(pair).astype(jnp.float32)) for pair in (got, wanted)]
    return clean[0], clean[1]


def decode_seconds(shape: DecodeShape, tuning: Tuning = decode_triton.TUNING) -> tuple[float, Cache]:
    """Seconds of a call of `paged_decode`, and the cache it went through."""
    cache = Cache(shape.model, shape.rows, shape.length)
    q, lengths = cache.queries(shape.rows), jnp.full(shape.rows, shape.length, jnp.int32)
    call = partial(decode_triton.paged_decode, **cache.settings, tuning=tuning)
    return seconds([partial(call, q, cache.k, cache.v, table, lengths) for table in cache.tables]), cache


def decode() -> list[Row]:
    """Bandwidth over rows and lengths."""
    rows = []
    for shape in DECODE_SHAPES.values():
        took, cache = decode_seconds(shape)
        moved = shape.rows * shape.length * cache.token_bytes
        rows.append({"rows": shape.rows, "length": shape.length, "us": took * 1e6, "gb_s": moved / took / 1e9})
    return rows


def decode_settings() -> list[Row]:
    """Stages, warps and splits at two shapes."""
    rows = []
    for name in ("llama3-8b, 64 rows of 4096", "llama3-8b, 1 rows of 16384"):
        shape = DECODE_SHAPES[name]
        for stages, warps, splits in itertools.product((2, 3, 4, 5), (2, 4, 8), (1, 2, 4, 16)):
            took, cache = decode_seconds(shape, Tuning(num_splits=splits, num_warps=warps, num_stages=stages))
            moved = shape.rows * shape.length * cache.token_bytes
            setting = {"stages": stages, "warps": warps, "splits": splits}
            rows.append({"shape": name, **setting, "us": took * 1e6, "gb_s": moved / took / 1e9})
    return rows


def prefill() -> list[Row]:
    """Arithmetic of causal chunks, with blocks of 64 and of 128 matmul rows."""
    rows = []
    for (name, shape), matmul_rows in itertools.product(PREFILL_SHAPES.items(), (64, 128)):
        length = shape.start + shape.queries
        cache = Cache(shape.model, shape.chunks, length, least=0)
        q = cache.queries(shape.chunks, shape.queries)
        start, lengths = (jnp.full(shape.chunks, n, jnp.int32) for n in (shape.start, length))
        tuning = replace(prefill_triton.TUNING, matmul_rows=matmul_rows)
        call = partial(prefill_triton.paged_prefill, **cache.settings, tuning=tuning)
        took = seconds([partial(call, q, cache.k, cache.v, cache.tables[0], start, lengths)])
        pairs = shape.chunks * shape.queries * (shape.start + (shape.queries + 1) / 2)
        flops = 4 * pairs * shape.model.heads * shape.model.dim
        rows.append({"shape": name, "matmul rows": matmul_rows, "us": took * 1e6, "tflop_s": flops / took / 1e12})
    return rows


def shared_prefix() -> list[Row]:
    """Decode over a shared prefix against plain decode on the same pages."""
    rows = []
    for name, shape in SHARED_SHAPES.items():
        cache = Cache(shape.model, shape.rows, shape.prefix + shape.tail, least=0)
        shared = -(-shape.prefix // shape.model.page_size)
        table = cache.tables[0].at[:, :shared].set(cache.tables[0][0, :shared])
        lengths = jnp.full(shape.rows, shape.prefix + shape.tail, jnp.int32)
        q = cache.queries(shape.rows)
        groups = jax.jit(group_rows, static_argnums=2)(table, lengths, shape.model.page_size)
        args = q, cache.k, cache.v, table, lengths
        plain = seconds([partial(jax.jit(partial(decode_triton.paged_decode, **cache.settings)), *args)])
        run = jax.jit(partial(shared_prefix_decode, scale=shape.model.dim**-0.5))
        took = seconds([partial(run, *args, groups)])
        rows.append({"shape": name, "plain us": plain * 1e6, "shared us": took * 1e6, "times": plain / took})
    return rows


def steps() -> list[Row]:
    """Whole decode steps of an engine of Llama 3 8B with random weights, with the kernels and with plain XLA."""
    rows = []
    modes: tuple[dispatch.Mode, ...] = ("auto", "xla")
    for mode, running, context in itertools.product(modes, (16, 64), (1024, 4096)):
        with _using(mode):
            took = step_seconds(LLAMA3_8B, running, context)
        rows.append({"kernels": mode, "rows": running, "context": context, "step ms": took * 1e3})
    return rows


@contextmanager
def _using(mode: dispatch.Mode) -> Iterator[None]:
    """Kernels of this mode, whatever the environment says."""
    before = os.environ.get(dispatch.VARIABLE, "")
    os.environ[dispatch.VARIABLE] = mode
    dispatch.mode.cache_clear()
    try:
        yield
    finally:
        os.environ[dispatch.VARIABLE] = before
        dispatch.mode.cache_clear()
