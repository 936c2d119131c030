"""`kv_write` as a Pallas kernel for Triton: one program a token, which stores its key and its value in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.kv_write.reference import quantise, stored
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


@partial(jax.jit, static_argnames="interpret")
def kv_write_int8(
    k_new: jax.Array,  # [T, K, D]
    v_new: jax.Array,  # [T, K, D]
    k_pages: jax.Array,  # [P, page_size, K, D] int8
    v_pages: jax.Array,  # [P, page_size, K, D] int8
    k_scale: jax.Array,  # [P, page_size, K] float32
    v_scale: jax.Array,  # [P, page_size, K] float32
    page: jax.Array,  # [T] int32
    offset: jax.Array,  # [T] int32
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `reference.kv_write_int8`."""
    kept = k_pages, v_pages, k_scale, v_scale
    return pl.pallas_call(
        _int8_kernel,
        grid=(k_new.shape[0],),
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in kept),
        input_output_aliases={2: 0, 3: 1, 4: 2, 5: 3},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="kv_write_int8",
    )(k_new, v_new, *kept, page, offset)


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
    page, offset = page_ref[token], offset_ref[token]
    written = (page >= 0) & (page < k_ref.shape[0])
    head, dims, inside = _places(k_ref.shape)
    for new_ref, pages_ref in ((k_new_ref, k_ref), (v_new_ref, v_ref)):
        new = plt.load(new_ref.at[token, head, dims], mask=inside, other=0.0)
        plt.store(pages_ref.at[page, offset, head, dims], stored(new, pages_ref.dtype), mask=inside & written)


def _int8_kernel(*refs: Any) -> None:
    k_new_ref, v_new_ref, _, _, _, _, page_ref, offset_ref, k_ref, v_ref, k_scale_ref, v_scale_ref = refs
    token = pl.program_id(0)
    page, offset = page_ref[token], offset_ref[token]
    written = (page >= 0) & (page < k_ref.shape[0])
    head, dims, inside = _places(k_ref.shape)
    heads = head[:, 0]
    for new_ref, pages_ref, scale_ref in ((k_new_ref, k_ref, k_scale_ref), (v_new_ref, v_ref, v_scale_ref)):
        numbers, factors = quantise(plt.load(new_ref.at[token, head, dims], mask=inside, other=0.0))
        plt.store(pages_ref.at[page, offset, head, dims], numbers, mask=inside & written)
        plt.store(scale_ref.at[page, offset, heads], factors, mask=(heads < k_ref.shape[2]) & written)


def _places(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Indices of heads [., 1] and of numbers [1, .], both up to a power of two, and which of them [., .] there are."""
    head = jnp.arange(power_of_two(shape[2]), dtype=jnp.int32)[:, None]
    dims = jnp.arange(power_of_two(shape[3]), dtype=jnp.int32)[None]
    return head, dims, (head < shape[2]) & (dims < shape[3])
