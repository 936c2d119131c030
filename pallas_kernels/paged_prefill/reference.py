"""`paged_prefill` in plain XLA: what every device without a kernel of its own runs, and what kernels must equal.

Online softmax over blocks of pages (Milakov & Gimelshein 2018; FlashAttention). Shaped for a CPU: pages are
gathered as whole rows of a 2-d array, which XLA turns into plain copies, and blocks are small enough to stay in the
second-level cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import LEAST, MASKED, Carry, gather_block, over_blocks, whole_blocks


def paged_prefill(
    q: jax.Array,  # [C, Q, H, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page_table: jax.Array,  # [C, N] int32; entries past a request's pages are not used
    start: jax.Array,  # [C] int32, position of the row's first query token
    lengths: jax.Array,  # [C] int32, tokens to attend to, the row's own included; 0 for an idle row
    *,
    scale: float,
) -> jax.Array:  # [C, Q, H, D]
    """Causal attention of `Q` consecutive query tokens a row over the tokens `0 .. lengths - 1` of its request.

    Query `i` of a row stands at position `start + i` and sees the positions up to its own. Idle rows give zeros;
    queries at or past `lengths` give values of no meaning. Scores and sums are float32 whatever the dtypes.
    """
    rows, num_queries, heads, dim = q.shape
    num_pages, page_size, kv_heads, _ = k_pages.shape
    group = heads // kv_heads
    table, pages = whole_blocks(page_table, page_size, num_pages)
    block = pages * page_size
    # [C, K, Q * G, D]: the queries of one KV head lie together, so a block is one matmul a head.
    q = (q.astype(jnp.float32) * scale).reshape(rows, num_queries, kv_heads, group, dim)
    q = q.swapaxes(1, 2).reshape(rows, kv_heads, num_queries * group, dim)
    last = jnp.minimum(start[:, None] + jnp.arange(num_queries, dtype=jnp.int32), lengths[:, None] - 1)
    last = jnp.repeat(last, group, axis=1)[:, None, :, None]  # [C, 1, Q * G, 1], last position a query sees

    def gather(pool: jax.Array, ids: jax.Array) -> jax.Array:  # -> [rows, K, block, D]
        return gather_block(pool, ids).reshape(-1, block, kv_heads, dim).swapaxes(1, 2)

    def attend_block(begin: int, i: jax.Array, carry: Carry) -> Carry:
        """Block `i` of the rows from `begin` on."""
        top, norm, out = carry
        ids = lax.dynamic_slice_in_dim(table[begin:], i * pages, pages, axis=1)
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        scores = jnp.einsum("ckmd,ckbd->ckmb", q[begin:], gather(k_pages, ids))
        scores = jnp.where(at <= last[begin:], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        # A page nobody wrote may hold anything, not-a-number included, and 0 * NaN is NaN.
        values = jnp.where((at < lengths[begin:, None])[:, None, :, None], gather(v_pages, ids), 0.0)
        mixed = jnp.einsum("ckmb,ckbd->ckmd", weights, values)
        return new_top, norm * shrink + weights.sum(-1), out * shrink[..., None] + mixed

    shape = q.shape[:-1]
    top, norm = jnp.full(shape, LEAST, jnp.float32), jnp.zeros(shape, jnp.float32)
    carry = (top, norm, jnp.zeros(q.shape, jnp.float32))
    _, norm, out = over_blocks((lengths + block - 1) // block, attend_block, carry)
    out = out / jnp.where(norm > 0, norm, 1.0)[..., None]
    out = out.reshape(rows, kv_heads, num_queries, group, dim).swapaxes(1, 2)
    return out.reshape(rows, num_queries, heads, dim).astype(v_pages.dtype)
