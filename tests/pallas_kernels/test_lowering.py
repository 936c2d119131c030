"""What operations become when they are lowered for a GPU, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.h200 import abstract_gpu
from pallas_kernels.kv_write import kv_write
from pallas_kernels.merge_states import merge_states
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.shapes import MODELS, HeadShape

TRITON = "__gpu$xla.gpu.triton"

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def arguments(operation: Callable[..., Any], model: HeadShape, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    pages = array(512, model.page_size, model.kv_heads, model.dim, dtype=dtype)
    if operation is kv_write:
        new = array(7, model.kv_heads, model.dim, dtype=dtype)
        return new, new, pages, pages, array(7), array(7)
    if operation is paged_decode:
        return array(4, model.heads, model.dim, dtype=dtype), pages, pages, array(4, 32), array(4)
    q = array(2, 16, model.heads, model.dim, dtype=dtype)
    return q, pages, pages, array(2, 32), array(2), array(2)


def lower(operation: Callable[..., Any], *args: jax.ShapeDtypeStruct, **settings: Any) -> str:
    with abstract_gpu():
        return jax.jit(partial(operation, **settings)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("operation", [kv_write, paged_decode, paged_prefill], ids=lambda op: op.__name__)
def test_a_gpu_gets_kernels(operation: Callable[..., Any], model: str) -> None:
    shape = MODELS[model]
    settings = {} if operation is kv_write else {"scale": 0.1, "window": shape.window, "soft_cap": shape.soft_cap}
    text = lower(operation, *arguments(operation, shape, "bfloat16"), **settings)
    assert TRITON in text
    assert f'name = "{operation.__name__}"' in text
    assert "stablehlo.gather" not in text


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("operation", [kv_write, paged_decode, paged_prefill], ids=lambda op: op.__name__)
def test_of_any_dtype(operation: Callable[..., Any], dtype: str) -> None:
    settings = {} if operation is kv_write else {"scale": 0.1}
    assert TRITON in lower(operation, *arguments(operation, MODELS["llama3-8b"], dtype), **settings)


def test_merging_is_a_kernel() -> None:
    assert TRITON in lower(merge_states, array(2, 4, 32, 128, dtype=jnp.float32), array(2, 4, 32, dtype=jnp.float32))


def test_other_accelerators_get_plain_xla() -> None:
    args = arguments(paged_decode, MODELS["llama3-8b"], "bfloat16")
    text = jax.jit(partial(paged_decode, scale=0.1)).trace(*args).lower(lowering_platforms=("rocm",)).as_text()
    assert TRITON not in text
    assert "stablehlo.gather" in text
