"""What must hold of every step, in plain numpy: the plan, the batch, the state after it, the outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jbatch.config import Bucket
from jbatch.core.state import NO_PAGE, NO_SLOT, NO_TOKEN, RESERVED_PAGE, Finish, Phase, Wait

if TYPE_CHECKING:
    from harness import Host, Trace


def pages_of(row: np.ndarray) -> list[int]:
    return [int(page) for page in row if page != NO_PAGE]


def check_state(host: Host) -> None:
    """The invariant of the design, and the shadows, after a step."""
    slots, refs, config = host.state.slots, host.state.pool.refs, host.config
    named = [page for row in slots.page_table for page in pages_of(row)]
    counts = np.bincount(named, minlength=config.num_pages)
    assert RESERVED_PAGE not in named
    counts[RESERVED_PAGE] += 1
    np.testing.assert_array_equal(refs, counts)
    assert slots.own.tolist() == [sum(counts[page] == 1 for page in pages_of(row)) for row in slots.page_table]
    assert np.count_nonzero(refs == 0) + len(set(named)) + 1 == config.num_pages
    assert np.count_nonzero(slots.phase == Phase.RUNNING) <= config.max_running
    for slot in range(config.max_slots):
        _check_slot(host, slot)


def _check_slot(host: Host, slot: int) -> None:
    slots, shadow = host.state.slots, host.live.get(slot)
    row, phase = slots.page_table[slot], slots.phase[slot]
    held = -(-int(slots.computed[slot]) // host.config.page_size) if phase == Phase.RUNNING else 0
    assert np.all(row[:held] != NO_PAGE) and np.all(row[held:] == NO_PAGE), "pages are no prefix, or not as many"
    assert (shadow is None) == (phase == Phase.FREE)
    if shadow is None:
        return
    known, page_size = shadow.known, host.config.page_size
    for position in range(slots.computed[slot]):
        place = int(row[position // page_size]), position % page_size
        assert host.content[place] == shadow.written(position), "the page holds something else"
    assert slots.length[slot] == len(known)
    assert slots.tokens[slot, : len(known)].tolist() == known
    assert slots.limit[slot] == shadow.limit > len(known)
    assert 0 <= slots.computed[slot] < len(known)
    assert slots.priority[slot] == shadow.priority and slots.arrival[slot] == shadow.id
    assert slots.seed[slot] == shadow.id and slots.temperature[slot] == 0.5
    assert phase == Phase.RUNNING or slots.computed[slot] == 0


def check_plan(host: Host, trace: Trace, bucket: Bucket) -> None:
    """Rows, the order of admission, and who samples."""
    plan, middle = trace.plan, trace.middle
    assert len(plan.decode_slot) == bucket.decode and len(plan.chunk_slot) == bucket.chunks
    decodes = plan.decode_slot[plan.decode_slot != NO_SLOT].tolist()
    assert len(set(decodes)) == len(decodes)
    assert not set(decodes) & set(plan.chunk_slot.tolist())
    for slot in range(host.config.max_slots):
        rows = np.flatnonzero(plan.chunk_slot == slot)
        _check_rows(host, trace, slot, rows, decodes)
    assert np.all(plan.chunk_len[plan.chunk_slot == NO_SLOT] == 0)
    waits = [slot for slot in host.live if middle.phase[slot] == Phase.WAITING]
    for slot in waits:
        if middle.wait_reason[slot] == Wait.PREFIX:
            _check_deferred(host, trace, slot)
    keys = [_key(host, trace, slot) for slot in waits if middle.wait_reason[slot] != Wait.PREFIX]
    first = min((key for key in keys if key), default=(10**9,))
    for slot in host.live:
        mine = _key(host, trace, slot)
        entered = middle.phase[slot] == Phase.RUNNING and not _ran(host, trace, slot)
        assert not entered or not mine or mine < first, "it overtook one that waits"


def _ran(host: Host, trace: Trace, slot: int) -> bool:
    """Whether the slot's request was running before the step."""
    return trace.before.phase[slot] == Phase.RUNNING and trace.before.arrival[slot] == host.live[slot].id


def _key(host: Host, trace: Trace, slot: int) -> tuple[float, ...] | None:
    return host.live[slot].key(host.controls, round(host.now - host.tick, 3), _ran(host, trace, slot))


def _check_deferred(host: Host, trace: Trace, slot: int) -> None:
    """Someone before it computes what it will share."""
    mine, size = host.live[slot], host.config.page_size
    alike = [i for i, other in host.live.items() if other.salt == mine.salt and other.known[:size] == mine.known[:size]]
    key = _key(host, trace, slot)
    assert any(i != slot and (not key or _key(host, trace, i) < key) for i in alike)


def _check_rows(host: Host, trace: Trace, slot: int, rows: np.ndarray, decodes: list[int]) -> None:
    plan, middle = trace.plan, trace.middle
    advance, computed = int(plan.advance[slot]), int(middle.computed[slot])
    if slot not in host.live or middle.phase[slot] != Phase.RUNNING:
        assert advance == 0 and slot not in decodes and not len(rows) and plan.sample_row[slot] < 0
        return
    length = len(host.live[slot].known)
    if slot in decodes:
        assert advance == 1 and computed == length - 1
        last = int(np.flatnonzero(plan.decode_slot == slot)[0])
    else:
        size = host.config.chunk_size
        assert np.all(np.diff(rows) == 1), "rows of a slot are not consecutive"
        starts = computed + np.arange(len(rows)) * size
        assert plan.chunk_start[rows].tolist() == starts.tolist()
        assert plan.chunk_len[rows].tolist() == np.minimum(size, length - starts).tolist()
        assert advance == plan.chunk_len[rows].sum()
        last = len(plan.decode_slot) + int(rows[-1]) if len(rows) else -1
    samples = advance > 0 and computed + advance == length
    assert plan.sample_row[slot] == (last if samples else -1)


