"""A tiny Llama model that can be written in every format jbatch reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from jbatch.models.llama import LlamaConfig
from jbatch.models.source import tensor_shapes
from jbatch.tokenizer import BYTE_OF, byte_level_bpe

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTE_OF, "Ġt", "he", "Ġthe"]
MERGES = ["Ġ t", "h e", "Ġt he"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py does it."""
    split = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


class TinyModel:
    """Random weights in Hugging Face's naming, and writers for them. `changes` replace what is written."""

    def __init__(self, tied: bool = True):
        self.config = LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rope_theta=1e5,
            rms_norm_eps=2.0**-17,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
        )
        rng = np.random.default_rng(0)
        self.weights = {n: rng.standard_normal(s, dtype=np.float32) for n, s in tensor_shapes(self.config)}

    def gguf_tensors(self) -> dict[str, np.ndarray]:
        """The weights in GGUF's naming and row order."""
        tensors = {}
        for name, value in self.weights.items():
            if ".q_proj." in name or ".k_proj." in name:
                value = permute(value, 4 if ".q_proj." in name else 2)
            kind = name.removesuffix(".weight")
            layer = ""
            if kind.startswith("model.layers."):
                _, _, number, kind = kind.split(".", 3)
                layer = f"blk.{number}."
            tensors[f"{layer}{GGUF_NAMES[kind]}.weight"] = value
        return tensors

    def write_gguf(
        self,
        path: Path,
        *,
        architecture: str = "llama",
        tensors: dict[str, np.ndarray | None] | None = None,
        quantise: str | None = None,
        extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
        tokenizer: str = "gpt2",
        pre: str = "smollm",
    ) -> Path:
        """Write a GGUF file; `tensors` replace (or with None, leave out) those of that name."""
        config, writer = self.config, gguf.GGUFWriter(path, architecture)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_tokenizer_model(tokenizer)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)
        extra(writer)
        for name, value in (self.gguf_tensors() | (tensors or {})).items():
            if value is not None and quantise and value.ndim == 2:
                kind = gguf.GGMLQuantizationType[quantise]
                writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
            elif value is not None:
                writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def write_huggingface(self, directory: Path, *, shards: int = 1, **config: Any) -> Path:
        """Write a Hugging Face directory; `config` replaces entries of config.json."""
        directory.mkdir(parents=True)
        raw = dataclasses.asdict(self.config) | {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}
        (directory / "config.json").write_text(json.dumps(raw | config))
        byte_level_bpe(TOKENS, MERGES, pre="smollm", special=SPECIAL).save(str(directory / "tokenizer.json"))
        settings = {"eos_token": SPECIAL[2], "bos_token": {"content": SPECIAL[1]}, "chat_template": TEMPLATE}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        names = sorted(self.weights)
        if shards == 1:
            save_file(self.weights, directory / "model.safetensors")
            return directory
        files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({n: self.weights[n] for n in names if files[n] == file}, directory / file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return directory


@pytest.fixture
def tiny() -> TinyModel:
    """A tiny model with tied embeddings."""
    return TinyModel()


@pytest.fixture
def tiny_untied() -> TinyModel:
    """A tiny model with a head of its own."""
    return TinyModel(tied=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, in use for the test."""
    monkeypatch.setenv("JBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def lines() -> list[str]:
    """What `load_model` reports."""
    return []
