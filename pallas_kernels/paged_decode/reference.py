"""Plain XLA `paged_decode`: the specification, and the path every device without a kernel runs."""

from __future__ import annotations

import jax

from pallas_kernels.paged_prefill.reference import paged_prefill


def paged_decode(
    q: jax.Array,  # [S, H, D]
    k_pages: jax.Array,  # [P, K, page_size, D]
    v_pages: jax.Array,  # [P, K, page_size, D]
    page_table: jax.Array,  # [S, N] int32; entries past a request's pages are not used
    lengths: jax.Array,  # [S] int32, tokens to attend to, the row's own included; 0 for an idle row
    *,
    scale: float,
) -> jax.Array:  # [S, H, D]
    """One query token a row, at position `lengths - 1`, over the tokens `0 .. lengths - 1` of its request.

    Rows with `lengths == 0` give zeros. A chunk of one token is the same computation as a decode row.
    """
    return paged_prefill(q[:, None], k_pages, v_pages, page_table, lengths - 1, lengths, scale=scale)[:, 0]
