"""The host's queue against a sorted list, under every policy."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jbatch.controls import POLICIES, Controls, Policy
from jbatch.ingress import Ingress, Ticket
from jbatch.request import QueueFullError, Request, SamplingParams

NOW = 100.0


def ticket(id_: int, priority: int = 0, submitted: float = 95.0, max_tokens: int = 16, **others: object) -> Ticket:
    request = Request((1,), SamplingParams(max_tokens=max_tokens), priority=priority, **others)
    return Ticket(id_, request, lambda outputs: None, submitted)


def pop(ingress: Ingress, policy: Policy = "priority", live: Counter[str] | None = None) -> int:
    slots = live if live is not None else Counter()
    [first] = ingress.take(1, Controls(policy=policy), NOW, lambda tenant: slots[tenant])
    return first.id


def test_lower_priority_value_first_then_arrival() -> None:
    ingress = Ingress(10)
    for id_, priority in enumerate([1, 0, 1, -1, 0]):
        ingress.push(ticket(id_, priority), 1)
    assert [pop(ingress) for _ in range(5)] == [3, 1, 4, 0, 2]


def test_to_have_come_a_period_earlier_counts_as_much_as_a_class() -> None:
    ingress = Ingress(10)
    ingress.push(ticket(1, priority=0, submitted=95.0), 1)
    ingress.push(ticket(0, priority=1, submitted=71.0), 1)
    assert [pop(ingress) for _ in range(2)] == [0, 1]


def test_the_tenant_with_fewest_slots_is_next_under_fair() -> None:
    ingress, live = Ingress(10), Counter({"flood": 1})
    for id_, tenant in enumerate(["flood", "flood", "flood", "quiet", "quiet"]):
        ingress.push(ticket(id_, tenant=tenant), 1)
    order = []
    for _ in range(5):
        order.append(pop(ingress, "fair", live))
        live["quiet" if order[-1] >= 3 else "flood"] += 1
    assert order == [3, 0, 4, 1, 2]


def test_who_has_missed_the_deadline_goes_last_under_edf() -> None:
    ingress = Ingress(10)
    for id_, deadline in enumerate([1.0, 9.0, 2.0, 6.0]):  # 1 and 2 seconds have passed
        ingress.push(ticket(id_, deadline=deadline), 1)
    assert [pop(ingress, "edf") for _ in range(4)] == [3, 1, 0, 2]


def test_a_removed_ticket_behind_a_late_one_does_no_harm() -> None:
    ingress = Ingress(10)
    for id_, deadline in enumerate([1.0, 50.0, 60.0]):
        ingress.push(ticket(id_, deadline=deadline), 1)
    ingress.remove(1)
    assert [pop(ingress, "edf") for _ in range(2)] == [2, 0]


def test_a_new_policy_orders_those_that_wait_anew() -> None:
    ingress = Ingress(10)
    for id_, tokens in enumerate([30, 10, 20, 5]):
        ingress.push(ticket(id_, max_tokens=tokens), 1)
    assert [pop(ingress, "fcfs"), pop(ingress, "shortest"), pop(ingress, "fcfs"), pop(ingress)] == [0, 3, 1, 2]


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
    assert [pop(ingress) for _ in range(2)] == [2, 4]


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_comes_from_an_empty_queue(policy: Policy) -> None:
    ingress = Ingress(2)
    ingress.push(ticket(1), 1)
    assert ingress.remove(1) is not None
    assert ingress.remove(1) is None
    assert ingress.take(3, Controls(policy=policy), NOW, lambda tenant: 0) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_many_at_once_are_those_one_by_one(policy: Policy) -> None:
    def fill() -> Ingress:
        ingress = Ingress(30)
        for id_ in range(20):
            ingress.push(ticket(id_, id_ % 3, deadline=1.0 + 7 * id_ % 13, tenant=str(id_ % 4)), 1)
        return ingress

    live, one_by_one, order = Counter({"2": 3}), fill(), []
    for _ in range(8):
        order.append(pop(one_by_one, policy, live))
        live[str(order[-1] % 4)] += 1
    at_once = fill()
    slots = Counter({"2": 3})
    taken = at_once.take(8, Controls(policy=policy), NOW, lambda tenant: slots[tenant])
    assert [waiting.id for waiting in taken] == order
    assert sorted(waiting.id for waiting in at_once.clear()) == sorted(set(range(20)) - set(order))
    assert not at_once


def key(waiting: Ticket, policy: Policy) -> tuple[float, ...]:
    """Its place in the order, lower first."""
    keys: dict[Policy, tuple[float, ...]] = {
        "priority": (waiting.request.priority + waiting.submitted // 10,),
        "shortest": (waiting.submitted // 10, waiting.request.sampling.max_tokens),
        "edf": (waiting.due < NOW, waiting.due),
    }
    return *keys.get(policy, ()), waiting.id


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "pop", "remove"]),
            st.integers(0, 60),
            st.sampled_from(["priority", "fcfs", "edf", "shortest", "prefix", "program"]),
        ),
        max_size=150,
    )
)
def test_any_sequence_equals_a_sorted_list(actions: list[tuple[str, int, Policy]]) -> None:
    ingress, model, next_id = Ingress(20), {}, 0
    for action, number, policy in actions:
        if action == "push" and len(model) < 20:
            model[next_id] = ticket(next_id, number % 3, 40.0 + number, 1 + number % 7, deadline=1.0 + 17 * number % 90)
            ingress.push(model[next_id], 1)
            next_id += 1
        elif action == "pop" and model:
            first = min(model.values(), key=lambda waiting: key(waiting, policy))
            assert pop(ingress, policy) == first.id
            del model[first.id]
        elif action == "remove":
            assert (ingress.remove(number) is not None) == (model.pop(number, None) is not None)
        assert len(ingress) == len(model) and bool(ingress) == bool(model)
        assert {waiting.id for waiting in ingress.tickets()} == set(model)
