"""`paged_decode` in plain XLA: what every device without a kernel of its own runs, and what kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import MASKED, Carry, cap, gather_block, normalise, nothing_seen, over_blocks, whole_blocks
from pallas_kernels.paged_prefill.reference import paged_prefill
from pallas_kernels.shared_blocks import FEWEST_SHARERS, SharedBlocks, attend_shared

MAX_JOINED_HEADS = 4
"""Beyond so many KV heads the multiplications by zero cost more than they save."""


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
    """One query token a row, at position `lengths - 1`, over the tokens `0 .. lengths - 1` of its request.

    Returns the output, of `out_dtype` or else of q's, and the base-2 log-sum-exp of the scores, by which `merge_states`
    joins it with attention over other tokens. A row that attends to nothing gives zeros and -inf. With a `window` only
    the last so many tokens are seen, the row's own included; with a `soft_cap` scores are
    `soft_cap * tanh(score / soft_cap)`. A chunk of one token is the same computation as a decode row.

    What rows share, according to `shared`, is attended to once for all of them: with few KV heads, and without a window
    and `skipped`.

    With few KV heads all of them go through one matmul a row, the queries laid out block-diagonally: so many more
    multiplications by zero cost a CPU less than so many more tiny matmuls.
    """
    num_pages, page_size, kv_heads, dim = k_pages.shape
    if kv_heads > MAX_JOINED_HEADS:
        cache = k_pages, v_pages, page_table, lengths - 1, lengths, skipped, k_scale, v_scale
        out, lse = paged_prefill(q[:, None], *cache, scale=scale, window=window, soft_cap=soft_cap, out_dtype=out_dtype)
        return out[:, 0], lse[:, 0]
    rows, heads, _ = q.shape
    group = heads // kv_heads
    own = jnp.repeat(jnp.eye(kv_heads, dtype=jnp.float32), group, axis=0)[..., None]  # [H, K, 1]
    scaled = q.astype(jnp.float32) * scale
    joined = (scaled[:, :, None] * own).reshape(rows, heads, kv_heads * dim)
    carry = nothing_seen((rows, heads), dim)
    if shared is not None and rows >= FEWEST_SHARERS and window is None and skipped is None:
        carry = attend_shared(scaled, k_pages, v_pages, shared, k_scale, v_scale, soft_cap)
        page_table, lengths = shared.tail_table, shared.tail_lengths
    table, pages = whole_blocks(page_table, page_size, num_pages)
    block = pages * page_size
    first = skipped
    if window is not None:
        first = jnp.maximum(lengths - window, 0 if first is None else first)

    def attend_block(some: slice, i: jax.Array, carry: Carry) -> Carry:
        """Block `i` of some rows."""
        top, norm, out = carry
        ids = lax.dynamic_slice_in_dim(table[some], i * pages, pages, axis=1)
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        seen = at < lengths[some, None]
        if first is not None:
            seen &= at >= first[some, None]
        scores = jnp.einsum("shd,sbd->shb", joined[some], gather_block(k_pages, ids, k_scale))
        scores = jnp.where(seen[:, None], cap(scores, soft_cap), MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        # A page nobody wrote may hold anything, not-a-number included, and 0 * NaN is NaN.
        values = jnp.where(seen[..., None], gather_block(v_pages, ids, v_scale), 0.0)
        mixed = jnp.einsum("shb,sbd->shd", weights, values).reshape(-1, kv_heads, group, kv_heads, dim)
        mixed = jnp.stack([mixed[:, k, :, k] for k in range(kv_heads)], axis=1).reshape(-1, heads, dim)
        return new_top, norm * shrink + weights.sum(-1), out * shrink[..., None] + mixed

    out, lse = normalise(over_blocks((lengths + block - 1) // block, attend_block, carry))
    return out.astype(out_dtype or q.dtype), lse
