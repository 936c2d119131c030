"""Which implementation runs where."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import decode_problem
from tiny import TINY

from jbatch.config import UserError
from jbatch.models.llama import make_forward
from pallas_kernels import dispatch
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_decode.reference import paged_decode as reference


@pytest.fixture
def set_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    dispatch.mode.cache_clear()
    dispatch._tell.cache_clear()
    yield partial(monkeypatch.setenv, dispatch.VARIABLE)
    dispatch.mode.cache_clear()


def lowered(function: object, dim: int = 16) -> jax.stages.Lowered:
    p = decode_problem([5, 40], dim=dim)
    run = jax.jit(lambda *args: function(*args, scale=p.scale)[0])
    return run.lower(p.q[:, 0], p.k_pages, p.v_pages, p.page_table, p.lengths)


def optimised(function: object) -> str:
    """The program a CPU runs, without the names of what it came from."""
    text = lowered(function).compile().as_text()
    return re.sub(r", metadata=\{[^}]*\}|stack_frame_id=\d+", "", text[text.index("\n\n%") :])


def test_a_cpu_runs_the_reference_and_chooses_nothing_at_run_time(set_mode: object) -> None:
    """Dispatch by device leaves nothing behind, not even a branch that is never taken."""
    set_mode("auto")
    assert optimised(paged_decode) == optimised(reference)


def test_the_interpreter_gives_what_the_reference_gives(set_mode: object) -> None:
    set_mode("interpret")
    p = decode_problem([5, 40, 0])
    args = p.q[:, 0], p.k_pages, p.v_pages, p.page_table, p.lengths
    out, lse = jax.jit(partial(paged_decode, scale=p.scale))(*args)
    expected = jax.jit(partial(reference, scale=p.scale))(*args)
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)


def test_pallas_means_the_kernel_whatever_the_device(set_mode: object) -> None:
    set_mode("pallas")
    with pytest.raises(ValueError, match="interpret mode"):
        lowered(paged_decode)


def test_what_no_kernel_takes_runs_as_plain_xla_and_is_told_once(
    set_mode: object, caplog: pytest.LogCaptureFixture
) -> None:
    set_mode("pallas")
    with caplog.at_level(logging.WARNING):
        lowered(paged_decode, dim=8)
        lowered(paged_decode, dim=8)
    assert [record.message for record in caplog.records] == [
        "no kernel for heads of size 8, only for 16 to 256: plain XLA runs instead"
    ]


def test_a_cpu_is_not_told_about_kernels_it_would_not_run(set_mode: object, caplog: pytest.LogCaptureFixture) -> None:
    set_mode("auto")
    lowered(paged_decode, dim=9)
    assert not caplog.records


def test_a_bad_mode_is_one_line(set_mode: object) -> None:
    set_mode("triton")
    with pytest.raises(ValueError) as raised:
        lowered(paged_decode)
    line = "JBATCH_KERNELS is 'triton': it must be one of auto, xla, pallas, interpret"
    assert str(raised.value) == line
    with pytest.raises(UserError, match=line):
        make_forward(TINY)


def test_kernels_that_the_device_does_not_run_are_one_line(set_mode: object) -> None:
    set_mode("pallas")
    with pytest.raises(UserError, match="JBATCH_KERNELS is 'pallas', which needs an NVIDIA GPU: here"):
        make_forward(TINY)


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((1 << 20, 16, 1, 128), "bfloat16", True),
        ((1 << 20, 16, 1, 128), "int8", True),
        ((1 << 20, 16, 1, 256), "bfloat16", False),
        ((1 << 20, 16, 1, 256), "int8", False),
        ((1 << 10, 16, 8, 320), "bfloat16", False),
        ((1 << 10, 16, 8, 128), "float64", False),
    ],
)
def test_the_limits_of_kernels(shape: tuple[int, ...], dtype: str, fits: bool) -> None:
    pages = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    q = jax.ShapeDtypeStruct((1, 32, shape[3]), jnp.bfloat16)
    assert (dispatch.unsupported_pages(pages, q) is None) == fits
