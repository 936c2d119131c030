"""Requests that wait on the host for a slot: bounded, in the order of the policy. Imports no jax."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jbatch.controls import Controls
from jbatch.request import DEFAULT_DEADLINE, QueueFullError, Request, Sink


@dataclass(frozen=True)
class Ticket:
    """A submitted request and where its outputs go. Ids count up, so they give the order of arrival."""

    id: int
    request: Request
    sink: Sink
    submitted: float = 0.0
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
        self._tickets: dict[int, Ticket] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._tickets)

    def tickets(self) -> list[Ticket]:
        """The tickets that wait, in order of arrival."""
        return list(self._tickets.values())

    def push(self, ticket: Ticket, retry_after: int) -> None:
        """Adds a ticket. Raises `QueueFullError`, with the hint given, when no more may wait."""
        if len(self) >= self._capacity:
            raise QueueFullError(len(self), retry_after)
        self._tickets[ticket.id] = ticket

    def take(self, count: int, controls: Controls, now: float, live: Callable[[str], int]) -> list[Ticket]:
        """Takes the first `count` tickets, or all there are.

        Args:
          controls: decide the order.
          now: the engine's time, in seconds.
          live: how many requests of a tenant have a slot.
        """
        if not count:
            return []
        if controls.policy == "fair":
            first = self._in_turns(count, live)
        else:
            first = heapq.nsmallest(count, self._tickets.values(), key=lambda ticket: _key(ticket, controls, now))
        for ticket in first:
            del self._tickets[ticket.id]
        return first

    def remove(self, id_: int) -> Ticket | None:
        """Takes out the ticket of that id; None where it does not wait here."""
        return self._tickets.pop(id_, None)

    def clear(self) -> list[Ticket]:
        """Takes out all tickets."""
        tickets, self._tickets = self.tickets(), {}
        return tickets

    def _in_turns(self, count: int, live: Callable[[str], int]) -> list[Ticket]:
        """Each time one of the tenant with fewest slots; of several such, of the one that came first."""
        queues: dict[str, deque[Ticket]] = {}
        for ticket in self._tickets.values():
            queues.setdefault(ticket.request.tenant, deque()).append(ticket)
        slots = {tenant: live(tenant) for tenant in queues}
        taken: list[Ticket] = []
        while queues and len(taken) < count:
            tenant = min(queues, key=lambda name: (slots[name], queues[name][0].id))
            taken.append(queues[tenant].popleft())
            slots[tenant] += 1
            if not queues[tenant]:
                del queues[tenant]
        return taken


def _key(ticket: Ticket, controls: Controls, now: float) -> tuple[float, ...]:
    """Lower goes first. As `core.policies` has it, as far as the host can tell."""
    request, period = ticket.request, ticket.submitted // controls.aging
    match controls.policy:
        case "priority":
            return request.priority + period, ticket.id
        case "edf":
            return ticket.due < now, ticket.due, ticket.id
        case "shortest":
            return period, len(request.prompt) + request.sampling.max_tokens, ticket.id
        case _:
            return (ticket.id,)
