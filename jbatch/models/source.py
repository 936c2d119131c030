"""A model as it lies on disk, whatever the format: Hugging Face names, Hugging Face layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jbatch.config import UserError
from jbatch.models.llama import LlamaConfig
from jbatch.tokenizer import Tokenizer

SUPPORTED = "jbatch reads unquantised Llama-family models (LlamaForCausalLM, MistralForCausalLM) and Llama GGUFs"


@dataclass(frozen=True)
class Source:
    """An opened model: what is known without reading its weights, and a way to read them one by one.

    Attributes:
      path: the file or directory, to name in errors.
      config: the model's shape, already checked.
      shapes: the shape of every tensor, by Hugging Face name.
      read: reads one tensor by name, in any float dtype; errors of any type mean an unreadable file.
      tokenizer: the model's tokenizer.
    """

    path: Path
    config: LlamaConfig
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        """Raises UserError where the config is impossible or disagrees with the tensors or tokenizer."""
        check_config(self.path, self.config)
        check_shapes(self.path, self.config, self.shapes)
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise UserError(
                f"{self.path}: the tokenizer has {self.tokenizer.vocab_size} tokens but the model only "
                f"{self.config.vocab_size}: the files do not belong together; download the model again"
            )

    def tensor(self, name: str) -> np.ndarray:
        """One tensor's values. Raises UserError if they cannot be read or are not finite."""
        try:
            values = self.read(name)
        except Exception as error:  # each format's reader has its own set of errors
            raise UserError(f"{self.path}: cannot read {name} ({one_line(error)}): download it again") from None
        if not np.isfinite(values).all():
            raise UserError(f"{self.path}: {name} holds infinities or NaN: the file is damaged; download it again")
        return values


def one_line(error: BaseException) -> str:
    """The error's type and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def tensor_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor a model of this config has, in Hugging Face's naming."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (q, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, q)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)


def check_config(path: Path, config: LlamaConfig) -> None:
    """Raises UserError where no model can have this config."""
    c = config
    model = (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.max_position_embeddings)
    attention = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    if min(model + attention) < 1:
        problem = "a size is not positive"
    elif c.num_attention_heads % c.num_key_value_heads:
        problem = f"{c.num_attention_heads} heads cannot share {c.num_key_value_heads} key-value heads"
    elif c.head_dim % 2:
        problem = f"the head dimension {c.head_dim} is odd"
    elif not (math.isfinite(c.rope_theta) and c.rope_theta >= 1):
        problem = f"rope_theta is {c.rope_theta}"
    elif not 0 < c.rms_norm_eps < 1:
        problem = f"rms_norm_eps is {c.rms_norm_eps}"
    else:
        return
    raise UserError(f"{path}: impossible model config: {problem}; download the model again")


def check_shapes(path: Path, config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError unless `shapes` are exactly those of a model with this config."""
    expected = set()
    for name, shape in tensor_shapes(config):
        if name not in shapes:
            raise UserError(f"{path}: the tensor {name} is missing: the model is incomplete; download it again")
        if shapes[name] != shape:
            raise UserError(
                f"{path}: {name} has shape {shapes[name]}, its config says {shape}: "
                f"the files do not belong together; download the model again"
            )
        expected.add(name)
    if extra := sorted(set(shapes) - expected):
        raise UserError(f"{path}: the tensor {extra[0]} is not part of a plain Llama model; {SUPPORTED}")
