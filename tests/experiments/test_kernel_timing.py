"""The script for a GPU, as far as it runs without one."""

from __future__ import annotations

import pytest

from experiments.kernel_timing import LIMITS, correctness
from pallas_kernels.shared_prefix import groups


def test_every_kernel_is_checked_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In interpret mode, on two short requests, which are grouped all the same."""
    monkeypatch.setattr(groups, "FEWEST_ROWS", 2)
    monkeypatch.setattr(groups, "FEWEST_TOKENS", 16)
    results = correctness(["llama3-8b"], rows=2, length=64, interpret=True)
    assert [result for result in results if not result["holds"]] == []
    operations = {"paged_decode", "paged_decode, int8", "paged_prefill", "kv_write", "shared_prefix"}
    assert {(result["operation"], result["dtype"]) for result in results} == {
        (operation, dtype) for operation in operations for dtype in LIMITS
    }
