"""The engine's whole state: one pytree of fixed-shape arrays. Names of shapes as in `DESIGN.md`.

R slots, L tokens a slot at most, N pages a slot at most, P pages, K stop tokens; S decode rows, C chunk rows of Q
tokens, and T = S + C * Q token rows in a step.
"""

from __future__ import annotations

from dataclasses import fields
from enum import IntEnum

import jax
import jax.numpy as jnp
from flax import struct

from jbatch.config import EngineConfig
from jbatch.core.header import HEADER_SIZE, Header, read_header

NO_SLOT = -1
NO_PAGE = -1
NO_TOKEN = -1
RESERVED_PAGE = 0
MAX_STOP_TOKENS = 8
MAX_TENANTS = 64
MAX_PROGRAMS = 256
NO_PROGRAM = -1


class Phase(IntEnum):
    """What a slot is doing."""

    FREE = 0
    WAITING = 1
    """Resident on the device, holds no pages."""
    RUNNING = 2
    """Holds the pages of its `computed` tokens."""


class Wait(IntEnum):
    """Why a slot computed nothing in a step."""

    NONE = 0
    ROWS = 1
    """It holds pages, but the step had no row left for it."""
    RUNNING_LIMIT = 2
    """As many requests run as may, those counted that wait for a prefix only."""
    PAGES = 3
    """Not enough free pages for it, with room for those that run to grow."""
    PREFIX = 4
    """A request before it is computing pages that it will share."""
    ADMISSIONS = 5
    """As many requests enter in this step as may."""
    POLICY = 6
    """There is room for it, but not for one that the policy puts before it."""
    BATCHING = 7
    """The batch that runs is closed, or the next one is still being collected."""
    SLO = 8
    """Fewer requests run than may, so that those keep their latency target."""
    DEADLINE = 9
    """Its deadline has passed: it waits behind all whose deadline has not."""


class Finish(IntEnum):
    """Why a request ended in a step."""

    NONE = 0
    STOP = 1
    LENGTH = 2


@struct.dataclass
class SlotTable:
    """One row per resident request."""

    phase: jax.Array  # [R] int32, a Phase
    prompt_len: jax.Array  # [R] int32
    length: jax.Array  # [R] int32, tokens known: prompt and sampled
    computed: jax.Array  # [R] int32, tokens whose keys and values lie in pages
    limit: jax.Array  # [R] int32, length at which the request ends
    priority: jax.Array  # [R] int32, lower first
    arrival: jax.Array  # [R] int32, order of submission
    submitted: jax.Array  # [R] int32, time of submission
    deadline: jax.Array  # [R] int32, time by which it should end
    tenant: jax.Array  # [R] int32, below MAX_TENANTS
    program: jax.Array  # [R] int32, below MAX_PROGRAMS, or NO_PROGRAM
    pin: jax.Array  # [R] int32, milliseconds that its pages are kept after its end
    temperature: jax.Array  # [R] float32, 0 is greedy
    top_k: jax.Array  # [R] int32, 0 keeps all
    top_p: jax.Array  # [R] float32
    min_p: jax.Array  # [R] float32
    seed: jax.Array  # [R] int32
    stop_tokens: jax.Array  # [R, K] int32, NO_TOKEN where unused
    wait_reason: jax.Array  # [R] int32, a Wait
    tokens: jax.Array  # [R, L] int32
    page_table: jax.Array  # [R, N] int32, NO_PAGE where unused
    own: jax.Array  # [R] int32, pages in `page_table` that no other slot has, as the last step left them
    salt: jax.Array  # [R, 2] uint32, requests of different salts share nothing
    digests: jax.Array  # [R, N, 2] uint32, of each full page of known tokens; 0 where there is none
    preemptions: jax.Array  # [R] int32, times it lost its pages
    reached: jax.Array  # [R] int32, most tokens it ever had computed
    cached: jax.Array  # [R] int32, tokens it found in the prefix cache when it first entered


@struct.dataclass
class PagePool:
    """Who holds the pages of the KV cache, and what the free ones still hold."""

    refs: jax.Array  # [P] int32, entries of page tables that name the page; the reserved page counts 1
    digest: jax.Array  # [P, 2] uint32, of the tokens up to the page's end; 0 where it cannot be shared
    column: jax.Array  # [P] int32, its place in the page tables
    last_used: jax.Array  # [P] int32, step in which its last user left
    pinned_until: jax.Array  # [P] int32, time up to which the content is kept
    clock: jax.Array  # int32, steps so far


@struct.dataclass
class PrefixIndex:
    """A set-associative hash table from digests to pages. Entries may be stale: the page's own digest decides."""

    buckets: jax.Array  # [B, 4] int32, page ids, NO_PAGE where unused; B is a power of two


@struct.dataclass
class Accounts:
    """What has been done for whom, in tokens; a generated one counts `accounts.OUTPUT_WEIGHT` times."""

    tenant: jax.Array  # [MAX_TENANTS] int32, more than the active tenant served least has got
    program: jax.Array  # [MAX_PROGRAMS] int32, what the requests of the program have got in all


@struct.dataclass
class WholeBatch:
    """The batch that runs to its end, for the ways of batching that have one; scalars, int32."""

    entered: jax.Array  # requests that entered in the last step
    size: jax.Array  # requests that have entered since nothing ran
    limit: jax.Array  # most that may under "threshold", set as nothing ran


