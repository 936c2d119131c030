"""`merge_states` for whatever device compiles it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.merge_states import reference, triton


def merge_states(
    outs: jax.Array,  # [n, S, H, D], attention over n disjoint sets of tokens
    lses: jax.Array,  # [n, S, H] float32, base-2 log-sum-exp of the scores of each
    *,
    out_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array]:  # [S, H, D] of `out_dtype` (that of `outs` unless given), [S, H] float32
    """Attention over all the sets together and its base-2 log-sum-exp, as `reference.merge_states` specifies."""
    return dispatch(reference.merge_states, triton.merge_states, outs, lses, unsupported=None, out_dtype=out_dtype)
