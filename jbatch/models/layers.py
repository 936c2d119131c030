"""Building blocks that model families share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

FEW_ROWS = 128
"""Up to this many rows XLA multiplies faster on a CPU with activations as columns (`weight @ x.T`)."""


Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines [T, D / 2] of rotary positions."""


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


def rotary_angles(positions: jax.Array, dim: int, theta: float) -> Angles:
    """Cosines and sines [T, D / 2] by which `rotate` turns heads of `dim` at `positions` [T]; once a step."""
    frequency = theta ** (-jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2))
    angle = positions[:, None].astype(jnp.float32) * frequency
    # A loop, since XLA would fuse them into every layer's rotation and compute them anew there.
    cos, sin = lax.map(lambda which: jnp.where(which == 0, jnp.cos(angle), jnp.sin(angle)), jnp.arange(2))
    return cos, sin


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Rotary position embedding of `x` [T, heads, D] in Hugging Face's half-split layout (Su et al. 2021)."""
    cos, sin = (part[:, None] for part in angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
