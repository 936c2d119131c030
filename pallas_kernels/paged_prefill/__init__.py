"""Attention of chunks of new tokens over the pages of their requests."""

from pallas_kernels.paged_prefill.api import paged_prefill

__all__ = ["paged_prefill"]
