"""Attention kernels over a paged KV cache. One folder an operation; `reference.py` is its specification.

Shapes used throughout: S decode rows, C chunk rows of Q tokens, T token rows, H query heads, K KV heads
(H a multiple of K), D head size, P pages of `page_size` tokens, N pages a request at most.
"""
