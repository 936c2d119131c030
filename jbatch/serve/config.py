"""What the command line of the server takes. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from jbatch.config import DEFAULT_MODEL, EngineConfig
from jbatch.controls import Controls

VLLM_NAMES = {
    "--max-num-seqs": "--max-running",
    "--block-size": "--page-size",
    "--num-gpu-blocks-override": "--num-pages",
    "--scheduling-policy": "--policy",
}
"""Options of vLLM that mean the same here under another name."""

DESCRIPTION = """\
Serve a model over an OpenAI-compatible HTTP API. Requests that come at the same time are computed together, one \
token of each at every step.

examples:
  python -m jbatch.serve                          the default model, on 127.0.0.1:8000
  python -m jbatch.serve org/name --port 9000     a model of the Hugging Face hub
  python -m jbatch.serve ./model.gguf --max-running 128 --num-pages 8192

then, with any OpenAI client whose base URL is http://127.0.0.1:8000/v1, or:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'

/metrics tells Prometheus how it goes. SIGTERM or Ctrl-C lets running requests finish; a second one ends them.
vLLM's names --max-num-seqs, --block-size, --num-gpu-blocks-override and --scheduling-policy work too."""


@dataclass(frozen=True)
class ServeConfig:
    """A server: which model, under which address, and the sizes and the controls of its engine."""

    model: tyro.conf.Positional[str] = DEFAULT_MODEL
    """The default model's name, a GGUF file, a Hugging Face directory, or a hub id such as org/name."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 serves other machines too."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    served_model_name: str | None = None
    """What clients call the model; its own name if not given."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights and of the KV cache."""
    record: Path | None = None
    """File to write every step's inbox and outbox to, for `python -m jbatch.replay`; it holds what clients send."""
    admin: bool = False
    """Serve /admin/controls: whoever reaches the server may read and change policy, batching, limits and targets."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)
    """Sizes of the engine, fixed for its life."""
    controls: tyro.conf.OmitArgPrefixes[Controls] = field(default_factory=Controls)
    """What may also be changed while it runs: see --admin."""


def parse(arguments: Sequence[str]) -> ServeConfig:
    """The configuration that a command line asks for.

    Raises `UserError` where sizes or controls make no sense; `SystemExit` for --help and for unknown options.
    """
    return tyro.cli(
        ServeConfig,
        prog="python -m jbatch.serve",
        description=DESCRIPTION,
        args=[_own_name(argument) for argument in arguments],
    )


def _own_name(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return VLLM_NAMES.get(name.replace("_", "-"), name) + equals + value
