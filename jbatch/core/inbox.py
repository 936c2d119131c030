"""What the host tells a step, in one int32 buffer of fixed shape: the header, new requests, cancellations.

After the header comes one row per admission: the scalars in `FIELDS`, the stop tokens, the prompt. The last part has
one entry per slot: non-zero cancels its request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jbatch.config import EngineConfig
from jbatch.controls import BATCHINGS, NUM_CLASSES, POLICIES, Controls
from jbatch.core.header import HEADER_SIZE, pack_header
from jbatch.core.prefix import prompt_digests
from jbatch.core.state import (
    MAX_PROGRAMS,
    MAX_STOP_TOKENS,
    MAX_TENANTS,
    NO_PROGRAM,
    NO_SLOT,
    NO_TOKEN,
    Accounts,
    EngineState,
    Phase,
    SlotTable,
)
from jbatch.request import Request

FIELDS = (
    *("slot", "prompt_len", "limit", "priority", "arrival", "submitted", "deadline", "tenant", "program", "pin"),
    *("top_k", "seed", "salt_low", "salt_high", "new_tenant", "new_program"),
)
FLOATS = ("temperature", "top_p", "min_p")  # stored as their bit patterns
_SCALARS = len(FIELDS) + len(FLOATS)
_TOKENS = _SCALARS + MAX_STOP_TOKENS


class Measured(NamedTuple):
    """What the host has seen since it sent the last inbox."""

    seconds: float = 0.0
    """How long the step read last took; 0 where that is not known."""
    decodes: int = 0
    """Its decode rows in use."""
    chunks: int = 0
    """Its chunk rows in use."""
    queued: int = 0
    """Requests that wait on the host now."""
    arrived: int = 0
    """Requests submitted."""


@dataclass(frozen=True)
class Placement:
    """What the host adds to a request as it hands it to the device."""

    slot: int
    """A slot that is free on the device."""
    arrival: int
    """Counts up with each request."""
    limit: int
    """The length at which it ends."""
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    salt: bytes = bytes(8)
    """8 bytes; only requests of equal salts share pages."""
    cached: int = 0
    """How many of its tokens the host believes to be cached; only the choice of a bucket depends on it."""
    submitted: float = 0.0
    """When it was submitted, in seconds of the clock that `InboxBuilder` is given."""
    due: float = 0.0
    """When it should end."""
    pin: float = 0.0
    """Seconds that its pages are kept after its end."""
    tenant: int = 0
    program: int = NO_PROGRAM
    new_tenant: bool = False
    """Whether the tenant's number meant another one before."""
    new_program: bool = False


def _row_width(config: EngineConfig) -> int:
    return _TOKENS + config.max_model_len


def inbox_size(config: EngineConfig) -> int:
    """Length of the buffer."""
    return HEADER_SIZE + config.max_admissions * _row_width(config) + config.max_slots


def _wrapped(milliseconds: int) -> int:
    """As an int32 that wraps around."""
    return (milliseconds + 2**31) % 2**32 - 2**31


