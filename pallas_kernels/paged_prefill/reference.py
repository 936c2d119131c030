"""`paged_prefill` in plain XLA: what every device without a kernel of its own runs, and what kernels must equal.

Online softmax over blocks of pages (Milakov & Gimelshein 2018; FlashAttention). Shaped for a CPU: pages are
gathered as whole rows of a 2-d array, which XLA turns into plain copies, and blocks are small enough to stay in the
second-level cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import MASKED, Carry, cap, gather_block, normalise, nothing_seen, over_blocks, whole_blocks


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
    """Attention of `Q` consecutive query tokens a row over the tokens `0 .. lengths - 1` of its request.

    Query `i` of a row stands at position `start + i`; where `causal` it sees the positions up to its own, else all.
    `window`, `soft_cap`, `out_dtype` and both results as in `paged_decode`. Idle rows give
    zeros and -inf; causal queries at or past `lengths` give values of no meaning. Scores and sums are float32 whatever
    the dtypes.
    """
    rows, num_queries, heads, dim = q.shape
    num_pages, page_size, kv_heads, _ = k_pages.shape
    group = heads // kv_heads
    dtype = out_dtype or q.dtype
    table, pages = whole_blocks(page_table, page_size, num_pages)
    block = pages * page_size
    # [C, K, Q * G, D]: the queries of one KV head lie together, so a block is one matmul a head.
    q = (q.astype(jnp.float32) * scale).reshape(rows, num_queries, kv_heads, group, dim)
    q = q.swapaxes(1, 2).reshape(rows, kv_heads, num_queries * group, dim)
    first, last = _seen(start, lengths, skipped, num_queries, causal=causal, window=window)
    last = jnp.repeat(last, group, axis=1)[:, None, :, None]  # [C, 1, Q * G, 1], last position a query sees
    if first is not None:
        first = jnp.repeat(first, group, axis=1)[:, None, :, None]

    def gather(pool: jax.Array, ids: jax.Array, scales: jax.Array | None) -> jax.Array:  # -> [rows, K, block, D]
        return gather_block(pool, ids, scales).reshape(-1, block, kv_heads, dim).swapaxes(1, 2)

    def attend_block(some: slice, i: jax.Array, carry: Carry) -> Carry:
        """Block `i` of some rows."""
        top, norm, out = carry
        ids = lax.dynamic_slice_in_dim(table[some], i * pages, pages, axis=1)
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        scores = jnp.einsum("ckmd,ckbd->ckmb", q[some], gather(k_pages, ids, k_scale))
        seen = at <= last[some]
        if first is not None:
            seen &= at >= first[some]
        scores = jnp.where(seen, cap(scores, soft_cap), MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        # A page nobody wrote may hold anything, not-a-number included, and 0 * NaN is NaN.
        readable = at < lengths[some, None]
        if first is not None:
            readable &= at >= first[some, 0, 0]  # the first query sees furthest back
        values = jnp.where(readable[:, None, :, None], gather(v_pages, ids, v_scale), 0.0)
        mixed = jnp.einsum("ckmb,ckbd->ckmd", weights, values)
        return new_top, norm * shrink + weights.sum(-1), out * shrink[..., None] + mixed

    carry = nothing_seen(q.shape[:-1], dim)
    out, lse = normalise(over_blocks((lengths + block - 1) // block, attend_block, carry))
    out = out.reshape(rows, kv_heads, num_queries, group, dim).swapaxes(1, 2)
    lse = lse.reshape(rows, kv_heads, num_queries, group).swapaxes(1, 2)
    return out.reshape(rows, num_queries, heads, dim).astype(dtype), lse.reshape(rows, num_queries, heads)


def _seen(
    start: jax.Array, lengths: jax.Array, skipped: jax.Array | None, queries: int, *, causal: bool, window: int | None
) -> tuple[jax.Array | None, jax.Array]:
    """First and last position [C, Q] that each query sees; `None` where all see from 0 on."""
    position = start[:, None] + jnp.arange(queries, dtype=jnp.int32)
    ends = lengths[:, None] - 1
    last = jnp.minimum(position, ends) if causal else jnp.broadcast_to(ends, position.shape)
    if window is None:
        return (None if skipped is None else jnp.broadcast_to(skipped[:, None], position.shape)), last
    return jnp.maximum(position - (window - 1), 0 if skipped is None else skipped[:, None]), last
