"""Plain XLA `paged_prefill`: the specification, and the path every device without a kernel runs.

Online softmax over blocks of pages (Milakov & Gimelshein 2018; FlashAttention). Shaped for a CPU: pages are
gathered as whole rows of a 2-d array, which XLA turns into plain copies, and blocks are small enough to stay in the
second-level cache. Rows go in groups with a loop each: XLA runs a loop on one core but independent loops on several,
and one long request lengthens the loop of its own group only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_TOKENS = 64
"""Tokens of a request attended to in one iteration."""

MAX_GROUPS = 4
MIN_GROUP_ROWS = 4
"""Rows are dealt to at most so many loops of at least so many rows."""

_MASKED = -1e30


def paged_prefill(
    q: jax.Array,  # [C, Q, H, D]
    k_pages: jax.Array,  # [P, K, page_size, D]
    v_pages: jax.Array,  # [P, K, page_size, D]
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
    groups = max(1, min(MAX_GROUPS, q.shape[0] // MIN_GROUP_ROWS))
    split = [jnp.array_split(x, groups) for x in (q, page_table, start, lengths)]
    return jnp.concatenate([_attend(k_pages, v_pages, *rows, scale=scale) for rows in zip(*split, strict=True)])


def _attend(
    k_pages: jax.Array,
    v_pages: jax.Array,
    q: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    rows, num_queries, heads, dim = q.shape
    num_pages, kv_heads, page_size, _ = k_pages.shape
    group = heads // kv_heads
    pages = max(1, min(BLOCK_TOKENS // page_size, page_table.shape[1]))
    block = pages * page_size
    # The last block may reach past the table: pad it, and let every entry name some page.
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    table = jnp.clip(table, 0, num_pages - 1)
    # [C, K, G, Q, D]: the queries of one KV head lie together, so a block is one matmul a head.
    q = (q.astype(jnp.float32) * scale).reshape(rows, num_queries, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    position = start[:, None] + jnp.arange(num_queries, dtype=jnp.int32)

    def gather(pool: jax.Array, ids: jax.Array) -> jax.Array:  # -> [C, pages, K, page_size, D]
        flat = pool.reshape(num_pages, -1).at[ids.reshape(-1)].get(mode="promise_in_bounds")
        return flat.reshape(rows, pages, kv_heads, page_size, dim).astype(jnp.float32)

    def attend_block(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, norm, out = carry
        ids = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        keys, values = gather(k_pages, ids), gather(v_pages, ids)
        scores = jnp.einsum("ckgqd,cbkpd->ckgqbp", q, keys).reshape(*q.shape[:-1], block)
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        seen = (at <= position[..., None]) & (at < lengths[:, None, None])  # [C, Q, block]
        seen = seen[:, None, None]
        scores = jnp.where(seen, scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        # A page nobody wrote may hold anything, not-a-number included, and 0 * NaN is NaN.
        live = (at < lengths[:, None]).reshape(rows, pages, 1, page_size, 1)
        values = jnp.where(live, values, 0.0)
        mixed = jnp.einsum("ckgqbp,cbkpd->ckgqd", weights.reshape(*q.shape[:-1], pages, page_size), values)
        return new_top, norm * shrink + weights.sum(-1), out * shrink[..., None] + mixed

    shape = q.shape[:-1]
    carry = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    num_blocks = (jnp.max(lengths) + block - 1) // block
    _, norm, out = lax.fori_loop(0, num_blocks, attend_block, carry)
    out = out / jnp.where(norm > 0, norm, 1.0)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, num_queries, heads, dim).astype(v_pages.dtype)
