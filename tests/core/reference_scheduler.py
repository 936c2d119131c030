"""The scheduling rules once more, as plain loops over plain lists, written from their description alone.

Order: priority class, then arrival. Residency: walk that order and count pages of all known tokens. A waiting request
enters if it fits together with all before it and a page of growth for each of them, if fewer than `max_running`
stand before it, and if fewer than `max_admissions` wait before it; the first that cannot enter bars the waiting ones
behind it. Running requests keep their pages as long as the holders up to them fit. Rows: residents in order; who lacks
one token takes a decode row, who lacks more takes as many chunk rows as it needs and the bucket has left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jbatch.config import Bucket, EngineConfig
from jbatch.core.state import NO_SLOT, Phase, Wait


@dataclass
class Slot:
    """What the rules know of a slot."""

    index: int
    phase: Phase
    priority: int
    arrival: int
    length: int
    computed: int


@dataclass
class Plan:
    """What they decide."""

    residents: list[Slot] = field(default_factory=list)
    entered: list[Slot] = field(default_factory=list)
    preempted: list[Slot] = field(default_factory=list)
    barred: list[Slot] = field(default_factory=list)
    wait: dict[int, Wait] = field(default_factory=dict)
    lacks: dict[int, Wait] = field(default_factory=dict)  # what a barred slot lacks besides its turn to enter
    decode_rows: list[int] = field(default_factory=list)  # slot, shortest first
    chunk_rows: list[tuple[int, int, int]] = field(default_factory=list)  # slot, start, tokens
    advance: dict[int, int] = field(default_factory=dict)
    sample_row: dict[int, int] = field(default_factory=dict)
    pages: dict[int, int] = field(default_factory=dict)  # held while the step computes
    wanted: tuple[int, int, int] = (0, 0, 0)  # decodes, prefills and chunks, had the bucket no bounds


def pages_for(tokens: int, config: EngineConfig) -> int:
    return -(-tokens // config.page_size)


def schedule_by_loops(slots: list[Slot], config: EngineConfig, bucket: Bucket) -> Plan:
    order = sorted((s for s in slots if s.phase != Phase.FREE), key=lambda s: (s.priority, s.arrival))
    plan = Plan()
    _admit(plan, order, config)
    _keep(plan, order, config)
    _deal_rows(plan, config, bucket)
    for slot in plan.residents:
        computed = slot.computed if slot.phase == Phase.RUNNING else 0
        plan.pages[slot.index] = pages_for(computed + plan.advance[slot.index], config)
        plan.wait[slot.index] = Wait.NONE if plan.advance[slot.index] else Wait.ROWS
    return plan


def _admit(plan: Plan, order: list[Slot], config: EngineConfig) -> None:
    used = 0
    for place, slot in enumerate(order):
        used += pages_for(slot.length, config)
        if slot.phase != Phase.WAITING:
            continue
        has_turn, has_pages = place < config.max_running, used + place <= config.num_pages - 1
        waiting = len(plan.entered) + len(plan.barred)
        if has_turn and has_pages and waiting < config.max_admissions and not plan.barred:
            plan.entered.append(slot)
        else:
            plan.barred.append(slot)
            if waiting < config.max_admissions and not (has_turn and has_pages):
                plan.lacks[slot.index] = Wait.PAGES if has_turn else Wait.RUNNING_LIMIT


def _keep(plan: Plan, order: list[Slot], config: EngineConfig) -> None:
    """Walks on: who holds pages, and why the others do not."""
    used, full = 0, False
    reasons: set[Wait] = set()  # of this slot and those before it; lack of pages goes first
    for slot in order:
        if slot in plan.barred:
            reasons.update({plan.lacks[slot.index]} if slot.index in plan.lacks else ())
            known = [reason for reason in (Wait.PAGES, Wait.RUNNING_LIMIT) if reason in reasons]
            plan.wait[slot.index] = known[0] if known else Wait.ADMISSIONS
            continue
        used += pages_for(slot.length, config)
        short_of_pages = used > config.num_pages - 1
        short_of_places = len(plan.residents) == config.max_running
        if not (full or short_of_pages or short_of_places):
            plan.residents.append(slot)
            continue
        if not short_of_places:
            reasons.add(Wait.PAGES)
        full = True
        plan.preempted.append(slot)
        plan.wait[slot.index] = Wait.PAGES if Wait.PAGES in reasons else Wait.RUNNING_LIMIT


def _deal_rows(plan: Plan, config: EngineConfig, bucket: Bucket) -> None:
    size = config.chunk_size
    decodes = prefills = chunks = 0
    taken: list[Slot] = []
    for slot in plan.residents:
        computed = slot.computed if slot.phase == Phase.RUNNING else 0
        plan.advance[slot.index] = 0
        if slot.length - computed == 1:
            decodes += 1
            if len(taken) < bucket.decode:
                taken.append(slot)
                plan.advance[slot.index] = 1
            continue
        prefills += 1
        for start in range(computed, slot.length, size):
            chunks += 1
            if len(plan.chunk_rows) == bucket.chunks:
                continue
            tokens = min(size, slot.length - start)
            if start + tokens == slot.length:
                plan.sample_row[slot.index] = bucket.decode + len(plan.chunk_rows)
            plan.chunk_rows.append((slot.index, start, tokens))
            plan.advance[slot.index] += tokens
    plan.wanted = decodes, prefills, chunks
    taken.sort(key=lambda slot: slot.length)  # stable; idle rows, of no length, come before them
    plan.decode_rows = [NO_SLOT] * (bucket.decode - len(taken)) + [slot.index for slot in taken]
    plan.sample_row |= {slot: row for row, slot in enumerate(plan.decode_rows) if slot != NO_SLOT}
