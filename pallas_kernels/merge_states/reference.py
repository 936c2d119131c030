"""`merge_states` in plain XLA: what every device without a kernel of its own runs, and what kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import LEAST


def merge_states(
    outs: jax.Array,  # [n, S, H, D], attention over n disjoint sets of tokens
    lses: jax.Array,  # [n, S, H] float32, base-2 log-sum-exp of the scores of each
    *,
    out_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array]:  # [S, H, D] of `out_dtype` (that of `outs` unless given), [S, H] float32
    """Attention over all the sets together, and its base-2 log-sum-exp.

    Sets nothing was attended to in, of log-sum-exp -inf, count for nothing; of nothing but such sets the result is
    zeros and -inf. After FlashInfer's merge of attention states (Ye et al. 2025).
    """
    top = jnp.maximum(lses.max(0), LEAST)
    weights = jnp.exp2(lses - top)
    norm = weights.sum(0)
    safe = jnp.where(norm > 0, norm, 1.0)
    out = (outs.astype(jnp.float32) * weights[..., None]).sum(0) / safe[..., None]
    return out.astype(out_dtype or outs.dtype), jnp.where(norm > 0, top + jnp.log2(safe), -jnp.inf)
