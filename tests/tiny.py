"""A tiny random model that compiles in about a second, and an engine for it."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jbatch.config import EngineConfig
from jbatch.core.model import Model
from jbatch.models.llama import Llama, LlamaConfig, init_kv, make_forward

TINY = LlamaConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
EOS = 1

TINY_ENGINE = EngineConfig(
    max_model_len=192, max_running=16, max_slots=24, num_pages=256, page_size=8, chunk_size=16, max_chunks=4
)


@cache
def tiny_params() -> dict[str, object]:
    """Weights large enough that the next token is seldom a near tie."""
    rng = np.random.default_rng(7)
    shapes = nnx.to_pure_dict(nnx.split(nnx.eval_shape(lambda: Llama(TINY)))[1])

    def draw(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape.shape) * 0.3, jnp.float32)

    return jax.tree.map(draw, shapes)


def tiny_model() -> Model:
    """The tiny model as the engine takes it."""
    kv = partial(init_kv, TINY, jnp.dtype(jnp.float32))
    return Model(make_forward(TINY), tiny_params(), kv, TINY.vocab_size, TINY.max_position_embeddings, frozenset({EOS}))
