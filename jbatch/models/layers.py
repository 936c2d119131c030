"""Building blocks that model families share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

FEW_ROWS = 64
"""Up to this many rows XLA multiplies faster on a CPU with activations as columns (`weight @ x.T`)."""


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x` [T, in] times `weight` [out, in] -> [T, out]."""
    if x.shape[0] <= FEW_ROWS:
        # Without the barrier XLA turns the product around again.
        return lax.optimization_barrier(weight @ x.T).T
    return x @ weight.T


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32 (Zhang & Sennrich 2019)."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    return y.astype(x.dtype) * weight


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of `x` [T, heads, D] in Hugging Face's half-split layout (Su et al. 2021)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
