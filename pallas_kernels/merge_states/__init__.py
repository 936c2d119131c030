"""Joining attention over disjoint sets of tokens."""

from pallas_kernels.merge_states.api import merge_states

__all__ = ["merge_states"]
