"""How fast are the GPU kernels? On a GPU: times them within some five minutes. Without one: what they compile to.

On a GPU it writes its JSON after each item, so a run cut short leaves what it had: the device's own ceilings for copies
and matmuls, every kernel against the reference in float32, decode, its settings, prefill, shared prefixes, and whole
engine steps with the kernels and with plain XLA. Shapes are those of real models and contents are random: it needs no
network and no weights. Elsewhere it compiles the kernels for an H200 and prints what each program of their grids takes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from experiments import kernel_timing as timing
from experiments.h200 import compile_for_h200, environment, fetch_plugin, launches
from experiments.report import RESULTS, run, save_plot, say, settings_of, table, write_json
from jbatch.config import UserError
from pallas_kernels.kv_write.triton import kv_write, kv_write_int8
from pallas_kernels.paged_decode.triton import paged_decode
from pallas_kernels.paged_prefill.triton import paged_prefill
from pallas_kernels.shapes import MODELS, HeadShape

MEASUREMENTS: dict[str, Callable[[], Any]] = {
    "ceilings": timing.ceilings,
    "correctness": timing.correctness,
    "decode": timing.decode,
    "decode_settings": timing.decode_settings,
    "prefill": timing.prefill,
    "shared_prefix": timing.shared_prefix,
    "steps": timing.steps,
}


@dataclass(frozen=True)
class Settings:
    """Speed of the kernels, or what they compile to."""

    items: tuple[str, ...] = tuple(MEASUREMENTS)
    """What to measure on a GPU, in order."""
    out: Path = RESULTS
    """Folder for the JSON and the plot."""


def main(settings: Settings) -> None:
    """Measures on a GPU, describes anywhere else."""
    if unknown := set(settings.items) - set(MEASUREMENTS):
        raise UserError(f"unknown items {', '.join(sorted(unknown))}: there are {', '.join(MEASUREMENTS)}")
    if jax.default_backend() == "gpu":
        measure(settings)
    else:
        describe()


def measure(settings: Settings) -> None:
    """Runs the items; one that fails is written down as failed, and the next one runs."""
    results: dict[str, Any] = {}
    for name in settings.items:
        say(f"{name} ...")
        try:
            results[name] = MEASUREMENTS[name]()
        except Exception as error:  # a five-minute run on a borrowed machine must not end at the first surprise
            results[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        write_json(settings.out / "kernels.json", {"settings": settings_of(settings), **results})
        rows = results[name] if isinstance(results[name], list) else [results[name]]
        print(f"\n{name}\n\n{table(rows)}", flush=True)
    if isinstance(results.get("decode"), list) and "copy_gb_s" in results.get("ceilings", {}):
        save_plot(decode_plot(results["decode"], results["ceilings"]["copy_gb_s"]), settings.out / "kernels.png")


def decode_plot(rows: list[dict[str, Any]], ceiling: float) -> Figure:
    """Bandwidth of decode over rows, a line for each length, under that of a copy."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for length in sorted({row["length"] for row in rows}):
        points = [(row["rows"], row["gb_s"]) for row in rows if row["length"] == length]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{length} tokens")
    axes.axhline(ceiling, color="grey", linestyle="--", label="copy")
    axes.set(xscale="log", xlabel="decode rows", ylabel="GB/s of keys and values", ylim=(0, None))
    axes.legend()
    return figure