@struct.dataclass
class Controller:
    """What limits the batch, and the estimates behind that; times in milliseconds, rates per second."""

    running: jax.Array  # int32, most requests that may run, as far as latency targets go
    chunks: jax.Array  # int32, most chunk rows of a step
    output_tokens: jax.Array  # float32, mean length of the outputs seen; 0 before the first
    decode_time: jax.Array  # [M] float32, of a step without chunks whose decode rows are at most 2**m; 0: unknown
    chunk_time: jax.Array  # float32, that a chunk row adds
    decode_rows: jax.Array  # float32, decode rows of a step, averaged over some
    chunk_rows: jax.Array  # float32, its chunk rows, averaged like those
    foreseen: jax.Array  # float32, milliseconds of a step as foreseen times its decode rows, averaged like those
    measured: jax.Array  # float32, the same with the time that it took
    arrivals: jax.Array  # float32, requests that come
    finishes: jax.Array  # float32, requests that end
    last: jax.Array  # int32, time of the last step


@struct.dataclass
class KVPages:
    """Keys and values, one array a layer so that each is updated in place."""

    k: tuple[jax.Array, ...]  # each [P, page_size, kv_heads, head_dim]
    v: tuple[jax.Array, ...]


@struct.dataclass
class EngineState:
    """All that a step reads and writes besides the weights. Without layers in `kv` it is a simulator's state."""

    slots: SlotTable
    pool: PagePool
    index: PrefixIndex
    accounts: Accounts
    batch: WholeBatch
    controller: Controller
    header_values: jax.Array  # [HEADER_SIZE] int32, of the inbox taken in last; one buffer, since each takes time
    kv: KVPages

    @property
    def header(self) -> Header:
        """What the inbox taken in last began with."""
        return read_header(self.header_values)


@struct.dataclass
class BatchPlan:
    """What one step computes: rows to slots, and back."""

    decode_slot: jax.Array  # [S] int32, NO_SLOT for an idle row
    chunk_slot: jax.Array  # [C] int32, NO_SLOT for an idle row
    chunk_start: jax.Array  # [C] int32, position of the chunk's first token
    chunk_len: jax.Array  # [C] int32, tokens in the chunk
    advance: jax.Array  # [R] int32, tokens the slot computes in this step
    preempted: jax.Array  # int32, requests that lost their pages
    prefix_queries: jax.Array  # int32, tokens of requests that start for the first time
    prefix_hits: jax.Array  # int32, tokens of those found in the prefix cache
    order: jax.Array  # [R] int32, slots in the order in which they hold pages
    matched: jax.Array  # [R] int32, tokens that a waiting slot would find in the prefix cache
    sample_row: jax.Array  # [R] int32, index among the S + C rows of the slot's last token; -1: samples nothing


def init_state(config: EngineConfig, kv: KVPages) -> EngineState:
    """An empty engine: every slot free, every page but the reserved one free."""
    pages = config.num_pages
    pool = PagePool(
        refs=_ints(pages).at[RESERVED_PAGE].set(1),
        digest=jnp.zeros((pages, 2), jnp.uint32),
        column=_ints(pages),
        last_used=_ints(pages),
        pinned_until=_ints(pages),
        clock=jnp.int32(0),
    )
    # As many buckets as pages: then hardly ever more than four pages fall into one.
    index = PrefixIndex(buckets=_ints(1 << (pages - 1).bit_length(), 4, fill=NO_PAGE))
    return EngineState(
        slots=_free_slots(config),
        pool=pool,
        index=index,
        accounts=Accounts(tenant=_ints(MAX_TENANTS), program=_ints(MAX_PROGRAMS)),
        batch=WholeBatch(entered=_ints(), size=_ints(), limit=_ints()),
        controller=_fresh_controller(config),
        header_values=_ints(HEADER_SIZE),
        kv=kv,
    )


def _ints(*shape: int, fill: int = 0) -> jax.Array:
    return jnp.full(shape, fill, jnp.int32)


def _floats(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def _free_slots(config: EngineConfig) -> SlotTable:
    rows, other = config.max_slots, {"program": NO_PROGRAM}
    floats = ("temperature", "top_p", "min_p")
    wide = {
        "stop_tokens": _ints(rows, MAX_STOP_TOKENS, fill=NO_TOKEN),
        "tokens": _ints(rows, config.max_model_len),
        "page_table": _ints(rows, config.pages_per_slot, fill=NO_PAGE),
        "salt": jnp.zeros((rows, 2), jnp.uint32),
        "digests": jnp.zeros((rows, config.pages_per_slot, 2), jnp.uint32),
    }
    names = [field.name for field in fields(SlotTable) if field.name not in wide]
    columns = {name: _floats(rows) if name in floats else _ints(rows, fill=other.get(name, 0)) for name in names}
    return SlotTable(**columns, **wide)


def _fresh_controller(config: EngineConfig) -> Controller:
    return Controller(
        running=jnp.int32(config.max_running),
        chunks=jnp.int32(config.max_chunks),
        output_tokens=_floats(),
        decode_time=_floats(config.max_running.bit_length() + 1),
        chunk_time=_floats(),
        decode_rows=_floats(),
        chunk_rows=_floats(),
        foreseen=_floats(),
        measured=_floats(),
        arrivals=_floats(),
        finishes=_floats(),
        last=_ints(),
    )
