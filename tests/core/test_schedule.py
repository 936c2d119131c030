"""The scheduler against plain loops on random states, and its tricky cases one by one."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from checks import pages_of
from harness import Host
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scheduler import Plan, Slot, World, pages_for, schedule_by_loops

from jbatch.config import Bucket, EngineConfig
from jbatch.controls import BATCHINGS, POLICIES, Controls
from jbatch.core.demand import demand
from jbatch.core.inbox import InboxBuilder, admit
from jbatch.core.schedule import schedule
from jbatch.core.state import NO_PAGE, NO_SLOT, RESERVED_PAGE, EngineState, KVPages, Phase, SlotTable, Wait, init_state

CONFIG = EngineConfig(
    max_model_len=48,
    max_running=5,
    max_slots=8,
    num_pages=20,
    page_size=4,
    chunk_size=8,
    max_chunks=4,
    max_admissions=3,
)
NOW = 1000.0
BUCKETS = [Bucket(8, 4), Bucket(2, 0), Bucket(2, 1), Bucket(4, 2)]


# ---- random states ----


@cache
def compiled(bucket: Bucket) -> Any:
    def run(state: EngineState, inbox: jax.Array) -> Any:
        state = admit(state, inbox, CONFIG)
        after, plan = schedule(state, CONFIG, bucket)
        return (after, plan), demand(state, plan, CONFIG)

    return jax.jit(run)


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Slot], list[int]]:
    """Slots of every kind, and how many pages each holds: those of its computed tokens.

    A slot whose request was cancelled a moment ago is free and still holds pages.
    """
    arrivals = draw(st.permutations(range(1, CONFIG.max_slots + 1)))
    left = CONFIG.num_pages - 1
    slots, held = [], []
    for index in range(CONFIG.max_slots):
        phase = draw(st.sampled_from([Phase.RUNNING, Phase.RUNNING, Phase.WAITING, Phase.FREE]))
        length = draw(st.one_of(st.integers(1, 47), st.integers(1, 9)))
        missing = draw(st.one_of(st.just(1), st.integers(1, length)))
        computed = length - missing
        pages = pages_for(computed, CONFIG) if phase != Phase.WAITING else 0
        if pages > left or sum(s.phase == Phase.RUNNING for s in slots) >= CONFIG.max_running:
            phase, pages = Phase.WAITING, 0
        left -= pages
        computed = 0 if phase == Phase.WAITING else computed
        slots.append(
            Slot(
                *(index, phase, draw(st.integers(-1, 1)), arrivals[index], length, computed),
                limit=draw(st.integers(length + 1, 48)),
                submitted=NOW - draw(st.integers(0, 35)),
                due=NOW + draw(st.integers(-2, 5)),
                tenant=draw(st.integers(0, 2)),
                program=draw(st.integers(-1, 2)),
                preempted=draw(st.booleans()),
            )
        )
        held.append(pages)
    return slots, held


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Controls of every kind, and what tenants and programs have got so far."""
    controls = Controls(
        policy=draw(st.sampled_from(POLICIES)),
        batching=draw(st.sampled_from(BATCHINGS)),
        running_limit=draw(st.integers(0, CONFIG.max_running)),
        batch_size=draw(st.integers(1, 4)),
        batch_delay=draw(st.integers(0, 40)),
        batch_threshold=draw(st.integers(0, 4)),
    )
    service = st.fixed_dictionaries({i: st.sampled_from([0, 0, 1, 3, 4, 100]) for i in range(3)})
    return World(controls, NOW, draw(service), draw(service))


def device_state(slots: list[Slot], held: list[int], world: World, seed: int) -> EngineState:
    """The same state as arrays; which pages, is random."""
    empty = jax.tree.map(np.array, init_state(CONFIG, KVPages(k=(), v=())))
    ids = np.random.default_rng(seed).permutation(np.arange(1, CONFIG.num_pages))
    table, refs, taken = empty.slots.page_table, empty.pool.refs, 0
    for slot, pages in zip(slots, held, strict=True):
        table[slot.index, :pages] = ids[taken : taken + pages]
        refs[ids[taken : taken + pages]] = 1
        taken += pages

    def column(name: str, factor: int = 1) -> np.ndarray:
        return np.array([getattr(slot, name) * factor for slot in slots], np.int32)

    names = ("phase", "priority", "arrival", "length", "computed", "limit", "tenant", "program")
    slots_now = empty.slots.replace(
        page_table=table,
        own=np.array(held, np.int32),
        submitted=column("submitted", 1000),
        deadline=column("due", 1000),
        preemptions=column("preempted"),
        **{name: column(name) for name in names},
    )
    for account, service in (
        (empty.accounts.tenant, world.tenant_service),
        (empty.accounts.program, world.program_service),
    ):
        account[list(service)] = list(service.values())
    return empty.replace(slots=slots_now, pool=empty.pool.replace(refs=refs))


