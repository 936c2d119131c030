"""The host's queue against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jbatch.ingress import Ingress, Ticket
from jbatch.request import QueueFullError, Request


def ticket(id_: int, priority: int = 0) -> Ticket:
    return Ticket(id_, Request((1,), priority=priority), lambda outputs: None)


def test_lower_priority_value_first_then_arrival() -> None:
    ingress = Ingress(10)
    for id_, priority in enumerate([1, 0, 1, -1, 0]):
        ingress.push(ticket(id_, priority), 1)
    assert [ingress.pop().id for _ in range(5)] == [3, 1, 4, 0, 2]


def test_a_full_queue_refuses_with_the_hint() -> None:
    ingress = Ingress(2)
    ingress.push(ticket(1), 1)
    ingress.push(ticket(2), 1)
    with pytest.raises(QueueFullError, match="2 requests are waiting") as refused:
        ingress.push(ticket(3), 7)
    assert refused.value.retry_after == 7
    assert len(ingress) == 2
    ingress.remove(1)
    ingress.push(ticket(4), 1)
    assert [ingress.pop().id for _ in range(2)] == [2, 4]


def test_popping_from_an_empty_queue() -> None:
    ingress = Ingress(2)
    ingress.push(ticket(1), 1)
    ingress.remove(1)
    with pytest.raises(IndexError):
        ingress.pop()


def test_removed_tickets_do_not_pile_up() -> None:
    ingress = Ingress(10)
    ingress.push(ticket(0), 1)
    for id_ in range(1, 5000):
        ingress.push(ticket(id_), 1)
        assert ingress.remove(id_) is not None
        assert ingress.remove(id_) is None
    assert len(ingress._heap) < 100
    assert ingress.pop().id == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "remove"]), st.integers(0, 60)), max_size=150))
def test_any_sequence_equals_a_sorted_list(actions: list[tuple[str, int]]) -> None:
    ingress, model, next_id = Ingress(20), [], 0
    for action, number in actions:
        if action == "push" and len(model) < 20:
            ingress.push(ticket(next_id, number % 3), 1)
            model = sorted([*model, (number % 3, next_id)])
            next_id += 1
        elif action == "pop" and model:
            assert ingress.pop().id == model.pop(0)[1]
        elif action == "remove":
            removed = ingress.remove(number)
            assert (removed is not None) == any(id_ == number for _, id_ in model)
            model = [entry for entry in model if entry[1] != number]
        assert len(ingress) == len(model) and bool(ingress) == bool(model)
        assert sorted(ingress.ids()) == sorted(id_ for _, id_ in model)
