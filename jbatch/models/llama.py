"""The Llama family: SmolLM2, Llama 2/3, TinyLlama, Mistral (without a sliding window)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama model, named as in Hugging Face's `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool


class LlamaLayer(nnx.Module):
    """One block. Weights are stored [out, in]; q, k, v and gate, up are fused along `out`."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype):
        hidden, inner = config.hidden_size, config.intermediate_size
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.attention_norm = nnx.Param(jnp.ones((hidden,), dtype))
        self.qkv = nnx.Param(jnp.zeros((q + 2 * kv, hidden), dtype))
        self.out = nnx.Param(jnp.zeros((hidden, q), dtype))
        self.mlp_norm = nnx.Param(jnp.ones((hidden,), dtype))
        self.gate_up = nnx.Param(jnp.zeros((2 * inner, hidden), dtype))
        self.down = nnx.Param(jnp.zeros((hidden, inner), dtype))


class Llama(nnx.Module):
    """Embedding, layers, final norm and head (the embedding itself where weights are tied)."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype = jnp.dtype(jnp.float32)):
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([LlamaLayer(config, dtype) for _ in range(config.num_hidden_layers)])
        self.final_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        if not config.tie_word_embeddings:
            self.head = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