@settings(deadline=None, max_examples=900)
@given(states(), worlds(), st.sampled_from(BUCKETS), st.integers(0, 5))
def test_schedule_and_demand_equal_plain_loops(
    state: tuple[list[Slot], list[int]], world: World, bucket: Bucket, seed: int
) -> None:
    before = device_state(*state, world, seed)
    inbox = InboxBuilder(CONFIG, world.controls, NOW).buffer
    (after, plan), ahead = jax.device_get(compiled(bucket)(before, inbox))
    expected = schedule_by_loops(state[0], world, CONFIG, bucket)

    assert plan.decode_slot.tolist() == expected.decode_rows
    chunks = list(zip(plan.chunk_slot.tolist(), plan.chunk_start.tolist(), plan.chunk_len.tolist(), strict=True))
    idle = [(NO_SLOT, 0, 0)] * (bucket.chunks - len(expected.chunk_rows))
    assert chunks == expected.chunk_rows + idle
    assert plan.preempted == len(expected.preempted)
    _check_slots(state[0], expected, before.slots, after.slots, plan)
    _check_pages(expected, before.slots.page_table, after.slots.page_table, after.pool.refs)
    assert (ahead.decodes, ahead.prefills, ahead.chunks) == expected.wanted
    assert ahead.places == expected.places


