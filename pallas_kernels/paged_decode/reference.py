"""`paged_decode` in plain XLA: what every device without a kernel of its own runs, and what kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_prefill.reference import paged_prefill

MAX_JOINED_HEADS = 4
"""Beyond so many KV heads the multiplications by zero cost more than they save."""


def paged_decode(
    q: jax.Array,  # [S, H, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page_table: jax.Array,  # [S, N] int32; entries past a request's pages are not used
    lengths: jax.Array,  # [S] int32, tokens to attend to, the row's own included; 0 for an idle row
    *,
    scale: float,
) -> jax.Array:  # [S, H, D]
    """One query token a row, at position `lengths - 1`, over the tokens `0 .. lengths - 1` of its request.

    Rows with `lengths == 0` give zeros. A chunk of one token is the same computation as a decode row.

    With few KV heads all of them go through one matmul a row, the queries laid out block-diagonally: so many more
    multiplications by zero cost a CPU less than so many more tiny matmuls.
    """
    _, page_size, kv_heads, dim = k_pages.shape
    if kv_heads > MAX_JOINED_HEADS:
        return paged_prefill(q[:, None], k_pages, v_pages, page_table, lengths - 1, lengths, scale=scale)[:, 0]
    rows, heads, _ = q.shape
    own = jnp.repeat(jnp.eye(kv_heads, dtype=q.dtype), heads // kv_heads, axis=0)[..., None]  # [H, K, 1]
    joined = (q[:, :, None] * own).reshape(rows, 1, heads, kv_heads * dim)
    k_pages, v_pages = (pool.reshape(-1, page_size, 1, kv_heads * dim) for pool in (k_pages, v_pages))
    out = paged_prefill(joined, k_pages, v_pages, page_table, lengths - 1, lengths, scale=scale)
    out = out.reshape(rows, heads, kv_heads, dim)
    return jnp.sum(jnp.where(own > 0, out, 0), axis=2)
