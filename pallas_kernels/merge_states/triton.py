"""`merge_states` as a Pallas kernel for Triton: one program a row and head."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.blocks import LEAST
from pallas_kernels.tiles import power_of_two


@partial(jax.jit, static_argnames=("out_dtype", "interpret"))
def merge_states(
    outs: jax.Array,  # [n, S, H, D]
    lses: jax.Array,  # [n, S, H] float32
    *,
    out_dtype: jnp.dtype | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # [S, H, D] of `out_dtype`, [S, H] float32
    """See `reference.merge_states`."""
    _, rows, heads, dim = outs.shape
    return pl.pallas_call(
        _kernel,
        grid=(rows, heads),
        out_shape=(
            jax.ShapeDtypeStruct((rows, heads, dim), out_dtype or outs.dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="merge_states",
    )(outs, lses)


def _kernel(outs_ref: Any, lses_ref: Any, out_ref: Any, lse_ref: Any) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    parts, _, _, dim = outs_ref.shape
    part = jnp.arange(power_of_two(parts), dtype=jnp.int32)
    dims = jnp.arange(power_of_two(dim), dtype=jnp.int32)
    lses = plt.load(lses_ref.at[part, row, head], mask=part < parts, other=-jnp.inf)
    mask = (part < parts)[:, None] & (dims < dim)[None]
    outs = plt.load(outs_ref.at[part[:, None], row, head, dims[None]], mask=mask, other=0.0)
    top = jnp.maximum(jnp.max(lses), LEAST)  # of nothing but -inf too, weights are 0
    weights = jnp.exp2(lses - top)
    norm = jnp.sum(weights)
    safe = jnp.where(norm > 0, norm, 1.0)
    out = jnp.sum(outs.astype(jnp.float32) * weights[:, None], axis=0) / safe
    plt.store(out_ref.at[row, head, dims], out.astype(out_ref.dtype), mask=dims < dim)
    lse_ref[row, head] = jnp.where(norm > 0, top + jnp.log2(safe), -jnp.inf)
