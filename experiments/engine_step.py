"""Engine steps of a model with random weights."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.prefilled import prefilled
from jbatch.config import Bucket, EngineConfig
from jbatch.core.inbox import InboxBuilder
from jbatch.core.step import step
from jbatch.models.llama import Llama, LlamaConfig, init_kv, make_forward

BFLOAT16 = jnp.dtype(jnp.bfloat16)

LLAMA3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)


def weight_shapes(model: LlamaConfig) -> Any:
    """The model's parameters in bfloat16, shapes only."""
    state = nnx.split(nnx.eval_shape(lambda: Llama(model, BFLOAT16)))[1]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.to_pure_dict(state))


@cache
def random_weights(model: LlamaConfig) -> Any:
    """Parameters drawn on the device."""
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, BFLOAT16) * BFLOAT16.type(0.02), static_argnums=1)
    return jax.tree.map(lambda x: draw(jax.random.key(x.size % 1000), x.shape), weight_shapes(model))


def step_seconds(model: LlamaConfig, running: int, context: int, repeats: int = 20) -> float:
    """Seconds of a decode step of `running` requests that hold about `context` tokens each."""
    page_size, chunk_size, max_chunks = EngineConfig.page_size, 64, 8
    grown = -(-running * context // (max_chunks * chunk_size)) + repeats + 8  # tokens, while the others' prompts go on
    config = EngineConfig(
        max_model_len=2 * context,
        max_running=running,
        max_slots=running,
        num_pages=running * (-(-(context + grown) // page_size) + 1) + 1,
        chunk_size=chunk_size,
        max_chunks=max_chunks,
        prefix_caching=False,
    )
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, model.vocab_size, context).tolist()) for _ in range(running)]
    state = prefilled(config, init_kv(model, BFLOAT16, config.num_pages, config.page_size), prompts)
    run = jax.jit(
        partial(step, forward=make_forward(model), config=config, bucket=Bucket(running, 0)), donate_argnums=1
    )
    weights, nothing = random_weights(model), jnp.asarray(InboxBuilder(config).buffer)
    for _ in range(3):
        state, outbox = run(weights, state, nothing)
    outbox.block_until_ready()
    begun = time.perf_counter()
    for _ in range(repeats):
        state, outbox = run(weights, state, nothing)
    outbox.block_until_ready()
    return (time.perf_counter() - begun) / repeats
