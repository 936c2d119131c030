"""Converted weights, kept as an Orbax checkpoint so that the next start skips parsing and conversion."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from orbax.checkpoint import v1 as ocp

from jbatch.core.model import Params
from jbatch.models.llama import Llama, LlamaConfig
from jbatch.models.scratch import scratch
from jbatch.models.source import one_line
from jbatch.tokenizer import Tokenizer

# Part of every cache key: raise it whenever what is written here changes its meaning.
FORMAT = 3
CHECKSUMS = "checksums.json"

_saving = threading.Lock()  # Orbax numbers its signals per process: two saves at once can wait for each other's


def abstract_params(config: LlamaConfig, dtype: str, shardings: Any) -> Params:
    """Shapes and dtypes of a model's params, with the shardings to restore them to.

    `shardings` is one `jax.sharding.Sharding`, or a pytree of them that is a prefix of the params.
    """
    model = nnx.eval_shape(lambda: Llama(config, jnp.dtype(dtype)))
    params = nnx.to_pure_dict(nnx.state(model))

    def place(sharding: jax.sharding.Sharding, part: Params) -> Params:
        return jax.tree.map(lambda leaf: leaf.update(sharding=sharding), part)

    return jax.tree.map(place, shardings, params)


def save(directory: Path, config: LlamaConfig, params: Params, tokenizer: Tokenizer) -> None:
    """Write a converted model to `directory`, whole or not at all; one that is there already stays.

    Raises OSError or ValueError if it cannot be written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if shutil.disk_usage(directory.parent).free < needed * 1.05:
        raise OSError(f"it takes {needed >> 20} MiB, the disk is full")
    with scratch(directory.parent) as temp:
        new = temp / "model"
        new.mkdir()
        tokenizer.save(new)
        (new / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1), "utf-8")
        context = ocp.Context()
        context.array.saving.use_compression = False  # weights hardly shrink, and it takes 3x as long
        with _saving, context:
            ocp.save(new / "params", params)
        (new / CHECKSUMS).write_text(json.dumps(checksums(new)), "utf-8")
        try:
            os.rename(new, directory)
        except OSError:
            if not directory.is_dir():  # it is one when another process, started at the same time, was quicker
                raise


def restore(
    directory: Path, dtype: str, report: Callable[[str], None], shardings: Any
) -> tuple[LlamaConfig, Params, Tokenizer] | None:
    """What `save` wrote, as jax arrays; None if there is nothing.

    A damaged checkpoint is reported and removed, and counts as nothing. Raises jax.errors.JaxRuntimeError
    where the device has no room for the params.
    """
    if not directory.exists():
        return None
    try:
        # Orbax answers a damaged checkpoint with tracebacks of its own threads: look before asking it.
        if json.loads((directory / CHECKSUMS).read_text("utf-8")) != checksums(directory):
            raise ValueError("files are missing, changed or added")
        config = LlamaConfig(**json.loads((directory / "config.json").read_text("utf-8")))
        params = ocp.load(directory / "params", abstract_params(config, dtype, shardings))
        return config, params, Tokenizer.load(directory)
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:  # whatever is wrong with a cache, it can be made anew
        report(f"The converted model in {directory} is damaged ({one_line(error)}): converting it again")
        shutil.rmtree(directory, ignore_errors=True)
        return None


def checksums(directory: Path) -> dict[str, int]:
    """CRC-32 of every file below `directory`, but for the record of checksums itself."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != CHECKSUMS]
    return {path.relative_to(directory).as_posix(): _crc32(path) for path in files}


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def remove_others(directory: Path, pattern: str) -> None:
    """Remove `directory`'s siblings that match `pattern`: what older versions of its files became."""
    for other in directory.parent.glob(pattern):
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)
