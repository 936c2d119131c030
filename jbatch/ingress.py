"""Requests that wait on the host for a slot: bounded, in the order of the policy. Imports no jax."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from jbatch.config import DEFAULT_DEADLINE
from jbatch.controls import Controls
from jbatch.request import QueueFullError, Request, Sink


@dataclass(frozen=True)
class Ticket:
    """A submitted request and where its outputs go. Ids count up, so they give the order of arrival."""

    id: int
    request: Request
    sink: Sink
    submitted: float = field(default=0.0)
    """In seconds of the engine's clock."""

    @property
    def due(self) -> float:
        """When its answer should have ended."""
        return self.submitted + (DEFAULT_DEADLINE if self.request.deadline is None else self.request.deadline)


class Ingress:
    """Goes by what the host knows of a policy's order; among the slots the scheduler has the last word.

    Not locked: the engine's lock covers it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._controls = Controls()
        self._tickets: dict[int, Ticket] = {}  # a heap entry without a ticket was removed
        self._heaps: dict[str, list[tuple[float, float, int]]] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def tickets(self) -> list[Ticket]:
        """The tickets that wait, in no order."""
        return list(self._tickets.values())

    def push(self, ticket: Ticket, retry_after: int) -> None:
        """Adds a ticket. Raises `QueueFullError`, with the hint given, when no more may wait."""
        if len(self) >= self._capacity:
            raise QueueFullError(len(self), retry_after)
        self._tickets[ticket.id] = ticket
        self._enter(ticket)

    def pop(self, controls: Controls, now: float, live: Callable[[str], int]) -> Ticket:
        """Takes the first ticket.

        Args:
          controls: decide the order.
          now: the engine's time, in seconds.
          live: how many requests of a tenant have a slot.

        Raises `IndexError` when none waits.
        """
        if (controls.policy, controls.aging) != (self._controls.policy, self._controls.aging):
            self._controls = controls
            self._rebuild()
        if controls.policy == "edf" and self._tickets:  # those that have missed their deadline go last
            first = min(self._tickets.values(), key=lambda ticket: (ticket.due < now, ticket.due, ticket.id))
            return self._tickets.pop(first.id)
        self._tidy()
        if controls.policy == "fair":  # whoever has fewest slots; of those, whoever came first
            heap = min(self._heaps.items(), key=lambda item: (live(item[0]), item[1][0]), default=("", []))[1]
        else:
            heap = self._heaps.get("", [])
        return self._tickets.pop(heapq.heappop(heap)[-1])

    def remove(self, id_: int) -> Ticket | None:
        """Takes out the ticket of that id; None where it does not wait here."""
        ticket = self._tickets.pop(id_, None)
        if ticket is not None and sum(map(len, self._heaps.values())) > 2 * len(self._tickets) + 64:
            self._rebuild()
        return ticket

    def _rebuild(self) -> None:
        self._heaps = {}
        for ticket in self._tickets.values():
            self._enter(ticket)

    def _enter(self, ticket: Ticket) -> None:
        group = ticket.request.tenant if self._controls.policy == "fair" else ""
        heapq.heappush(self._heaps.setdefault(group, []), (*self._key(ticket), ticket.id))

    def _tidy(self) -> None:
        """Drops entries of removed tickets from the tops of the heaps, and heaps that are empty."""
        for group, heap in list(self._heaps.items()):
            while heap and heap[0][-1] not in self._tickets:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[group]

    def _key(self, ticket: Ticket) -> tuple[float, float]:
        """Lower goes first; equal ones go by id. As `core.policies` has it, as far as the host can tell."""
        request, period = ticket.request, ticket.submitted // self._controls.aging
        match self._controls.policy:
            case "priority":
                return request.priority + period, 0
            case "shortest":
                return period, len(request.prompt) + request.sampling.max_tokens
            case _:
                return 0, 0
