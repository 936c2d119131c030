"""Who may import whom, and what an import may cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("jax", "flax", "orbax", "fastapi", "tokenizers", "huggingface_hub", "matplotlib", "numpy")
WITHOUT_JAX = tuple(
    f"jbatch.{name}" for name in ("config", "controls", "request", "ingress", "names", "telemetry", "tokenizer")
)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_jbatch_loads_nothing_heavy() -> None:
    loaded = run_python(f"import sys, jbatch; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_the_host_side_does_not_load_jax(module: str) -> None:
    loaded = run_python(f"import sys, {module}; print([n for n in ('jax', 'jaxlib', 'flax') if n in sys.modules])")
    assert loaded == "[]"


def test_importing_the_core_starts_no_device() -> None:
    """It takes a moment and some memory, and would fix the platform before the user can choose it."""
    code = "import jbatch.engine, jbatch.models.llama; from jax._src import xla_bridge; print(xla_bridge._backends)"
    assert run_python(code) == "{}"


def test_the_import_contracts_hold() -> None:
    """As `lint-imports` runs them, from `pyproject.toml`."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_contracts_cover_every_module_of_the_core() -> None:
    """A layer that nobody wrote down is a layer that nobody checks."""
    layers = (ROOT / "pyproject.toml").read_text()
    names = {path.stem for path in (ROOT / "jbatch" / "core").glob("*.py")} - {"__init__"}
    names = {f"jbatch.core.{name}" for name in names}
    names |= {f"jbatch.{path.stem}" for path in (ROOT / "jbatch").glob("*.py") if path.stem != "__init__"}
    assert {name for name in names if name not in layers} == set()


def test_product_code_uses_no_private_jax() -> None:
    for folder in ("jbatch", "pallas_kernels", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "jax._src" not in path.read_text(), path
