"""`kv_write` as a Pallas kernel for Triton: one program a token, which stores its key and its value in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.tiles import power_of_two


@partial(jax.jit, static_argnames="interpret")
def kv_write(
    k_new: jax.Array,  # [T, K, D]
    v_new: jax.Array,  # [T, K, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page: jax.Array,  # [T] int32
    offset: jax.Array,  # [T] int32
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.kv_write`."""
    return pl.pallas_call(
        _kernel,
        grid=(k_new.shape[0],),
        out_shape=tuple(jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in (k_pages, v_pages)),
        input_output_aliases={2: 0, 3: 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="kv_write",
    )(k_new, v_new, k_pages, v_pages, page, offset)


def _kernel(
    k_new_ref: Any,
    v_new_ref: Any,
    k_before_ref: Any,
    v_before_ref: Any,
    page_ref: Any,
    offset_ref: Any,
    k_ref: Any,
    v_ref: Any,
) -> None:
    token = pl.program_id(0)
    num_pages, _, kv_heads, dim = k_ref.shape
    head = jnp.arange(power_of_two(kv_heads), dtype=jnp.int32)[:, None]
    dims = jnp.arange(power_of_two(dim), dtype=jnp.int32)[None]
    page, offset = page_ref[token], offset_ref[token]
    inside = (head < kv_heads) & (dims < dim)
    written = inside & (page >= 0) & (page < num_pages)
    for new_ref, pages_ref in ((k_new_ref, k_ref), (v_new_ref, v_ref)):
        new = plt.load(new_ref.at[token, head, dims], mask=inside, other=0.0)
        plt.store(pages_ref.at[page, offset, head, dims], new.astype(pages_ref.dtype), mask=written)
