"""`paged_prefill` for whatever device compiles it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch, unsupported_pages
from pallas_kernels.paged_prefill import reference, triton


def paged_prefill(
    q: jax.Array,  # [C, Q, H, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page_table: jax.Array,  # [C, N] int32; entries past a request's pages are not used
    start: jax.Array,  # [C] int32, position of the row's first query token
    lengths: jax.Array,  # [C] int32, tokens to attend to, the row's own included; 0 for an idle row
    skipped: jax.Array | None = None,  # [C] int32, tokens at the beginning that are not attended to
    k_scale: jax.Array | None = None,  # [P, page_size, K] float32, what 8-bit keys are to be multiplied by
    v_scale: jax.Array | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array]:  # [C, Q, H, D], [C, Q, H] float32
    """Attention of chunks of tokens and its base-2 log-sum-exp, as `reference.paged_prefill` specifies."""
    return dispatch(
        reference.paged_prefill,
        triton.paged_prefill,
        *(q, k_pages, v_pages, page_table, start, lengths, skipped, k_scale, v_scale),
        unsupported=unsupported_pages(k_pages, q),
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        out_dtype=out_dtype,
    )
