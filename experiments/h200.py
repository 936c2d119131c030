"""Compiling for an H200 on a machine without one: its description, XLA's CUDA plugin, and what a program comes to.

The plugin's wheels are fetched with pip on first use, without the NVIDIA libraries that running would need, and kept
in the user's cache, apart from the environment. A process that compiles must be started with `environment(...)`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jbatch.config import UserError, cache_dir

TARGET = Path(__file__).parent / "data" / "h200_target.txtpb"
"""XLA's description of the device."""

_LAUNCH = re.compile(
    r"^(?P<indent> *)\d+: k(?P<kind>\w+) +\[[^]]*\] *(?P<name>\S*)"
    r"(?: grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>[\d, ]+)\] +shared_memory: (?P<shared>\d+) bytes)?"
)


@dataclass(frozen=True)
class Launch:
    """One command of a compiled program."""

    kind: str
    """CustomKernel, Copy, While and so on."""
    name: str
    nested: bool
    """Whether it belongs to a loop or a branch."""
    grid: tuple[int, ...]
    threads: int
    """Of a program of the grid."""
    shared_bytes: int
    """Shared memory of a program of the grid."""


def fetch_plugin() -> Path:
    """Folder with the CUDA plugin for this jaxlib, fetched on first use (140 MB). Raises UserError without it."""
    release = version("jaxlib")
    folder = cache_dir() / f"cuda-plugin-{release}-{sys.implementation.cache_tag}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temp:
        wheels = [f"jax-cuda13-pjrt=={release}", f"jax-cuda13-plugin=={release}"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--retries", "1", "--target", f"{temp}/plugin", *wheels]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or ["no reason given"]
            raise UserError(f"pip could not fetch {' and '.join(wheels)}: {reason[-1]}")
        try:
            os.replace(f"{temp}/plugin", folder)
        except OSError as error:
            if not folder.exists():  # else another process was first
                raise UserError(f"cannot keep the CUDA plugin in {folder} ({error.strerror})") from None
    return folder


def environment(plugin: Path, dump: Path) -> dict[str, str]:
    """Environment of a process that compiles for the H200 and leaves its `launches` in the folder `dump`."""
    path = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # Nothing can be timed here, so nothing is tuned.
    flags = f"--xla_gpu_autotune_level=0 --xla_dump_to={dump}"
    # A program from a cache would leave no dump.
    settings = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "JBATCH_KERNELS": "auto"}
    return {**os.environ, **settings, "PYTHONPATH": path, "XLA_FLAGS": flags}


def abstract_gpu() -> contextlib.AbstractContextManager[Any]:
    """Within it, functions lower for an H200: from jax 0.11 on kernels ask which device they are for."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def compile_for_h200(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """`function` compiled for shapes and dtypes like those of `args`."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=TARGET.read_text()
    )
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with abstract_gpu():
        traced = jax.jit(function, donate_argnums=donate).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def launches(dump: Path, name: str) -> list[Launch]:
    """What the program `jit_NAME`, dumped by its compilation, launches in a run, in order."""
    [path] = dump.glob(f"*.jit_{name}.*thunk_sequence.txt")
    found = [match for line in path.read_text().splitlines() if (match := _LAUNCH.match(line))]
    return [
        Launch(
            kind=match["kind"],
            name=match["name"],
            nested=bool(match["indent"]),
            grid=tuple(int(n) for n in match["grid"].split(",")) if match["grid"] else (),
            threads=int(match["threads"].split(",")[0]) if match["threads"] else 0,
            shared_bytes=int(match["shared"] or 0),
        )
        for match in found
    ]
