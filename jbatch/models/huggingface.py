"""Read a Llama model from a Hugging Face directory, or from the hub: config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import ml_dtypes  # noqa: F401  (makes numpy know bfloat16, which safetensors needs)
import numpy as np
import safetensors
import tokenizers

from jbatch.config import UserError
from jbatch.models.llama import LlamaConfig
from jbatch.models.source import SUPPORTED, Source, one_line
from jbatch.tokenizer import Tokenizer

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
INDEX = "model.safetensors.index.json"
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
FILES += [INDEX, "model.safetensors", "model-*-of-*.safetensors"]


def fetch_from_hub(name: str, report: Callable[[str], None]) -> Path:
    """Download the needed files of a hub repository into the hub's own cache; returns their directory.

    Raises UserError where the repository does not exist, is not open to this user, or cannot be reached.
    """
    report(f"Looking for {name} on the Hugging Face hub")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # the hub's client lets its HTTP library's errors through
        raise UserError(
            f"cannot get {name} from the Hugging Face hub ({one_line(error)}): check the name, the network "
            "and HF_TOKEN, or name a local directory or GGUF file"
        ) from None


def read_huggingface(directory: Path) -> Source:
    """Open a model directory. Raises UserError if it is damaged or no plain Llama model."""
    raw = read_json(directory / "config.json")
    config = read_config(directory / "config.json", raw)
    tensors = open_tensors(directory)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some checkpoints store the tied weight twice
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}

    def read(name: str) -> np.ndarray:
        values: np.ndarray = tensors[name][:]
        return values

    shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    return Source(directory, config, shapes, read, read_tokenizer(directory, raw))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the model is incomplete; download it again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable JSON ({one_line(error)}): download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object was expected: download it again")
    return value


def read_config(path: Path, raw: dict[str, Any]) -> LlamaConfig:
    """The model's shape from config.json. Raises UserError for what is not supported."""
    if refusal := unsupported(raw):
        raise UserError(f"{path}: {refusal} is not supported; {SUPPORTED}")

    def number(key: str, default: Any = None, kind: type = int) -> Any:
        value: Any = raw.get(key)
        value = default if value is None else value
        usable = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not usable or not abs(value) < 2**63:
            raise UserError(f"{path}: {key} is not a usable number: download the model again")
        return value

    heads = number("num_attention_heads")
    rope = raw.get("rope_parameters") or {}
    return LlamaConfig(
        vocab_size=number("vocab_size"),
        hidden_size=number("hidden_size"),
        intermediate_size=number("intermediate_size"),
        num_hidden_layers=number("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", number("hidden_size") // max(heads, 1)),
        rope_theta=float(number("rope_theta", rope.get("rope_theta", 10000.0), float)),
        rms_norm_eps=float(number("rms_norm_eps", 1e-6, float)),
        max_position_embeddings=number("max_position_embeddings", 2048),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def unsupported(raw: dict[str, Any]) -> str | None:
    """What in a config.json asks for more than a plain Llama model, in words; None if nothing does."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not set(map(str, architectures)) & set(ARCHITECTURES):
        return f"the architecture {architectures!r}"
    if raw.get("quantization_config"):
        return "a quantised checkpoint"
    if raw.get("sliding_window") is not None:
        return "a sliding window"
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        return "a bias"
    if raw.get("hidden_act", "silu") != "silu":
        return f"the activation {raw['hidden_act']!r}"
    for rope in (raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}):
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            return "a scaled rotary embedding"
    return None


def open_tensors(directory: Path) -> dict[str, Any]:
    """Every tensor of the directory's safetensors file or files, by name, not yet read."""
    if (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{directory / INDEX}: it has no usable weight_map: download it again")
        files = sorted({Path(file).name for file in weight_map.values()})
    else:
        files = ["model.safetensors"]
    tensors: dict[str, Any] = {}
    for path in (directory / file for file in files):
        if not path.exists():
            raise UserError(f"{path} is missing: jbatch reads safetensors weights; download the model again")
        try:
            file: Any = safetensors.safe_open(path, framework="numpy")
            tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        except Exception as error:  # safetensors' own error type derives from Exception only
            raise UserError(f"{path}: not a readable safetensors file ({one_line(error)}): download it again") from None
    return tensors


def read_tokenizer(directory: Path, raw_config: dict[str, Any]) -> Tokenizer:
    """The tokenizer with its end-of-sequence ids (all that any of the files names) and chat template."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{path} is missing: jbatch needs the model's fast tokenizer; download the model again")
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the Rust side raises bare Exception
        raise UserError(f"{path}: not a readable tokenizer ({one_line(error)}): download it again") from None
    backend.no_truncation()
    backend.no_padding()

    def optional(name: str) -> dict[str, Any]:
        return read_json(directory / name) if (directory / name).exists() else {}

    settings = optional("tokenizer_config.json")
    eos_token = token_text(settings.get("eos_token"))
    named = [raw_config.get("eos_token_id"), optional("generation_config.json").get("eos_token_id")]
    named.append(backend.token_to_id(eos_token) if eos_token else None)
    flat = [index for item in named for index in (item if isinstance(item, list) else [item])]
    return Tokenizer(
        backend,
        eos_ids=frozenset(index for index in flat if isinstance(index, int)),
        bos_token=token_text(settings.get("bos_token")),
        eos_token=eos_token,
        chat_template=read_chat_template(directory / "chat_template.jinja", settings),
    )


def token_text(value: Any) -> str:
    """A special token's text, which tokenizer_config.json gives bare or inside an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def read_chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """The template in a file of its own, else the (default) one in tokenizer_config.json, else None."""
    if path.exists():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not readable ({one_line(error)}): download it again") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