def describe() -> None:
    """Compiles the kernels for an H200 in a process of its own and prints what they come to."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        code = "from experiments.kernels import compile_kernels; compile_kernels()"
        subprocess.run([sys.executable, "-c", code], env=environment(fetch_plugin(), dump), check=True)
        rows = [
            {
                "case": name,
                "kernel": launch.name,
                "grid": "x".join(map(str, launch.grid)),
                "threads": launch.threads,
                "shared memory, KB": f"{launch.shared_bytes / 1024:.1f}",
                **registers(dump, name, launch.name),
            }
            for name in kernel_cases()
            for launch in launches(dump, name)
            if launch.kind == "CustomKernel"
        ]
    print(f"No GPU here; compiled for an H200 with jax {jax.__version__}.\n\n{table(rows)}")


def compile_kernels() -> None:
    """Compiles every case; XLA leaves what it made in the folder it was told of."""
    for name, (function, args) in kernel_cases().items():
        function.__name__ = name
        kept = range(2, len(args) - 2) if name.startswith("write") else ()
        compile_for_h200(function, *args, donate=tuple(kept))


def kernel_cases() -> dict[str, tuple[Any, list[jax.ShapeDtypeStruct]]]:
    """Functions and what they are given, by names fit for files."""
    llama, qwen, gemma = MODELS["llama3-8b"], MODELS["qwen2.5-7b"], MODELS["gemma2-9b"]
    return {
        "decode_llama_64": _decode_case(llama, 64),
        "decode_llama_256": _decode_case(llama, 256),
        "decode_llama_256_float32": _decode_case(llama, 256, "float32"),
        "decode_llama_256_float8": _decode_case(llama, 256, "bfloat16", "float8_e4m3fn"),
        "decode_llama_256_int8": _int8_case(llama, 256),
        "decode_qwen_64": _decode_case(qwen, 64),
        "decode_gemma_64": _decode_case(gemma, 64),
        "prefill_llama_8x512": _prefill_case(llama, 8, 512),
        "prefill_llama_64x16": _prefill_case(llama, 64, 16),
        "prefill_gemma_8x512": _prefill_case(gemma, 8, 512),
        "write_llama_256": _write_case(llama, 256),
        "write_llama_256_float8": _write_case(llama, 256, "float8_e4m3fn"),
        "write_llama_256_int8": _int8_write_case(llama, 256),
    }


def _array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _attention(function: Callable[..., Any], model: HeadShape) -> Any:
    return partial(function, scale=model.dim**-0.5, window=model.window, soft_cap=model.soft_cap)


def _pages(model: HeadShape, dtype: str) -> jax.ShapeDtypeStruct:
    return _array(4096, model.page_size, model.kv_heads, model.dim, dtype=dtype)


def _decode_case(
    model: HeadShape, rows: int, dtype: str = "bfloat16", pages_dtype: str | None = None
) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    pages, q = _pages(model, pages_dtype or dtype), _array(rows, model.heads, model.dim, dtype=dtype)
    return _attention(paged_decode, model), [q, pages, pages, _array(rows, 512), _array(rows)]


def _int8_case(model: HeadShape, rows: int) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    function, args = _decode_case(model, rows, "bfloat16", "int8")
    scales = _array(*args[1].shape[:3], dtype="float32")

    def decode(*args: Any) -> Any:
        return function(*args[:5], None, *args[5:])

    return decode, [*args, scales, scales]


def _prefill_case(model: HeadShape, chunks: int, queries: int) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    pages, q = _pages(model, "bfloat16"), _array(chunks, queries, model.heads, model.dim, dtype="bfloat16")
    return _attention(paged_prefill, model), [q, pages, pages, _array(chunks, 512), _array(chunks), _array(chunks)]


def _int8_write_case(model: HeadShape, tokens: int) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    _, (new, _, _, _, page, offset) = _write_case(model, tokens)
    pages = _pages(model, "int8")
    scales = _array(*pages.shape[:3], dtype="float32")
    return partial(kv_write_int8), [new, new, pages, pages, scales, scales, page, offset]


def _write_case(model: HeadShape, tokens: int, pages_dtype: str = "bfloat16") -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    pages, new = _pages(model, pages_dtype), _array(tokens, model.kv_heads, model.dim, dtype="bfloat16")
    return partial(kv_write), [new, new, pages, pages, _array(tokens), _array(tokens)]


def registers(dump: Path, program: str, kernel: str) -> dict[str, str]:
    """Registers and spilled bytes of a thread, as NVIDIA's assembler tells them; dashes where there is none."""
    beside = [Path(path) for folder in sys.path for path in Path(folder or ".").glob("nvidia/*/bin/ptxas")]
    assembler = shutil.which("ptxas") or next((str(path) for path in beside if os.access(path, os.X_OK)), None)
    for path in dump.glob(f"*.jit_{program}.*.ptx"):
        if assembler and f".entry {kernel}(" in path.read_text():
            command = [assembler, "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
            told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
            used, spilled = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
            if used and spilled:
                return {"registers": used[1], "bytes spilled": spilled[1]}
    return {"registers": "-", "bytes spilled": "-"}


if __name__ == "__main__":
    run(main, Settings, __doc__)
