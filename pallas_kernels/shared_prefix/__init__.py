"""Attention of one new token a request, for requests that share leading pages."""

from pallas_kernels.shared_prefix.api import shared_prefix_decode
from pallas_kernels.shared_prefix.groups import Groups, group_rows

__all__ = ["Groups", "group_rows", "shared_prefix_decode"]