class InboxBuilder:
    """Fills one inbox on the host. Takes at most `max_admissions` requests; the buffer is new each time."""

    def __init__(
        self,
        config: EngineConfig,
        controls: Controls = Controls(),  # noqa: B008 (frozen)
        now: float = 0.0,
        measured: Measured = Measured(),  # noqa: B008
    ) -> None:
        """`now` is in seconds of any clock that goes on steadily."""
        self.buffer = np.zeros(inbox_size(config), np.int32)
        end = len(self.buffer) - config.max_slots
        self.buffer[:HEADER_SIZE] = _header(config, controls, now, measured)
        self._rows = self.buffer[HEADER_SIZE:end].reshape(config.max_admissions, -1)
        self._rows[:, 0] = NO_SLOT
        self._cancel = self.buffer[end:]
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
        """Whether it holds nothing but its header."""
        return not self.admitted_chunks and not self.cancelled

    def admit(self, request: Request, at: Placement) -> None:
        """Places `request` in a free slot."""
        row = self._rows[len(self.admitted_chunks)]
        self.admitted_chunks.append(-(-(len(request.prompt) - at.cached) // self._chunk_size))
        sampling = request.sampling
        salt_low, salt_high = np.frombuffer(at.salt, np.int32)
        values = {
            "slot": at.slot,
            "prompt_len": len(request.prompt),
            "limit": at.limit,
            "priority": request.priority,
            "arrival": at.arrival,
            "submitted": _wrapped(round(at.submitted * 1e3)),
            "deadline": _wrapped(round(at.due * 1e3)),
            "tenant": at.tenant,
            "program": at.program,
            "pin": round(at.pin * 1e3),
            "top_k": sampling.top_k,
            "seed": at.seed,
            "salt_low": salt_low,
            "salt_high": salt_high,
            "new_tenant": at.new_tenant,
            "new_program": at.new_program,
        }
        row[: len(FIELDS)] = [values[name] for name in FIELDS]
        temperature = 0.0 if sampling.greedy else sampling.temperature
        row[len(FIELDS) : _SCALARS].view(np.float32)[:] = (temperature, sampling.top_p, sampling.min_p)
        row[_SCALARS:_TOKENS] = NO_TOKEN
        row[_SCALARS : _SCALARS + len(at.stop_tokens)] = at.stop_tokens
        row[_TOKENS : _TOKENS + len(request.prompt)] = request.prompt

    def cancel(self, slot: int, request_id: int) -> None:
        """Ends the request in a slot; does nothing where the slot is free on the device already."""
        self._cancel[slot] = 1
        self.cancelled.append(request_id)


def _header(config: EngineConfig, controls: Controls, now: float, measured: Measured) -> list[int]:
    """The values of a `Header`, in its order."""
    now_ms, aging_ms = round(now * 1e3), round(controls.aging * 1e3)
    values: dict[str, int | list[int]] = {
        "policy": POLICIES.index(controls.policy),
        "batching": BATCHINGS.index(controls.batching),
        "running_limit": min(controls.running_limit or config.max_running, config.max_running),
        "aging": aging_ms,
        "batch_size": controls.batch_size,
        "batch_delay": round(controls.batch_delay * 1e3),
        "batch_threshold": controls.batch_threshold,
        "max_pinned": int(controls.pinned_share * (config.num_pages - 1)),
        "now": _wrapped(now_ms),
        "aging_window": _wrapped(now_ms // aging_ms * aging_ms),
        "step_us": min(round(measured.seconds * 1e6), 2**31 - 1),
        "step_decodes": measured.decodes,
        "step_chunks": measured.chunks,
        "queued": measured.queued,
        "arrived": measured.arrived,
        "slo_ttft": _by_class(controls.slo_ttft, 1),
        "slo_tpot_us": _by_class(controls.slo_tpot, 1000),
    }
    return pack_header(values)


def _by_class(targets: tuple[float, ...], unit: int) -> list[int]:
    """One target for each class, `unit` times what was given; the last one given holds for the rest."""
    given = [min(max(1, round(target * unit)), 2**31 - 1) for target in targets]
    return [*given, *[given[-1] if given else 0] * (NUM_CLASSES - len(given))]


def admit(state: EngineState, inbox: jax.Array, config: EngineConfig) -> EngineState:
    """Applies an inbox: takes over the header; cancelled slots become free, new requests wait."""
    end = inbox.shape[0] - config.max_slots
    rows = inbox[HEADER_SIZE:end].reshape(config.max_admissions, -1)
    slots = replace(state.slots, phase=jnp.where(inbox[end:] != 0, Phase.FREE, state.slots.phase))

    def admit_nth(i: jax.Array, carry: tuple[SlotTable, Accounts]) -> tuple[SlotTable, Accounts]:
        slots, accounts = carry
        slot, column, news = _read_row(rows[i], config)
        slots = replace(slots, **{name: getattr(slots, name).at[slot].set(value) for name, value in column.items()})
        tenant = jnp.where(news["new_tenant"] != 0, column["tenant"], MAX_TENANTS)  # past the end: dropped
        program = jnp.where(news["new_program"] != 0, column["program"], MAX_PROGRAMS)
        return slots, Accounts(
            tenant=accounts.tenant.at[tenant].set(0, mode="drop"),
            program=accounts.program.at[program].set(0, mode="drop"),
        )

    count = jnp.sum(rows[:, 0] != NO_SLOT, dtype=jnp.int32)
    slots, accounts = lax.fori_loop(0, count, admit_nth, (slots, state.accounts))
    return replace(state, slots=slots, accounts=accounts, header_values=inbox[:HEADER_SIZE])


def _read_row(row: jax.Array, config: EngineConfig) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    """A row's slot, its values for the slot table, and the flags that are not part of that."""
    column = dict(zip(FIELDS, row, strict=False))
    column |= dict(zip(FLOATS, lax.bitcast_convert_type(row[len(FIELDS) : _SCALARS], jnp.float32), strict=True))
    slot = column.pop("slot")
    news = {name: column.pop(name) for name in ("new_tenant", "new_program")}
    salt = lax.bitcast_convert_type(jnp.stack([column.pop("salt_low"), column.pop("salt_high")]), jnp.uint32)
    column |= {
        "phase": jnp.int32(Phase.WAITING),
        "salt": salt,
        "digests": prompt_digests(salt, row[_TOKENS:], column["prompt_len"], config),
        "length": column["prompt_len"],
        "stop_tokens": row[_SCALARS:_TOKENS],
        "tokens": row[_TOKENS:],
    }
    zeros = ("computed", "wait_reason", "preemptions", "reached", "cached")
    return slot, column | dict.fromkeys(zeros, jnp.int32(0)), news
