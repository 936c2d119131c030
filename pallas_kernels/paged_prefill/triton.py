"""`paged_prefill` as a Pallas kernel for Triton."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.attention import MULTIPROCESSORS, Tuning, paged_attention

TUNING = Tuning(programs=MULTIPROCESSORS, matmul_rows=64, num_stages=3)
"""From 64 rows on a warp group multiplies as a whole (`wgmma`)."""


@partial(jax.jit, static_argnames=("scale", "causal", "window", "soft_cap", "out_dtype", "tuning", "interpret"))
def paged_prefill(
    q: jax.Array,  # [C, Q, H, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page_table: jax.Array,  # [C, N] int32
    start: jax.Array,  # [C] int32
    lengths: jax.Array,  # [C] int32
    skipped: jax.Array | None = None,  # [C] int32
    k_scale: jax.Array | None = None,  # [P, page_size, K] float32
    v_scale: jax.Array | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
    tuning: Tuning = TUNING,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # [C, Q, H, D], [C, Q, H] float32
    """See `reference.paged_prefill`."""
    return paged_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        start,
        lengths,
        skipped,
        k_scale,
        v_scale,
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        out_dtype=out_dtype or q.dtype,
        tuning=tuning,
        interpret=interpret,
        name="paged_prefill",
    )
