"""The engine under `jit`: pure functions from pytrees to pytrees, and the host's view of their two buffers."""
