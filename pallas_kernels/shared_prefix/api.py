"""Decode attention that reads a prefix once for all the rows that share it ("cascade" attention, Ye et al. 2024).

The prefix of a block of rows is attended to by the prefill kernel, not causal, whose loads all of them share; the rest
of each row by the decode kernel; `merge_states` joins the two. The specification is `paged_decode`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.merge_states import merge_states
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.shared_prefix.groups import Groups

FLOAT32 = jnp.dtype(jnp.float32)


def shared_prefix_decode(
    q: jax.Array,  # [S, H, D]
    k_pages: jax.Array,  # [P, page_size, K, D]
    v_pages: jax.Array,  # [P, page_size, K, D]
    page_table: jax.Array,  # [S, N] int32; entries past a request's pages are not used
    lengths: jax.Array,  # [S] int32, tokens to attend to, the row's own included; 0 for an idle row
    groups: Groups,
    k_scale: jax.Array | None = None,  # [P, page_size, K] float32, what 8-bit keys are to be multiplied by
    v_scale: jax.Array | None = None,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:  # [S, H, D] of q's dtype, [S, H] float32
    """The same as `paged_decode` without a window, given the `groups` of `page_table`."""
    heads, dim = q.shape[1:]
    prefix, prefix_lse = paged_prefill(
        q[groups.rows],
        k_pages,
        v_pages,
        page_table[groups.rows[:, 0]],
        jnp.zeros_like(groups.lengths),
        groups.lengths,
        None,
        k_scale,
        v_scale,
        scale=scale,
        causal=False,
        soft_cap=soft_cap,
        out_dtype=FLOAT32,
    )
    tail, tail_lse = paged_decode(
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        groups.skipped,
        k_scale,
        v_scale,
        scale=scale,
        soft_cap=soft_cap,
        out_dtype=FLOAT32,
    )
    grouped = (groups.place >= 0)[:, None]
    # A weight of 0 does not keep out what is not a number: a row of no group must see none of another's.
    prefix = jnp.where(grouped[..., None], prefix.reshape(-1, heads, dim)[groups.place], 0.0)
    prefix_lse = jnp.where(grouped, prefix_lse.reshape(-1, heads)[groups.place], -jnp.inf)
    return merge_states(jnp.stack([prefix, tail]), jnp.stack([prefix_lse, tail_lse]), out_dtype=q.dtype)
