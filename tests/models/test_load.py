"""Loading by name: what is found, the shape of the params, and that the default model's weights are right."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jbatch.config import UserError
from jbatch.models.llama import Llama
from jbatch.models.load import load_model

GOLDENS = Path(__file__).parent.parent / "goldens" / "smollm2.npz"


@pytest.mark.parametrize("fixture", ["tiny", "tiny_untied"])
def test_params_fit_the_module(cache, fixture, request, tmp_path, lines):
    path = request.getfixturevalue(fixture).write_huggingface(tmp_path / "m")
    loaded = load_model(str(path), report=lines.append)
    expected = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Llama(loaded.config))))
    assert jax.tree.structure(loaded.params) == jax.tree.structure(expected)
    assert jax.tree.map(jnp.shape, loaded.params) == jax.tree.map(jnp.shape, expected)


def test_unknown_names(cache, tmp_path, lines):
    for name in ("", "nothing", "a/b/c", "no/such.gguf", "x" * 5000, "a\0b", "~nobody-of-that-name/x"):
        with pytest.raises(UserError):
            load_model(name, report=lines.append)
    with pytest.raises(UserError, match="dtype"):
        load_model("any", dtype="int4", report=lines.append)


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding of x [T, heads, head_dim], row i with row i + head_dim / 2."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def forward(config, params, ids: np.ndarray) -> np.ndarray:
    """Logits [T, vocab] of a Llama model, written once more in numpy, straight from the equations."""

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    x, (n, m) = params["embedding"][ids], (config.num_attention_heads, config.num_key_value_heads)
    causal = np.where(np.tri(len(ids), dtype=bool), 0, -np.inf)
    for layer in params["layers"].values():
        heads = (norm(x, layer["attention_norm"]) @ layer["qkv"].T).reshape(len(ids), n + 2 * m, -1)
        q, k = rotate(heads[:, :n], config.rope_theta), rotate(heads[:, n : n + m], config.rope_theta)
        k, v = np.repeat(k, n // m, 1), np.repeat(heads[:, n + m :], n // m, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.head_dim) + causal
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(len(ids), -1) @ layer["out"].T
        gate, up = (norm(x, layer["mlp_norm"]) @ layer[name].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"].T
    return norm(x, params["final_norm"]) @ params["embedding"].T


def test_default_model_gives_the_tokens_of_transformers(smollm2):
    goldens = np.load(GOLDENS)
    ends = np.cumsum(goldens["prompt_lengths"])
    for index in (3, 22):
        prompt = goldens["prompts"][ends[index] - goldens["prompt_lengths"][index] : ends[index]]
        tokens = goldens["tokens"][index]
        ids = np.concatenate([prompt, tokens[:-1]])
        logits = forward(smollm2.config, jax.tree.map(np.asarray, smollm2.params), ids)[-len(tokens) :]
        np.testing.assert_array_equal(logits.argmax(-1), tokens)
        logprobs = logits.max(-1) - np.logaddexp.reduce(logits.astype(float), -1)
        np.testing.assert_allclose(logprobs, goldens["logprobs"][index], atol=1e-3)
