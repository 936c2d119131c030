"""`paged_decode` for whatever device compiles it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch, unsupported_pages
from pallas_kernels.paged_decode import reference, triton
from pallas_kernels.shared_blocks import SharedBlocks


def paged_decode(
    q: jax.Array,  # [S, H, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page_table: jax.Array,  # [S, N] int32; entries past a request's pages are not used
    lengths: jax.Array,  # [S] int32, tokens to attend to, the row's own included; 0 for an idle row
    skipped: jax.Array | None = None,  # [S] int32, tokens at the beginning that are not attended to
    k_scale: jax.Array | None = None,  # [P, page_size, K] float32, what 8-bit keys are to be multiplied by
    v_scale: jax.Array | None = None,
    shared: SharedBlocks | None = None,  # of `page_table` and `lengths`
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array]:  # [S, H, D], [S, H] float32
    """Attention of one token a row and its base-2 log-sum-exp, as `reference.paged_decode` specifies."""
    return dispatch(
        reference.paged_decode,
        triton.paged_decode,
        *(q, k_pages, v_pages, page_table, lengths, skipped, k_scale, v_scale, shared),
        unsupported=unsupported_pages(k_pages, q),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        out_dtype=out_dtype,
    )