def _check_slots(given: list[Slot], expected: Plan, before: SlotTable, after: SlotTable, plan: Any) -> None:
    residents = {slot.index for slot in expected.residents}
    for slot in given:
        i = slot.index
        assert plan.advance[i] == expected.advance.get(i, 0)
        assert plan.sample_row[i] == expected.sample_row.get(i, -1)
        if slot.phase == Phase.FREE:
            assert after.phase[i] == Phase.FREE
            continue
        assert after.phase[i] == (Phase.RUNNING if i in residents else Phase.WAITING)
        assert after.computed[i] == (slot.computed if i in residents else 0)
        assert after.wait_reason[i] == expected.wait[i], (Wait(int(after.wait_reason[i])), expected.wait[i])
    for name in ("length", "priority", "arrival", "tokens", "limit", "seed"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


def _check_pages(expected: Plan, before: np.ndarray, after: np.ndarray, refs: np.ndarray) -> None:
    for i, row in enumerate(after):
        pages = expected.pages.get(i, 0)
        kept = min(len(pages_of(before[i])), pages)
        assert row[:kept].tolist() == before[i, :kept].tolist(), "a page moved"
        assert np.all(row[:pages] > RESERVED_PAGE) and np.all(row[pages:] == NO_PAGE)
    named = [page for row in after for page in pages_of(row)]
    counts = np.bincount(named, minlength=CONFIG.num_pages)
    counts[RESERVED_PAGE] += 1
    np.testing.assert_array_equal(refs, counts)
    assert counts.max() == 1


# ---- the tricky cases ----


def prompt(length: int) -> tuple[int, ...]:
    """Tokens that no step samples, so that nothing stops by chance."""
    return tuple(range(100, 100 + length))


def rows_of(plan: Any) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Busy decode rows, and busy chunk rows as (slot, start, tokens)."""
    chunks = zip(plan.chunk_slot.tolist(), plan.chunk_start.tolist(), plan.chunk_len.tolist(), strict=True)
    return [slot for slot in plan.decode_slot.tolist() if slot >= 0], [row for row in chunks if row[0] >= 0]


def make_host(**changes: int) -> Host:
    sizes = {
        "max_model_len": 48,
        "max_running": 4,
        "max_slots": 8,
        "num_pages": 40,
        "page_size": 4,
        "chunk_size": 8,
        "max_chunks": 4,
        "max_admissions": 8,
    }
    return Host(EngineConfig(**{**sizes, **changes}))


def test_prefill_is_chunked_and_mixes_with_decode() -> None:
    host = make_host(max_chunks=1)
    first = host.submit(prompt(5), 10)
    host.step()
    second = host.submit(prompt(20), 10)
    a, b = host.slot_of(first), None
    for start, tokens in [(0, 8), (8, 8), (16, 4)]:
        trace = host.step()
        b = host.slot_of(second)
        assert rows_of(trace.plan) == ([a], [(b, start, tokens)])
        assert (trace.plan.sample_row[b] >= 0) == (start == 16)
    assert sorted(rows_of(host.step().plan)[0]) == sorted([a, b])


def test_one_prompt_takes_several_rows_of_a_step() -> None:
    host = make_host()
    long, short = host.submit(prompt(20), 4), host.submit(prompt(3), 4)
    plan = host.step().plan
    a, b = host.slot_of(long), host.slot_of(short)
    assert rows_of(plan) == ([], [(a, 0, 8), (a, 8, 8), (a, 16, 4), (b, 0, 3)])
    assert plan.sample_row[a] == host.config.largest_bucket.decode + 2


def test_a_prompt_is_cut_where_the_rows_end() -> None:
    host = make_host(max_chunks=2)
    ids = [host.submit(prompt(length), 4) for length in (10, 8, 3)]
    plan = host.step().plan
    a, b, c = (host.slot_of(id_) for id_ in ids)
    assert rows_of(plan)[1] == [(a, 0, 8), (a, 8, 2)]
    assert host.state.slots.wait_reason[[a, b, c]].tolist() == [Wait.NONE, Wait.ROWS, Wait.ROWS]
    assert rows_of(host.step().plan) == ([a], [(b, 0, 8), (c, 0, 3)])


def test_a_prompt_of_one_token_takes_a_decode_row() -> None:
    host = make_host()
    id_ = host.submit((100,), 3)
    trace = host.step(Bucket(1, 0))
    slot = host.slot_of(id_)
    assert rows_of(trace.plan) == ([slot], [])
    assert trace.outbox.news().tolist() == [slot]


def test_a_prompt_of_whole_chunks_samples_at_once() -> None:
    host = make_host()
    id_ = host.submit(prompt(16), 2)
    assert host.step().outbox.news().tolist() == [host.slot_of(id_)]
    assert len(pages_of(host.state.slots.page_table[host.slot_of(id_)])) == 4


def test_a_better_class_displaces_where_running_places_are_full() -> None:
    host = make_host(max_running=2, max_chunks=2)
    worse = [host.submit(prompt(4), 20, priority=5) for _ in range(2)]
    host.step()
    better = host.submit(prompt(4), 3, priority=1)
    trace = host.step()
    phase = host.state.slots.phase
    assert phase[host.slot_of(better)] == phase[host.slot_of(worse[0])] == Phase.RUNNING
    assert phase[host.slot_of(worse[1])] == Phase.WAITING
    assert trace.outbox.counter("preempted") == 1
    assert host.state.slots.wait_reason[host.slot_of(worse[1])] == Wait.RUNNING_LIMIT
    host.run_until_idle()
    assert list(host.finished) == [better, *worse]


def test_a_better_class_displaces_where_pages_are_full() -> None:
    host = make_host(num_pages=11)
    worse = [host.submit(prompt(15), 10, priority=1) for _ in range(2)]
    host.step()
    better = host.submit(prompt(14), 2, priority=0)
    host.step()
    phase = host.state.slots.phase
    assert phase[host.slot_of(better)] == phase[host.slot_of(worse[0])] == Phase.RUNNING
    assert phase[host.slot_of(worse[1])] == Phase.WAITING
    assert host.state.slots.wait_reason[host.slot_of(worse[1])] == Wait.PAGES
    host.run_until_idle()
    assert list(host.finished) == [better, *worse]


def test_an_equal_class_displaces_nobody() -> None:
    host = make_host(max_running=2)
    ids = [host.submit(prompt(4), 8) for _ in range(4)]
    host.run_until_idle()
    assert host.preemptions == 0
    assert list(host.finished) == ids


def test_the_preempted_returns_before_later_arrivals_and_keeps_its_tokens() -> None:
    host = make_host(num_pages=11)
    first, second = host.submit(prompt(15), 24), host.submit(prompt(11), 24)
    while host.preemptions == 0:
        host.step(seed=host.num_steps)
    shadow = host.live[host.slot_of(second)]
    sampled = list(shadow.sampled)
    third = host.submit(prompt(2), 5)
    while first not in host.finished:
        host.step(seed=host.num_steps)
        assert host.state.slots.phase[[host.slot_of(second), host.slot_of(third)]].tolist() == [Phase.WAITING] * 2
    plan = host.step().plan  # prompt and sampled tokens are computed again, as one prompt
    slot = host.slot_of(second)
    assert len(sampled) > 0 and shadow.sampled == [*sampled, *shadow.sampled[len(sampled) :]]
    assert rows_of(plan)[1][:2] == [(slot, 0, 8), (slot, 8, 8)]
    assert plan.advance[slot] == 11 + len(sampled)
    host.run_until_idle()
    assert next(iter(host.finished)) == first and set(host.finished) == {first, second, third}


@pytest.mark.parametrize(("usable", "enters"), [(7, False), (8, True)])
def test_a_waiting_request_leaves_a_page_of_growth_to_each_before_it(usable: int, enters: bool) -> None:
    """Three pages run (one request's two, another's one); the third wants three, and two pages of room before it."""
    host = make_host(num_pages=usable + 1)
    host.submit(prompt(7), 4)
    host.submit(prompt(3), 4)
    host.step()
    third = host.submit(prompt(9), 4)
    host.step()
    assert (host.state.slots.phase[host.slot_of(third)] == Phase.RUNNING) == enters


def test_the_first_in_order_needs_no_room_to_grow() -> None:
    host = make_host(num_pages=13)
    host.submit(prompt(47), 1)
    host.run_until_idle()
    assert [len(tokens) for tokens, _ in host.finished.values()] == [1]


def test_a_large_request_bars_small_ones_behind_it() -> None:
    host = make_host(num_pages=11)
    host.submit(prompt(16), 8)
    host.step()
    large, small = host.submit(prompt(30), 2), host.submit(prompt(1), 2)
    host.step()
    for id_, reason in ((large, Wait.PAGES), (small, Wait.POLICY)):
        assert host.state.slots.phase[host.slot_of(id_)] == Phase.WAITING
        assert host.state.slots.wait_reason[host.slot_of(id_)] == reason


def test_a_cancelled_request_frees_its_pages_within_the_same_step() -> None:
    host = make_host(num_pages=11)
    first, second = host.submit(prompt(36), 8), host.submit(prompt(36), 8)
    host.step()
    assert host.state.slots.phase[host.slot_of(second)] == Phase.WAITING
    host.cancel(host.slot_of(first))
    trace = host.step()
    assert host.state.slots.phase[host.slot_of(second)] == Phase.RUNNING
    assert trace.plan.advance[host.slot_of(second)] == 32


def test_a_step_without_chunk_rows_lets_prompts_wait_for_rows() -> None:
    host = make_host()
    id_ = host.submit(prompt(9), 4)
    trace = host.step(Bucket(4, 0))
    assert not trace.plan.advance.any()
    assert host.state.slots.wait_reason[host.slot_of(id_)] == Wait.ROWS


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=7))
def test_demand_foresees_the_next_step(requests: list[tuple[int, int, int]]) -> None:
    """With nothing new and the largest bucket the next step plans just what the outbox said.

    That is so until one is preempted: what is left of its pages by then is not looked up in advance.
    """
    host = make_host(num_pages=25, max_chunks=8)
    for length, max_tokens, priority in requests:
        host.submit(prompt(length), max_tokens, priority)
    box = host.step().outbox
    while host.busy:
        trace = host.step()
        if host.preemptions:
            return
        decodes, chunks = rows_of(trace.plan)
        bound = host.config.largest_bucket
        assert len(decodes) == min(box.counter("next_decodes"), bound.decode)
        assert len(chunks) == min(box.counter("next_chunks"), bound.chunks)
        if box.counter("next_chunks") <= bound.chunks:
            assert len({slot for slot, _, _ in chunks}) == box.counter("next_prefills")
        running = np.count_nonzero(trace.middle.phase == Phase.RUNNING)
        barred = np.any((trace.before.phase == Phase.WAITING) & (trace.middle.phase == Phase.WAITING))
        assert box.counter("next_places") == (0 if barred else host.config.max_running - running)
        box = trace.outbox
