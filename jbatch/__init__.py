"""jbatch: a batching engine for LLM agents in pure JAX."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("jbatch")
except PackageNotFoundError:  # used from a checkout that is not installed
    __version__ = "0"
