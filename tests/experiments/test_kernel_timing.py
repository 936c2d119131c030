"""The script for a GPU, as far as it runs without one."""

from __future__ import annotations

from experiments.kernel_timing import LIMITS, correctness


def test_every_kernel_is_checked_before_it_is_timed() -> None:
    """In interpret mode, on two short requests."""
    results = correctness(["llama3-8b"], rows=2, length=64, interpret=True)
    assert [result for result in results if not result["holds"]] == []
    operations = {"paged_decode", "paged_decode, int8", "paged_prefill", "kv_write", "shared_prefix"}
    assert {(result["operation"], result["dtype"]) for result in results} == {
        (operation, dtype) for operation in operations for dtype in LIMITS
    }
