"""Writing new keys and values into pages."""

from pallas_kernels.kv_write.api import kv_write, kv_write_int8

__all__ = ["kv_write", "kv_write_int8"]
