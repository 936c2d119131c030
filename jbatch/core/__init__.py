"""The engine under `jit`: pure functions from pytrees to pytrees."""
