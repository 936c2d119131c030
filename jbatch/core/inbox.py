"""What the host tells a step: new requests and cancellations, in one int32 buffer of fixed shape.

The first part has one row per admission: the scalars in `FIELDS`, the stop tokens, the prompt. The second part has
one entry per slot: non-zero cancels its request.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jbatch.config import EngineConfig
from jbatch.core.prefix import prompt_digests
from jbatch.core.state import MAX_STOP_TOKENS, NO_SLOT, NO_TOKEN, Phase, SlotTable
from jbatch.request import Request

FIELDS = ("slot", "prompt_len", "limit", "priority", "arrival", "top_k", "seed", "salt_low", "salt_high")
FLOATS = ("temperature", "top_p", "min_p")  # stored as their bit patterns
_SCALARS = len(FIELDS) + len(FLOATS)
_TOKENS = _SCALARS + MAX_STOP_TOKENS


def _row_width(config: EngineConfig) -> int:
    return _TOKENS + config.max_model_len


def inbox_size(config: EngineConfig) -> int:
    """Length of the buffer."""
    return config.max_admissions * _row_width(config) + config.max_slots


class InboxBuilder:
    """Fills one inbox on the host. Takes at most `max_admissions` requests; the buffer is new each time."""

    def __init__(self, config: EngineConfig) -> None:
        self.buffer = np.zeros(inbox_size(config), np.int32)
        split = config.max_admissions * _row_width(config)
        self._rows = self.buffer[:split].reshape(config.max_admissions, -1)
        self._rows[:, 0] = NO_SLOT
        self._cancel = self.buffer[split:]
        self._chunk_size = config.chunk_size
        self.admitted_chunks: list[int] = []
        """Chunk rows that each admitted prompt takes."""
        self.cancelled: list[int] = []
        """Ids of the requests it cancels."""

    @property
    def full(self) -> bool:
        """Whether no more requests fit."""
        return len(self.admitted_chunks) == len(self._rows)

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return not self.admitted_chunks and not self.cancelled

    def admit(
        self,
        slot: int,
        arrival: int,
        request: Request,
        *,
        limit: int,
        seed: int,
        stop_tokens: tuple[int, ...],
        salt: bytes = bytes(8),
        cached: int = 0,
    ) -> None:
        """Places `request` in a slot that is free on the device.

        Args:
          limit: the length at which it ends.
          salt: 8 bytes; only requests of equal salts share pages.
          cached: how many of its tokens the host believes to be cached; only the choice of a bucket depends on it.
        """
        row = self._rows[len(self.admitted_chunks)]
        self.admitted_chunks.append(-(-(len(request.prompt) - cached) // self._chunk_size))
        sampling = request.sampling
        row[: len(FIELDS)] = (
            slot,
            len(request.prompt),
            limit,
            request.priority,
            arrival,
            sampling.top_k,
            seed,
            *np.frombuffer(salt, np.int32),
        )
        temperature = 0.0 if sampling.greedy else sampling.temperature
        row[len(FIELDS) : _SCALARS].view(np.float32)[:] = (temperature, sampling.top_p, sampling.min_p)
        row[_SCALARS:_TOKENS] = NO_TOKEN
        row[_SCALARS : _SCALARS + len(stop_tokens)] = stop_tokens
        row[_TOKENS : _TOKENS + len(request.prompt)] = request.prompt

    def cancel(self, slot: int, request_id: int) -> None:
        """Ends the request in a slot; does nothing where the slot is free on the device already."""
        self._cancel[slot] = 1
        self.cancelled.append(request_id)


def admit(slots: SlotTable, inbox: jax.Array, config: EngineConfig) -> SlotTable:
    """Applies an inbox: cancelled slots become free, new requests wait."""
    split = config.max_admissions * _row_width(config)
    rows = inbox[:split].reshape(config.max_admissions, -1)
    cancel = inbox[split:] != 0
    slots = replace(slots, phase=jnp.where(cancel, Phase.FREE, slots.phase))

    def admit_row(slots: SlotTable, row: jax.Array) -> SlotTable:
        slot = row[0]
        column = dict(zip(FIELDS[1:], row[1:], strict=False))
        column |= dict(zip(FLOATS, lax.bitcast_convert_type(row[len(FIELDS) : _SCALARS], jnp.float32), strict=True))
        salt = lax.bitcast_convert_type(jnp.stack([column.pop("salt_low"), column.pop("salt_high")]), jnp.uint32)
        column |= {
            "phase": jnp.int32(Phase.WAITING),
            "salt": salt,
            "digests": prompt_digests(salt, row[_TOKENS:], column["prompt_len"], config),
            "preemptions": jnp.int32(0),
            "length": column["prompt_len"],
            "computed": jnp.int32(0),
            "wait_reason": jnp.int32(0),
            "stop_tokens": row[_SCALARS:_TOKENS],
            "tokens": row[_TOKENS:],
        }
        return replace(slots, **{name: getattr(slots, name).at[slot].set(value) for name, value in column.items()})

    def admit_nth(i: jax.Array, slots: SlotTable) -> SlotTable:
        return admit_row(slots, rows[i])

    return lax.fori_loop(0, jnp.sum(rows[:, 0] != NO_SLOT, dtype=jnp.int32), admit_nth, slots)
