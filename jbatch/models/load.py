"""Load a model by name or path: find it, convert it once, restore it from then on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jbatch.config import DEFAULT_MODEL, UserError, cache_dir
from jbatch.core.model import Model, Params
from jbatch.models import checkpoint
from jbatch.models.fetch import GGUF_SHA256, fetch_default_model
from jbatch.models.gguf import read_gguf
from jbatch.models.huggingface import fetch_from_hub, read_huggingface
from jbatch.models.llama import LlamaConfig, init_kv, make_forward
from jbatch.models.source import Source, one_line
from jbatch.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      name: what to call it.
      config: its shape.
      params: its weights as jax arrays, nested as `nnx.to_pure_dict(nnx.state(Llama(config)))`.
      tokenizer: its tokenizer and chat template.
    """

    name: str
    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer

    def for_engine(self) -> Model:
        """The model as the engine takes it; pages have the dtype of the weights."""
        dtype = jax.tree.leaves(self.params)[0].dtype
        return Model(
            forward=make_forward(self.config),
            params=self.params,
            init_kv=partial(init_kv, self.config, dtype),
            vocab_size=self.config.vocab_size,
            max_len=self.config.max_position_embeddings,
            eos_ids=self.tokenizer.eos_ids,
        )


@dataclass(frozen=True)
class Origin:
    """Where a model comes from.

    Attributes:
      name: what to call it.
      place: tells models of one name apart.
      content: changes when the files change.
      open: opens the files.
    """

    name: str
    place: str
    content: str
    open: Callable[[], Source]


def load_model(
    name_or_path: str, *, dtype: str = "float32", report: Callable[[str], None], shardings: Any = None
) -> LoadedModel:
    """Load a model, converting it on first use.

    Args:
      name_or_path: the default model's name, a GGUF file, a Hugging Face directory, or a hub id.
      dtype: of the weights: float32, bfloat16 or float16.
      report: told, a line at a time, what takes a while or went wrong without being fatal.
      shardings: a `jax.sharding.Sharding`, or a pytree of them that is a prefix of the params; None
        puts everything on the first device.

    Raises:
      UserError: the model cannot be found, fetched or read, or is not supported.
    """
    if dtype not in DTYPES:
        raise UserError(f"the dtype {dtype!r} is not supported: choose one of {', '.join(DTYPES)}")
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    origin = find(name_or_path, report)
    safe_name = re.sub(r"[^\w.-]", "-", origin.name)
    family = f"{safe_name}-{digest(origin.place, dtype)}"
    directory = cache_dir() / "converted" / f"{family}-{digest(origin.content, str(checkpoint.FORMAT))}"
    try:
        if cached := checkpoint.restore(directory, dtype, report, shardings):
            return LoadedModel(origin.name, *cached)
        source = origin.open()
        report(f"Converting {origin.name} to {dtype} (once)")
        params = jax.device_put(convert(source, dtype), shardings)
        for leaf in jax.tree.leaves(params):
            leaf.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"the weights of {origin.name} cannot be put on the device ({one_line(error)}): "
            "free some of its memory, use a smaller dtype, or choose a smaller model"
        ) from None
    try:
        checkpoint.save(directory, source.config, params, source.tokenizer)
        checkpoint.remove_others(directory, f"{family}-*")
    except Exception as error:  # a cache that cannot be written costs time at the next start, no more
        report(f"The converted model cannot be kept in {directory} ({one_line(error)})")
    return LoadedModel(origin.name, source.config, params, source.tokenizer)


def find(name_or_path: str, report: Callable[[str], None]) -> Origin:
    """What `name_or_path` means. Raises UserError if it means nothing."""
    if name_or_path.lower() == DEFAULT_MODEL:
        return Origin(DEFAULT_MODEL, "", GGUF_SHA256, lambda: read_gguf(fetch_default_model(report)))
    path = Path(name_or_path)
    try:
        path = path.expanduser()
        if path.is_file():
            return Origin(path.stem, str(path.resolve()), stamp(path), lambda: read_gguf(path))
        if path.is_dir():
            name = path.resolve().name
            return Origin(name, str(path.resolve()), stamp(path), lambda: read_huggingface(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot read {path} ({one_line(error)}): check its permissions") from None
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name_or_path) and path.suffix != ".gguf":
        directory = fetch_from_hub(name_or_path, report)
        return Origin(name_or_path, name_or_path, stamp(directory), lambda: read_huggingface(directory))
    raise UserError(
        f"there is no model {name_or_path!r}: give {DEFAULT_MODEL}, a GGUF file, a directory with "
        "config.json and safetensors, or a Hugging Face hub id such as org/name"
    )


def stamp(path: Path) -> str:
    """Name, size and time of change of a file, or of each file in a directory."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def digest(*parts: str) -> str:
    """A short key made of `parts`."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def convert(source: Source, dtype: str) -> Params:
    """Read all weights into the nesting of `Llama`'s params, as numpy arrays of `dtype`."""
    target = jnp.dtype(dtype)

    def fused(layer: str, *names: str) -> np.ndarray:
        parts = [source.tensor(f"{layer}{name}.weight") for name in names]
        return np.concatenate(parts, dtype=target, casting="unsafe")

    def layer(index: int) -> Params:
        at = f"model.layers.{index}."
        return {
            "attention_norm": fused(at, "input_layernorm"),
            "qkv": fused(at, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": fused(at, "self_attn.o_proj"),
            "mlp_norm": fused(at, "post_attention_layernorm"),
            "gate": fused(at, "mlp.gate_proj"),
            "up": fused(at, "mlp.up_proj"),
            "down": fused(at, "mlp.down_proj"),
        }

    params = {
        "embedding": fused("", "model.embed_tokens"),
        "layers": {index: layer(index) for index in range(source.config.num_hidden_layers)},
        "final_norm": fused("", "model.norm"),
    }
    if not source.config.tie_word_embeddings:
        params["head"] = fused("", "lm_head")
    return params
