"""Numbers for names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jbatch.names import Names


def test_a_name_keeps_its_number_and_is_fresh_once() -> None:
    names = Names(4)
    assert [names.enter("a"), names.enter("b"), names.enter("a")] == [(0, True), (1, True), (0, False)]
    names.leave("a")
    names.leave("a")
    assert names.enter("a") == (0, False)


def test_the_least_recently_used_idle_name_gives_its_number_away() -> None:
    names = Names(3)
    for name in ("a", "b", "a"):
        names.enter(name)
        names.leave(name)
    assert names.enter("c") == (1, True)
    assert names.enter("b") == (0, True)


def test_more_names_than_numbers_share() -> None:
    names = Names(3)
    assert [names.enter(str(i)) for i in range(5)] == [(0, True), (1, True), (2, False), (2, False), (2, False)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=200))
def test_no_two_living_names_share_while_there_are_enough(actions: list[tuple[bool, int]]) -> None:
    names, live = Names(5), {}
    for enters, which in actions:
        name = str(which)
        if enters and len(live.keys() | {name}) <= 4:
            number, fresh = names.enter(name)
            assert number == live.get(name, [number])[0]
            assert number not in [other[0] for key, other in live.items() if key != name]
            assert not (fresh and name in live)
            live.setdefault(name, []).append(number)
        elif not enters and name in live:
            names.leave(name)
            live[name].pop()
            if not live[name]:
                del live[name]
        assert names.live(name) == len(live.get(name, []))
