"""Sharing of pages between requests, on a host without a model; the harness checks what every page holds."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checks import pages_of
from harness import Host

from jbatch.config import EngineConfig
from jbatch.controls import Controls
from jbatch.core.prefix import chain_digest
from jbatch.core.state import Phase, Wait

SYSTEM = tuple(range(100, 132))  # 8 pages


class SharingHost(Host):
    """Requests share what they can unless told otherwise."""

    def submit(self, *args: Any, salt: bytes = b"everyone", **kwargs: Any) -> int:
        return super().submit(*args, salt=salt, **kwargs)


def make_host(**changes: int) -> Host:
    sizes = {
        "max_model_len": 64,
        "max_running": 8,
        "max_slots": 16,
        "num_pages": 200,
        "page_size": 4,
        "chunk_size": 8,
        "max_chunks": 8,
        "max_admissions": 8,
    }
    return SharingHost(EngineConfig(**{**sizes, **changes}))


def prefill_tokens(host: Host) -> int:
    """Chunk tokens computed until nothing is left."""
    total = 0
    while host.busy:
        total += host.step().outbox.counter("prefill_tokens")
    return total


def test_a_later_request_computes_only_what_is_new() -> None:
    host = make_host()
    host.submit((*SYSTEM, 1, 2, 3), 2)
    host.run_until_idle()
    id_ = host.submit((*SYSTEM, 7, 8), 2)
    box = host.step().outbox
    assert box.counter("prefill_tokens") == 2
    assert (box.counter("prefix_queries"), box.counter("prefix_hits")) == (34, 32)
    assert host.state.slots.computed[host.slot_of(id_)] == 34


def test_a_prompt_that_is_cached_whole_still_computes_a_token() -> None:
    host = make_host()
    host.submit(SYSTEM, 1)
    host.run_until_idle()
    host.submit(SYSTEM, 1)
    box = host.step().outbox
    assert box.counter("prefix_hits") == 28
    assert box.counter("prefill_tokens") == 4
    assert not host.busy


def test_requests_that_come_together_compute_a_common_prefix_once() -> None:
    host = make_host(max_chunks=2)
    for tail in range(8):
        host.submit((*SYSTEM, 200 + tail, 201), 3)
    box = host.step().outbox
    assert np.count_nonzero(box.column("wait_reason") == Wait.PREFIX) == 7
    assert box.counter("prefill_tokens") + prefill_tokens(host) == 32 + 8 * 2


def test_they_hold_the_same_pages_at_once() -> None:
    host = make_host()
    for tail in range(4):
        host.submit((*SYSTEM, 200 + tail), 20)
    for _ in range(3):
        host.step()
    rows = [pages_of(row) for row in host.state.slots.page_table if row[0] > 0]
    assert len(rows) == 4
    assert len({tuple(row[:8]) for row in rows}) == 1
    assert host.state.pool.refs[rows[0][0]] == 4


def test_a_second_turn_finds_the_answer_of_the_first() -> None:
    host = make_host()
    first = host.submit(SYSTEM[:8], 9)
    host.run_until_idle()
    conversation = (*SYSTEM[:8], *host.finished[first][0])
    assert len(conversation) == 17
    host.submit((*conversation, 50, 51, 52, 53), 1)
    box = host.step().outbox
    assert box.counter("prefix_hits") == 16  # the last token of an answer is never computed
    assert box.counter("prefill_tokens") == 5


def test_other_salts_share_nothing() -> None:
    host = make_host()
    host.submit(SYSTEM, 1, salt=b"tenant a")
    host.run_until_idle()
    host.submit(SYSTEM, 1, salt=b"tenant b")
    box = host.step().outbox
    assert box.counter("prefix_hits") == 0
    assert box.counter("prefill_tokens") == len(SYSTEM)


def test_a_common_middle_is_no_common_prefix() -> None:
    host = make_host()
    host.submit((1, 2, 3, 4, *SYSTEM), 1)
    host.run_until_idle()
    host.submit((1, 2, 3, 5, *SYSTEM), 1)
    assert host.step().outbox.counter("prefix_hits") == 0


def test_the_preempted_find_their_own_pages_and_count_once() -> None:
    host = make_host(max_running=1)
    host.submit(SYSTEM, 20, priority=1)
    first = host.step().outbox
    urgent = host.submit((5, 6), 1)
    host.step()
    assert host.preemptions == 1
    assert urgent in host.finished
    box = host.step().outbox
    assert box.counter("prefill_tokens") + box.counter("decode_tokens") < 8, "it computed its prompt again"
    assert first.counter("prefix_queries") == 32
    assert box.counter("prefix_queries") == box.counter("prefix_hits") == 0


def test_pages_without_users_are_given_up_oldest_first_and_from_the_end() -> None:
    host = make_host(num_pages=21, max_model_len=64)
    old, recent = SYSTEM[:16], tuple(range(300, 316))
    for prompt in (old, recent):
        host.submit(prompt, 1)
        host.run_until_idle()
    assert host.state.pool.digest.any(axis=1).sum() == 8
    host.submit(tuple(range(400, 456)), 1)  # takes 14 of the 12 pages that were never used and the 8 cached
    host.run_until_idle()

    def hits(prompt: tuple[int, ...]) -> int:
        host.submit((*prompt, 1), 1)
        return host.step().outbox.counter("prefix_hits")

    assert hits(recent) == 16
    assert hits(old) < 16


@pytest.mark.parametrize("leaves", ["cancelled", "displaced"])
def test_who_waits_for_a_prefix_goes_on_without_its_maker(leaves: str) -> None:
    host = make_host(max_chunks=1, max_running=2)
    maker = host.submit(SYSTEM, 4, priority=1)
    host.step()
    follower = host.submit((*SYSTEM, 9), 4, priority=1)
    assert host.step().outbox.column("wait_reason")[host.slot_of(follower)] == Wait.PREFIX
    if leaves == "cancelled":
        host.cancel(host.slot_of(maker))
        host.step()
        assert host.state.slots.phase[host.slot_of(follower)] == Phase.RUNNING
    else:
        host.submit((1, 2), 9)
        host.submit((3, 4), 9)
    host.run_until_idle()
    assert follower in host.finished


def test_a_better_class_does_not_wait_for_a_worse_one() -> None:
    host = make_host(max_chunks=1)
    host.submit(SYSTEM, 4, priority=1)
    host.step()
    urgent = host.submit((*SYSTEM, 9), 4, priority=0)
    trace = host.step()
    assert trace.plan.advance[host.slot_of(urgent)] > 0


def test_nobody_enters_on_room_that_is_kept_for_one_who_waits_for_a_prefix() -> None:
    host = make_host(max_chunks=1, max_running=2)
    host.submit(SYSTEM, 4)
    follower = host.submit((*SYSTEM, 9), 4)
    unrelated = host.submit((1, 2, 3), 4)
    box = host.step().outbox
    assert box.column("wait_reason")[host.slot_of(follower)] == Wait.PREFIX
    assert box.column("wait_reason")[host.slot_of(unrelated)] == Wait.RUNNING_LIMIT
    host.run_until_idle()
    assert host.preemptions == 0


def test_who_waits_for_a_prefix_bars_nobody() -> None:
    host = make_host(max_chunks=2, max_running=3)
    host.submit(SYSTEM, 4)
    host.submit((*SYSTEM, 9), 4)
    unrelated = host.submit((1, 2, 3), 4)
    host.step()
    assert host.state.slots.phase[host.slot_of(unrelated)] == Phase.RUNNING


def test_digests_of_pages_that_differ_anywhere_differ() -> None:
    """Also where both lanes would change by their highest bit alone."""
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 49152, (20000, 16)).astype(np.int32)
    changed = pages.copy()
    changed[np.arange(len(pages)), rng.integers(0, 16, len(pages))] ^= 1 << rng.integers(0, 15, len(pages))
    salt = jnp.asarray([5, 9], jnp.uint32)
    flipped = salt ^ jnp.uint32(1 << 31)
    digests = np.concatenate([chain_digest(start, both) for both in (pages, changed) for start in (salt, flipped)])
    assert len(np.unique(digests, axis=0)) == 4 * len(pages)
    for lane in range(2):  # few pairs of 80,000 agree in one half by chance
        assert len(np.unique(digests[:, lane])) > 79_980


def test_shared_pages_take_room_once() -> None:
    """Eight requests of 10 pages each, 8 of them shared: all run in 40 pages, and go on growing there."""
    host = make_host(num_pages=41)
    for tail in range(8):
        host.submit((*SYSTEM, 200 + tail, 201), 12)
    most = 0
    while host.busy:
        host.step(seed=3)
        most = max(most, int(np.count_nonzero(host.state.slots.phase == Phase.RUNNING)))
    assert most == 8
    assert host.preemptions == 0


def test_tokens_found_are_told_with_the_first_token() -> None:
    host = make_host()
    host.submit((*SYSTEM, 1), 1)
    host.run_until_idle()
    id_ = host.submit((*SYSTEM, 2), 3)
    box = host.step().outbox
    assert box.column("cached")[host.slot_of(id_)] == 32


def test_tokens_computed_again_are_counted_apart() -> None:
    host = make_host(max_running=1, max_model_len=64)
    host.submit(SYSTEM[:30], 20, priority=1)
    computed = host.step().outbox.counter("prefill_tokens")
    host.submit((5, 6), 1)
    host.step()  # the second displaces it; its 7 full pages stay, the eighth is lost
    box = host.step().outbox
    assert computed == 30
    assert box.counter("recomputed_tokens") == 2
    assert box.counter("prefill_tokens") == 3  # and the one sampled before


# ---- pins ----


def hits(host: Host, prompt: tuple[int, ...]) -> int:
    host.submit((*prompt, 1), 1)
    return host.step().outbox.counter("prefix_hits")


@pytest.mark.parametrize("now", [1000.0, 2**31 / 1e3 - 1.0, 2**31 / 1e3 + 1000.0], ids=["", "wrapping", "wrapped"])
def test_pinned_pages_outlast_newer_ones(now: float) -> None:
    host = make_host(num_pages=41, max_model_len=64)
    host.now = round(now, 3)
    host.submit(SYSTEM, 1, pin=5.0)
    host.run_until_idle()
    for i in range(6):  # each takes 14 pages
        host.submit(tuple(range(1000 + 100 * i, 1056 + 100 * i)), 1)
        host.run_until_idle()
    assert host.step().outbox.counter("pinned_pages") == 8
    assert hits(host, SYSTEM) == 32


def test_pins_end_in_time() -> None:
    host = make_host(num_pages=41, max_model_len=64)
    host.submit(SYSTEM, 1, pin=0.2)
    host.run_until_idle()
    for i in range(6):
        host.submit(tuple(range(1000 + 100 * i, 1056 + 100 * i)), 1)
        host.run_until_idle()
    assert host.step().outbox.counter("pinned_pages") == 0
    assert hits(host, SYSTEM) == 0


def test_pins_take_no_more_than_their_share() -> None:
    host = make_host(num_pages=41, max_model_len=64)
    for i in range(4):
        host.submit(tuple(range(1000 + 100 * i, 1032 + 100 * i)), 1, pin=60.0)
        host.run_until_idle()
    assert host.step().outbox.counter("pinned_pages") == 10  # a quarter of 40


def test_content_without_a_page_of_its_own_is_not_pinned() -> None:
    """Two alike run at once: the second one's pages are duplicates nobody can find."""
    host = make_host(num_pages=41, max_model_len=64)
    for salt in (b"tenant a", b"tenant a"):
        host.submit(SYSTEM[:6], 2, pin=60.0, salt=salt)
    host.run_until_idle()
    assert host.step().outbox.counter("pinned_pages") == 1
    for i in range(12):
        host.submit(tuple(range(1000 + 100 * i, 1016 + 100 * i)), 1)
        host.run_until_idle()
    assert host.step().outbox.counter("pinned_pages") == 1


