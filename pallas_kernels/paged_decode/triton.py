"""`paged_decode` as a Pallas kernel for Triton."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.attention import Tuning, paged_attention
from pallas_kernels.shared_blocks import SharedBlocks

TUNING = Tuning()


@partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "out_dtype", "tuning", "interpret"))
def paged_decode(
    q: jax.Array,  # [S, H, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page_table: jax.Array,  # [S, N] int32
    lengths: jax.Array,  # [S] int32
    skipped: jax.Array | None = None,  # [S] int32
    k_scale: jax.Array | None = None,  # [P, page_size, K] float32
    v_scale: jax.Array | None = None,
    shared: SharedBlocks | None = None,  # not used: a group of rows reads its pages in `shared_prefix`
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
    tuning: Tuning = TUNING,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # [S, H, D], [S, H] float32
    """See `reference.paged_decode`."""
    out, lse = paged_attention(
        q[:, None],
        k_pages,
        v_pages,
        page_table,
        None,
        lengths,
        skipped,
        k_scale,
        v_scale,
        scale=scale,
        causal=False,
        window=window,
        soft_cap=soft_cap,
        out_dtype=out_dtype or q.dtype,
        tuning=tuning,
        interpret=interpret,
        name="paged_decode",
    )
    return out[:, 0], lse[:, 0]
