"""The scheduling rules once more, as plain loops over plain lists, written from their description alone.

Order: the policy's level; within a level those that run, the ones that would lose most first, then the preempted, then
the others by the policy's score; then arrival. Residency: walk that order and count pages of all known tokens. A
waiting request enters if it fits together with all before it and a page of growth for each of them, if fewer than the
limit stand before it, if fewer than `max_admissions` wait before it, and if the batch is open; the first that cannot
enter bars the waiting ones behind it. Running requests keep their pages as long as the holders up to them fit. Rows:
residents by level, score and arrival; who lacks one token takes a decode row, who lacks more takes as many chunk rows
as it needs and the bucket has left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jbatch.config import Bucket, EngineConfig
from jbatch.controls import Controls
from jbatch.core.state import NO_SLOT, Phase, Wait


@dataclass
class Slot:
    """What the rules know of a slot; times in seconds."""

    index: int
    phase: Phase
    priority: int
    arrival: int
    length: int
    computed: int
    limit: int = 0
    submitted: float = 0.0
    due: float = 0.0
    tenant: int = 0
    program: int = -1
    preempted: bool = False


@dataclass
class World:
    """What the rules know besides the slots."""

    controls: Controls
    now: float
    tenant_service: dict[int, int] = field(default_factory=dict)
    program_service: dict[int, int] = field(default_factory=dict)


@dataclass
class Plan:
    """What they decide."""

    residents: list[Slot] = field(default_factory=list)
    entered: list[Slot] = field(default_factory=list)
    preempted: list[Slot] = field(default_factory=list)
    barred: list[Slot] = field(default_factory=list)
    wait: dict[int, Wait] = field(default_factory=dict)
    decode_rows: list[int] = field(default_factory=list)  # slot, shortest first
    chunk_rows: list[tuple[int, int, int]] = field(default_factory=list)  # slot, start, tokens
    advance: dict[int, int] = field(default_factory=dict)
    sample_row: dict[int, int] = field(default_factory=dict)
    pages: dict[int, int] = field(default_factory=dict)  # held while the step computes
    wanted: tuple[int, int, int] = (0, 0, 0)  # decodes, prefills and chunks, had the bucket no bounds
    places: int = 0  # requests that could still enter


def pages_for(tokens: int, config: EngineConfig) -> int:
    return -(-tokens // config.page_size)


# ---- policies ----


def rank(slot: Slot, slots: list[Slot], world: World) -> tuple[int, int]:
    """Level and score, lower first."""
    period = int(slot.submitted // world.controls.aging)
    match world.controls.policy:
        case "fcfs":
            return 0, 0
        case "priority":
            return slot.priority + period, 0
        case "edf":
            left = round((slot.due - world.now) * 1000)
            return int(left <= 0 and slot.phase == Phase.WAITING), left
        case "shortest":
            return period, slot.limit - slot.computed
        case "prefix":  # nothing is cached here
            return period, 0
        case "program":
            alone = 2 * slot.length  # as if all of it had been generated
            return period, world.program_service.get(slot.program, alone).bit_length()
        case "fair":
            return _fair(slot, slots, world)


def _fair(slot: Slot, slots: list[Slot], world: World) -> tuple[int, int]:
    tenants = {other.tenant for other in slots}
    service = {tenant: world.tenant_service.get(tenant, 0) for tenant in tenants}
    mine = [other for other in slots if other.tenant == slot.tenant]
    mine.sort(key=lambda other: (other.phase != Phase.RUNNING, other.arrival))
    before = mine[: mine.index(slot)]
    share = max(1, sum(other.phase == Phase.RUNNING for other in slots) // len(tenants))
    favoured = len(before) < share and (slot.phase == Phase.RUNNING or service[slot.tenant] == min(service.values()))
    charged = sum(other.length for other in before if other.phase == Phase.WAITING)
    return -int(favoured), service[slot.tenant] + charged


def _gate(slots: list[Slot], world: World, config: EngineConfig) -> tuple[int, bool]:
    controls = world.controls
    waiting = [slot for slot in slots if slot.phase == Phase.WAITING]
    running = sum(slot.phase == Phase.RUNNING for slot in slots)
    limit, opened = min(controls.running_limit or config.max_running, config.max_running), running == 0
    match controls.batching:
        case "continuous":
            opened = True
        case "serial":
            limit = 1
        case "dynamic":
            oldest = max((world.now - slot.submitted for slot in waiting), default=0.0)
            opened &= len(waiting) >= controls.batch_size or round(oldest * 1000) >= round(controls.batch_delay * 1000)
        case "threshold":
            limit = limit if len(waiting) > controls.batch_threshold else 1
    return max(limit, running), opened


# ---- a step ----


def schedule_by_loops(slots: list[Slot], world: World, config: EngineConfig, bucket: Bucket) -> Plan:
    slots = [slot for slot in slots if slot.phase != Phase.FREE]
    ranks = {slot.index: rank(slot, slots, world) for slot in slots}

    def place(slot: Slot) -> tuple[int, ...]:
        level, score = ranks[slot.index]
        if slot.phase == Phase.RUNNING:
            return level, 0, -slot.computed, slot.arrival
        return level, 1 if slot.preempted else 2, score, slot.arrival

    order = sorted(slots, key=place)
    limit, opened = _gate(slots, world, config)
    plan = Plan()
    lacks = _admit(plan, order, limit, opened, config)
    used = _keep(plan, order, limit, config)
    _explain(plan, lacks, limit, opened, config.num_pages - 1 - used, config)
    if world.controls.policy == "edf":
        late = (slot.index for slot in plan.barred if ranks[slot.index][0] > 0)
        plan.wait |= dict.fromkeys(late, Wait.DEADLINE)
    plan.places = 0 if plan.barred or not opened else limit - len(plan.residents)
    plan.residents.sort(key=lambda slot: (*ranks[slot.index], slot.arrival))
    _deal_rows(plan, config, bucket)
    for slot in plan.residents:
        computed = slot.computed if slot.phase == Phase.RUNNING else 0
        plan.pages[slot.index] = pages_for(computed + plan.advance[slot.index], config)
        plan.wait[slot.index] = Wait.NONE if plan.advance[slot.index] else Wait.ROWS
    return plan


def _admit(plan: Plan, order: list[Slot], limit: int, opened: bool, config: EngineConfig) -> set[int]:
    """Who enters and who is barred; returns those of the latter who lack pages themselves."""
    used, lacks = 0, set()
    for place, slot in enumerate(order):
        used += pages_for(slot.length, config)
        if slot.phase != Phase.WAITING:
            continue
        has_pages = used + place <= config.num_pages - 1
        if has_pages and place < limit and opened and len(plan.entered) < config.max_admissions and not plan.barred:
            plan.entered.append(slot)
            continue
        plan.barred.append(slot)
        if not has_pages:
            lacks.add(slot.index)
    return lacks


def _keep(plan: Plan, order: list[Slot], limit: int, config: EngineConfig) -> int:
    """Walks on: who holds pages; returns how many those will want."""
    used, short = 0, False
    for slot in order:
        if slot in plan.barred:
            continue
        wanted = used + pages_for(slot.length, config)
        crowded = len(plan.residents) + len(plan.preempted) >= limit
        if not plan.preempted and not crowded and wanted <= config.num_pages - 1:
            plan.residents.append(slot)
            used = wanted
            continue
        short |= not crowded
        plan.preempted.append(slot)
        plan.wait[slot.index] = Wait.PAGES if short else Wait.RUNNING_LIMIT
    return used


def _explain(plan: Plan, lacks: set[int], limit: int, opened: bool, left: int, config: EngineConfig) -> None:
    """Why the barred wait; `left` pages are left over."""
    for place, slot in enumerate(plan.barred):
        looked_up = len(plan.entered) < config.max_admissions
        reason = Wait.POLICY if looked_up else Wait.ADMISSIONS
        if pages_for(slot.length, config) + 1 > left or (place == 0 and slot.index in lacks):
            reason = Wait.PAGES
        if len(plan.residents) >= limit:
            reason = Wait.RUNNING_LIMIT
        plan.wait[slot.index] = reason if opened else Wait.BATCHING


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
