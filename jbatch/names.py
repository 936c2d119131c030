"""Numbers for the names that requests bring along, such as tenants: few numbers, used again. Imports no jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Names:
    """Gives each name a number below `capacity` while one of its requests lives, and longer if there are enough.

    With more names alive than numbers, those that come last share the highest one.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._numbers: dict[Hashable, int] = {}  # least recently used first
        self._live: Counter[Hashable] = Counter()

    def live(self, name: Hashable) -> int:
        """How many requests of that name live."""
        return self._live[name]

    def enter(self, name: Hashable) -> tuple[int, bool]:
        """Counts a request of `name`; returns its number, and whether that is to be taken as fresh."""
        self._live[name] += 1
        if name in self._numbers:
            self._numbers[name] = self._numbers.pop(name)
            return self._numbers[name], False
        number = self._free_number()
        if number is None:
            return self._capacity - 1, False
        self._numbers[name] = number
        return number, True

    def leave(self, name: Hashable) -> None:
        """A request of `name` has ended."""
        self._live[name] -= 1
        if not self._live[name]:
            del self._live[name]

    def _free_number(self) -> int | None:
        """A number that no living request has; the name that had it is forgotten."""
        if len(self._numbers) < self._capacity - 1:
            return len(self._numbers)
        idle = next((name for name in self._numbers if name not in self._live), None)
        return None if idle is None else self._numbers.pop(idle)
