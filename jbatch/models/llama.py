"""The Llama family: SmolLM2, Llama 2/3, TinyLlama, Mistral (without a sliding window)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jbatch.config import UserError
from jbatch.core.model import Batch, Forward, Params
from jbatch.core.state import KVPages
from jbatch.models.layers import Angles, linear, rms_norm, rotary_angles, rotate
from pallas_kernels.dispatch import VARIABLE, mode
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.shared_blocks import SharedBlocks, shared_blocks

FLOAT32 = jnp.dtype(jnp.float32)


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

    @property
    def layer_weights(self) -> int:
        """Weights that multiply every token, over all layers."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return self.num_hidden_layers * self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights that multiply a token whose logits are wanted."""
        return self.vocab_size * self.hidden_size


class LlamaLayer(nnx.Module):
    """One block. Weights are stored [out, in]; q, k and v are fused along `out`."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype):
        hidden, inner = config.hidden_size, config.intermediate_size
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.attention_norm = nnx.Param(jnp.ones((hidden,), dtype))
        self.qkv = nnx.Param(jnp.zeros((q + 2 * kv, hidden), dtype))
        self.out = nnx.Param(jnp.zeros((hidden, q), dtype))
        self.mlp_norm = nnx.Param(jnp.ones((hidden,), dtype))
        self.gate = nnx.Param(jnp.zeros((inner, hidden), dtype))
        self.up = nnx.Param(jnp.zeros((inner, hidden), dtype))
        self.down = nnx.Param(jnp.zeros((hidden, inner), dtype))
        self.config = config

    def __call__(
        self, x: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: Batch, angles: Angles, shared: SharedBlocks
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`x` [T, hidden] and the layer's pages -> the same, one block on."""
        epsilon = self.config.rms_norm_eps
        mixed, k_pages, v_pages = self._attention(
            rms_norm(x, self.attention_norm[...], epsilon), k_pages, v_pages, batch, angles, shared
        )
        x = x + mixed
        y = rms_norm(x, self.mlp_norm[...], epsilon)
        y = jax.nn.silu(linear(y, self.gate[...])) * linear(y, self.up[...])
        return x + linear(y, self.down[...]), k_pages, v_pages

    def _attention(
        self, x: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: Batch, angles: Angles, shared: SharedBlocks
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        qkv = linear(x, self.qkv[...]).reshape(x.shape[0], heads + 2 * kv_heads, dim)
        qk = rotate(qkv[:, : heads + kv_heads], angles)
        q, k, v = qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]
        with jax.named_scope("attention"):
            k_pages, v_pages = kv_write(k, v, k_pages, v_pages, batch.page, batch.offset)
            mixed = attend(q, k_pages, v_pages, batch, shared)
        return linear(mixed.reshape(x.shape[0], -1), self.out[...]), k_pages, v_pages


def attend(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: Batch, shared: SharedBlocks) -> jax.Array:
    """Queries [T, H, D] of all rows over the pages of their requests -> [T, H, D]."""
    rows, chunks = batch.decode_lengths.shape[0], batch.chunk_lengths.shape[0]
    heads, dim = q.shape[1:]
    scale = dim**-0.5
    table, lengths = batch.decode_table, batch.decode_lengths
    decoded, _ = paged_decode(q[:rows], k_pages, v_pages, table, lengths, shared=shared, scale=scale)
    if not chunks:
        return decoded
    chunk_q = q[rows:].reshape(chunks, -1, heads, dim)
    table, start, lengths = batch.chunk_table, batch.chunk_start, batch.chunk_lengths
    prefilled, _ = paged_prefill(chunk_q, k_pages, v_pages, table, start, lengths, scale=scale)
    return jnp.concatenate([decoded, prefilled.reshape(-1, heads, dim)])


class Llama(nnx.Module):
    """Embedding, layers, final norm and head (the embedding itself where weights are tied)."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype = FLOAT32):
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([LlamaLayer(config, dtype) for _ in range(config.num_hidden_layers)])
        self.final_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        if not config.tie_word_embeddings:
            self.head = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.config = config

    def __call__(self, kv: KVPages, batch: Batch) -> tuple[jax.Array, KVPages]:
        """Logits [S + C, vocab_size] float32 of `batch.logit_rows`, and the pages with the batch's tokens in."""
        x = self.embedding[...][batch.tokens]
        angles = rotary_angles(batch.positions, self.config.head_dim, self.config.rope_theta)
        num_pages, page_size = kv.k[0].shape[:2]
        shared = shared_blocks(batch.decode_table, batch.decode_lengths, page_size, num_pages)
        k_pages, v_pages = [], []
        for layer, k, v in zip(self.layers, kv.k, kv.v, strict=True):
            x, k, v = layer(x, k, v, batch, angles, shared)
            k_pages.append(k)
            v_pages.append(v)
        x = rms_norm(x[batch.logit_rows], self.final_norm[...], self.config.rms_norm_eps)
        head = self.embedding if self.config.tie_word_embeddings else self.head
        logits = linear(x, head[...]).astype(jnp.float32)
        return logits, KVPages(k=tuple(k_pages), v=tuple(v_pages))


def make_forward(config: LlamaConfig) -> Forward:
    """The model as a pure function of its parameters, a nested dict shaped like `Llama`'s own state.

    Raises `UserError` where the environment asks for kernels of an unknown kind, or that the device does not run.
    """
    try:
        chosen = mode()
    except ValueError as error:
        raise UserError(str(error)) from None
    if chosen == "pallas" and jax.default_backend() != "gpu":
        raise UserError(f"{VARIABLE} is 'pallas', which needs an NVIDIA GPU: here it must be auto, xla or interpret")
    graph = nnx.split(nnx.eval_shape(lambda: Llama(config)))[0]

    def forward(params: Params, kv: KVPages, batch: Batch) -> tuple[jax.Array, KVPages]:
        return nnx.merge(graph, params)(kv, batch)

    return forward


def init_kv(config: LlamaConfig, dtype: jnp.dtype, num_pages: int, page_size: int) -> KVPages:
    """Empty pages. Zeros, never uninitialised memory: a masked weight of 0 times NaN would be NaN."""
    shape = (num_pages, page_size, config.num_key_value_heads, config.head_dim)

    def layers() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers))

    return KVPages(k=layers(), v=layers())
