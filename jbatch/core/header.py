"""What every inbox begins with."""

from __future__ import annotations

import math
from dataclasses import fields

import jax
from flax import struct

from jbatch.controls import NUM_CLASSES


@struct.dataclass
class Header:
    """What every inbox begins with: the controls in force, the time, and how long a step took; all int32.

    Times are in milliseconds where nothing else is said, and wrap around after 49 days: only differences count.
    """

    policy: jax.Array  # index in POLICIES
    batching: jax.Array  # index in BATCHINGS
    running_limit: jax.Array
    aging: jax.Array
    batch_size: jax.Array
    batch_delay: jax.Array
    batch_threshold: jax.Array
    max_pinned: jax.Array  # pages
    now: jax.Array
    aging_window: jax.Array  # when the running period of `aging` milliseconds began
    step_us: jax.Array  # microseconds that the step read last took; 0: not known
    step_decodes: jax.Array  # its decode rows in use
    step_chunks: jax.Array  # its chunk rows in use
    queued: jax.Array  # requests that wait on the host
    arrived: jax.Array  # requests submitted since the last inbox
    slo_ttft: jax.Array  # [NUM_CLASSES], 0: no target
    slo_tpot_us: jax.Array  # [NUM_CLASSES] microseconds, 0: no target


_SHAPES = {field.name: (NUM_CLASSES,) if field.name in ("slo_ttft", "slo_tpot_us") else () for field in fields(Header)}
HEADER_SIZE = sum(math.prod(shape) for shape in _SHAPES.values())


def pack_header(values: dict[str, int | list[int]]) -> list[int]:
    """The numbers of a `Header` with such `values`, in its order."""
    in_order = (values[name] for name in _SHAPES)
    return [int(number) for value in in_order for number in (value if isinstance(value, list) else [value])]


def read_header(numbers: jax.Array) -> Header:
    """From its `numbers` [HEADER_SIZE]."""
    parts, at = {}, 0
    for name, shape in _SHAPES.items():
        parts[name] = numbers[at : at + math.prod(shape)].reshape(shape)
        at += math.prod(shape)
    return Header(**parts)
