"""The host's side of the slots: which request sits where, and what it has been told so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jbatch.core.inbox import Placement
from jbatch.core.outbox import OutboxView
from jbatch.core.state import MAX_PROGRAMS, MAX_TENANTS, NO_PROGRAM, Finish
from jbatch.ingress import Ticket
from jbatch.names import Names
from jbatch.request import FinishReason, Output, Sink

_REASONS: dict[int, FinishReason | None] = {
    Finish.NONE: None,
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
}


class Mail:
    """Outputs of one step, gathered by sink so that each sink is called once."""

    def __init__(self) -> None:
        self._by_sink: dict[int, tuple[Sink, list[Output]]] = {}

    def add(
        self, ticket: Ticket, token: int | None, logprob: float, finish: FinishReason | None, cached: int = 0
    ) -> None:
        """Adds one output."""
        _, outputs = self._by_sink.setdefault(id(ticket.sink), (ticket.sink, []))
        outputs.append(Output(ticket.id, token, logprob, finish, cached))

    def deliver(self, report: Callable[[str], None]) -> None:
        """Calls every sink. One that raises, against its contract, is reported and costs only its own outputs."""
        for sink, outputs in self._by_sink.values():
            try:
                sink(outputs)
            except Exception as error:
                report(f"a sink failed ({type(error).__name__}: {error})".splitlines()[0])


@dataclass
class Residents:
    """Requests in slots. A slot is reused only after the host has read that it is free on the device."""

    tickets: dict[int, Ticket]  # by slot
    slots: dict[int, int]  # by request id
    free: list[int]
    left: np.ndarray  # [R] int32, tokens the request may still generate
    tenants: Names
    programs: Names

    @classmethod
    def empty(cls, num_slots: int) -> Residents:
        """No requests."""
        left = np.zeros(num_slots, np.int32)
        return cls({}, {}, list(range(num_slots))[::-1], left, Names(MAX_TENANTS), Names(MAX_PROGRAMS))

    def __len__(self) -> int:
        return len(self.tickets)

    def place(self, ticket: Ticket) -> Placement:
        """Gives the ticket a free slot, and its tenant and program a number; the rest of the placement is open."""
        slot, request = self.free.pop(), ticket.request
        self.tickets[slot] = ticket
        self.slots[ticket.id] = slot
        self.left[slot] = request.sampling.max_tokens
        tenant, new_tenant = self.tenants.enter(request.tenant)
        program, new_program = NO_PROGRAM, False
        if request.program:
            program, new_program = self.programs.enter((request.tenant, request.program))
        return Placement(
            slot=slot,
            arrival=ticket.id,
            limit=len(request.prompt) + request.sampling.max_tokens,
            submitted=ticket.submitted,
            due=ticket.due,
            tenant=tenant,
            program=program,
            new_tenant=new_tenant,
            new_program=new_program,
        )

    def tokens_left(self) -> np.ndarray:
        """How many tokens each request may still generate, [M] int32."""
        return self.left[list(self.tickets)]

    def settle(self, outbox: OutboxView, cancelled: list[int], mail: Mail) -> None:
        """Takes in one step's news and the ids its inbox cancelled."""
        news = outbox.news()
        self.left[news] -= 1
        columns = (outbox.column(name)[news].tolist() for name in ("token", "logprob", "finish", "cached"))
        for slot, token, logprob, finish, cached in zip(news.tolist(), *columns, strict=True):
            mail.add(self.tickets[slot], token, logprob, _REASONS[finish], cached)
            if finish != Finish.NONE:
                self._remove(slot)
        for id_ in cancelled:
            if id_ in self.slots:  # it may have finished in the step before
                mail.add(self._remove(self.slots[id_]), None, 0.0, "cancelled")

    def end_all(self, finish: FinishReason, mail: Mail) -> None:
        """Ends every request."""
        for slot in list(self.tickets):
            mail.add(self._remove(slot), None, 0.0, finish)

    def _remove(self, slot: int) -> Ticket:
        ticket = self.tickets.pop(slot)
        del self.slots[ticket.id]
        self.free.append(slot)
        request = ticket.request
        self.tenants.leave(request.tenant)
        if request.program:
            self.programs.leave((request.tenant, request.program))
        return ticket
