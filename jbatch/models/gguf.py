"""Read a Llama model from a GGUF file (llama.cpp's format), dequantised to float32."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jbatch.config import UserError
from jbatch.models.llama import LlamaConfig
from jbatch.models.source import SUPPORTED, Source, one_line
from jbatch.tokenizer import Tokenizer, byte_level_bpe

CONTROL, USER_DEFINED = 3, 4
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path) -> Source:
    """Open a GGUF file. Raises UserError if it is damaged or holds anything but a plain Llama model."""
    try:
        with np.errstate(all="raise"):  # a damaged header makes sizes overflow
            reader = gguf.GGUFReader(path)
            fields = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
        shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in tensors.items()}
        config = read_config(path, fields, shapes)
        tokenizer = read_tokenizer(path, fields)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: check the path") from None
    except Exception as error:  # the reader indexes into whatever it finds: a damaged file fails anywhere
        raise UserError(f"{path}: not a readable GGUF file ({one_line(error)}): download it again") from None

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        kind = name.split(".")[-2]
        return unpermute(values, heads[kind]) if kind in heads else values

    return Source(path, config, shapes, read, tokenizer)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if not match or match[2] not in NAMES:
        return name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{NAMES[match[2]]}.weight"


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of q and k rows.

    llama.cpp rotates neighbouring rows of a head together, Hugging Face rotates row i with row
    i + head_dim / 2, so `convert_hf_to_gguf.py` interleaves the two halves of each head.
    """
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def read_config(path: Path, fields: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> LlamaConfig:
    """The model's shape from the metadata. Raises UserError for what is not supported."""
    if (architecture := fields.get("general.architecture")) != "llama":
        raise UserError(f"{path}: its architecture is {architecture!r}; {SUPPORTED}")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in shapes:
        raise UserError(f"{path}: its rotary embedding is scaled, which is not supported; {SUPPORTED}")

    def number(key: str, default: int | None = None) -> int:
        value = fields.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{path}: its metadata lacks a usable llama.{key}: download it again")
        return value

    heads = number("attention.head_count")
    head_dim = number("attention.key_length", number("embedding_length") // max(heads, 1))
    if not number("attention.value_length", head_dim) == number("rope.dimension_count", head_dim) == head_dim:
        raise UserError(f"{path}: its key, value and rotary dimensions differ; {SUPPORTED}")
    return LlamaConfig(
        vocab_size=shapes.get("model.embed_tokens.weight", (0,))[0],
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=float(fields.get("llama.rope.freq_base", 10000.0)),
        rms_norm_eps=float(fields["llama.attention.layer_norm_rms_epsilon"]),
        max_position_embeddings=number("context_length"),
        tie_word_embeddings="lm_head.weight" not in shapes,
    )


def read_tokenizer(path: Path, fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer from the metadata. Raises UserError unless it is a byte-level BPE that is known."""
    if (kind := fields.get("tokenizer.ggml.model")) != "gpt2":
        raise UserError(
            f"{path}: its tokenizer is of the kind {kind!r}, only gpt2 (byte-level BPE) is read from GGUF: "
            "use the model's Hugging Face directory instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    ids: dict[str, Any] = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    named = {name: tokens[index] for name, index in ids.items() if index is not None}
    bos_token = named.get("bos", "")
    try:
        backend = byte_level_bpe(
            tokens,
            fields["tokenizer.ggml.merges"],
            pre=fields.get("tokenizer.ggml.pre", "default"),
            special=[token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL],
            added=[token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED],
            prefix=bos_token if fields.get("tokenizer.ggml.add_bos_token", False) else "",
        )
    except ValueError as error:
        raise UserError(f"{path}: its tokenizer cannot be used: {error}") from None
    return Tokenizer(
        backend,
        eos_ids=frozenset(ids[name] for name in ("eos", "eot") if name in named),
        bos_token=bos_token,
        eos_token=named.get("eos", ""),
        chat_template=fields.get("tokenizer.chat_template"),
    )
