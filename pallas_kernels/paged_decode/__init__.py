"""Attention of one new token a request over the pages of that request."""

from pallas_kernels.paged_decode.api import paged_decode

__all__ = ["paged_decode"]
