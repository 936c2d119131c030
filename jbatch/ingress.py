"""Requests that wait on the host for a slot: a bounded heap in scheduling order. Imports no jax."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from jbatch.request import QueueFullError, Request, Sink


@dataclass(frozen=True)
class Ticket:
    """A submitted request and where its outputs go. Ids count up, so they give the order of arrival."""

    id: int
    request: Request
    sink: Sink


class Ingress:
    """Lower priority value first, then arrival. Not locked: the engine's lock covers it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heap: list[tuple[int, int]] = []
        self._tickets: dict[int, Ticket] = {}  # a heap entry without a ticket was removed

    def __len__(self) -> int:
        return len(self._tickets)

    def ids(self) -> list[int]:
        """Ids of the tickets that wait."""
        return list(self._tickets)

    def push(self, ticket: Ticket, retry_after: int) -> None:
        """Adds a ticket. Raises `QueueFullError`, with the hint given, when no more may wait."""
        if len(self) >= self._capacity:
            raise QueueFullError(len(self), retry_after)
        self._tickets[ticket.id] = ticket
        heapq.heappush(self._heap, (ticket.request.priority, ticket.id))

    def pop(self) -> Ticket:
        """Takes the first ticket. Raises `IndexError` when none waits."""
        while True:
            _, id_ = heapq.heappop(self._heap)
            if id_ in self._tickets:
                return self._tickets.pop(id_)

    def remove(self, id_: int) -> Ticket | None:
        """Takes out the ticket of that id; None where it does not wait here."""
        ticket = self._tickets.pop(id_, None)
        if ticket is not None and len(self._heap) > 2 * len(self._tickets) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._tickets]
            heapq.heapify(self._heap)
        return ticket