def check_batch(host: Host, trace: Trace) -> None:
    """The batch says of every planned token where it lies, and of every row what it attends to."""
    plan, batch, size = trace.plan, trace.batch, host.config.chunk_size
    rows = len(plan.decode_slot)
    planned: dict[int, tuple[int, int]] = {}  # token row -> slot, position
    for row in np.flatnonzero(plan.decode_slot != NO_SLOT):
        slot = int(plan.decode_slot[row])
        planned[int(row)] = slot, len(host.live[slot].known) - 1
        assert batch.decode_lengths[row] == len(host.live[slot].known)
        np.testing.assert_array_equal(batch.decode_table[row], trace.middle.page_table[slot])
    for row in np.flatnonzero(plan.chunk_slot != NO_SLOT):
        slot, start, length = (int(x[row]) for x in (plan.chunk_slot, plan.chunk_start, plan.chunk_len))
        planned |= {rows + int(row) * size + i: (slot, start + i) for i in range(length)}
        assert batch.chunk_lengths[row] == start + length and batch.chunk_start[row] == start
        assert batch.logit_rows[rows + row] == rows + row * size + length - 1
        np.testing.assert_array_equal(batch.chunk_table[row], trace.middle.page_table[slot])
    _check_places(host, trace, planned)
    assert np.all(batch.decode_lengths[plan.decode_slot == NO_SLOT] == 0)
    assert np.all(batch.chunk_lengths[plan.chunk_slot == NO_SLOT] == 0)
    np.testing.assert_array_equal(batch.logit_rows[:rows], np.arange(rows))


def _check_places(host: Host, trace: Trace, planned: dict[int, tuple[int, int]]) -> None:
    batch, page_size = trace.batch, host.config.page_size
    assert set(np.flatnonzero(batch.page != -1)) == set(planned)
    for row, (slot, position) in planned.items():
        assert batch.tokens[row] == host.live[slot].known[position]
        assert batch.positions[row] == position
        assert batch.page[row] == trace.middle.page_table[slot, position // page_size] > RESERVED_PAGE
        assert batch.offset[row] == position % page_size
        host.content[int(batch.page[row]), int(batch.offset[row])] = host.live[slot].written(position)


def check_outbox(host: Host, trace: Trace) -> None:
    """The host hears what happened, and the counters agree with a recount."""
    box, plan, after = trace.outbox, trace.plan, trace.after
    news = set(box.news().tolist())
    assert news == set(np.flatnonzero(plan.sample_row >= 0).tolist())
    for slot in range(host.config.max_slots):
        row = plan.sample_row[slot]
        assert box.column("token")[slot] == (trace.tokens[row] if slot in news else NO_TOKEN)
        assert box.column("logprob")[slot] == (-row if slot in news else 0)
        ended = slot in news and slot not in host.live
        finish = host.finished[int(after.slots.arrival[slot])][1] if ended else Finish.NONE
        assert box.column("finish")[slot] == finish
    np.testing.assert_array_equal(box.column("phase"), after.slots.phase)
    was_running = (trace.before.phase == Phase.RUNNING) & ~np.isin(np.arange(host.config.max_slots), trace.cancelled)
    assert box.counter("preempted") == np.count_nonzero(was_running & (trace.middle.phase != Phase.RUNNING))
    free = after.pool.refs == 0
    assert box.counter("free_pages") == np.count_nonzero(free)
    assert box.counter("cached_pages") == np.count_nonzero(free & after.pool.digest.any(axis=1))
    assert box.counter("decode_tokens") == np.count_nonzero(plan.decode_slot != NO_SLOT)
    assert box.counter("prefill_tokens") == plan.chunk_len.sum()
    _check_wait(host, trace)


def _check_wait(host: Host, trace: Trace) -> None:
    """Why each slot computed nothing."""
    wait, phase = trace.outbox.column("wait_reason"), trace.middle.phase
    kept = (phase == Phase.WAITING) & (trace.middle.wait_reason == Wait.PREFIX)
    limit = host.controls.running_limit or host.config.max_running
    limit = 1 if host.controls.batching in ("serial", "threshold") else limit
    everyone_runs = np.count_nonzero((phase == Phase.RUNNING) | kept) >= limit
    for slot in host.live:
        if trace.plan.advance[slot] > 0:
            assert wait[slot] == Wait.NONE
        elif phase[slot] == Phase.RUNNING:
            assert wait[slot] == Wait.ROWS
        else:
            assert wait[slot] not in (Wait.NONE, Wait.ROWS)
            assert wait[slot] != Wait.SLO or host.controls.slo_tpot
            assert wait[slot] != Wait.BATCHING or host.controls.batching != "continuous"
            assert wait[slot] != Wait.DEADLINE or host.controls.policy == "edf"
            assert wait[slot] != Wait.RUNNING_LIMIT or everyone_runs, "fewer run than may"