def test_a_pinned_conversation_goes_on_at_once() -> None:
    """Its own pages do not count as kept for others."""
    host = make_host(num_pages=21, max_model_len=76)
    host.controls = Controls(pinned_share=0.5)
    host.submit(SYSTEM, 1, pin=60.0)
    host.run_until_idle()
    small, next_turn = host.submit((5, 6, 7), 3), host.submit((*SYSTEM, 1, 2, 3), 2)
    host.step()
    phase = host.state.slots.phase
    assert phase[host.slot_of(small)] == phase[host.slot_of(next_turn)] == Phase.RUNNING


def test_pins_keep_newcomers_out_but_stop_nobody_alone() -> None:
    host = make_host(num_pages=21, max_model_len=76)
    host.controls = Controls(pinned_share=0.5)
    host.submit(SYSTEM, 1, pin=60.0)
    host.run_until_idle()
    first, second = host.submit(tuple(range(500, 524)), 3), host.submit(tuple(range(600, 624)), 3)
    host.step()
    phase = host.state.slots.phase
    assert phase[host.slot_of(first)] == Phase.RUNNING
    assert phase[host.slot_of(second)] == Phase.WAITING
    host.run_until_idle()
    assert host.step().outbox.counter("pinned_pages") == 8
    large = host.submit(tuple(range(700, 772)), 2)  # 19 of the 20 pages
    host.run_until_idle()
    assert large in host.finished
