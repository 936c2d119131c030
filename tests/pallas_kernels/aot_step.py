"""Compiles engine steps of Llama 3 8B for an H200 and writes what they come to, as JSON. Run by `test_aot.py`."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.engine_step import BFLOAT16, LLAMA3_8B, weight_shapes
from experiments.h200 import compile_for_h200, launches
from jbatch.config import Bucket, EngineConfig
from jbatch.core.inbox import inbox_size
from jbatch.core.state import init_state
from jbatch.core.step import step
from jbatch.models.llama import init_kv, make_forward

ENGINE = EngineConfig(max_model_len=8192, max_running=64, num_pages=16384, chunk_size=64, max_chunks=8)
BUCKETS = {"decode": Bucket(64, 0), "mixed": Bucket(64, 8)}


def main(out: Path, dump: Path) -> None:
    weights = weight_shapes(LLAMA3_8B)
    pages = partial(init_kv, LLAMA3_8B, BFLOAT16, ENGINE.num_pages, ENGINE.page_size)
    state = jax.eval_shape(lambda: init_state(ENGINE, pages()))
    kv = state.kv
    inbox = jax.ShapeDtypeStruct((inbox_size(ENGINE),), jnp.int32)
    kv_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))
    report: dict[str, Any] = {"kv_bytes": kv_bytes, "layers": LLAMA3_8B.num_hidden_layers}
    forward = make_forward(LLAMA3_8B)
    for name, bucket in BUCKETS.items():
        run = partial(step, forward=forward, config=ENGINE, bucket=bucket)
        run.__name__ = name  # type: ignore[attr-defined]
        compiled = compile_for_h200(run, weights, state, inbox, donate=(1,))
        memory = compiled.memory_analysis()
        report[name] = {
            "temp_bytes": memory.temp_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
            "kv_uses": uses(compiled.as_text(), kv.k[0].shape),
            "launches": [asdict(launch) for launch in launches(dump, name)],
        }
    out.write_text(json.dumps(report))


def uses(program: str, shape: tuple[int, ...]) -> dict[str, int]:
    """How often each kind of instruction takes or gives bfloat16 arrays of `shape`."""
    array = f"bf16[{','.join(map(str, shape))}]"
    lines = [line for line in program.splitlines() if array in line and re.match(r" +(ROOT )?%", line)]
    return Counter(re.search(r" ([a-z-]+)\(", line.split(" = ", 1)[1])[1] for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
