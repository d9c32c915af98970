"""What one rendering of a chat template may use: steps, characters, size of a value, and time.

A template is a program from a stranger, so it can loop for days and fill the memory without writing
a line. Its environment (`sandbox.py`) reports each turn of a loop, each call, operation and filter,
and each value that one of them makes. Lists may share their elements, and a few dozen lists of two
can stand for more elements than there are atoms; so a value is weighed with all that it holds, each
time it occurs. Knows no jinja2 beyond the error that a template may be refused with.

The clock is the last resort: it stops what is slow without being large, between two steps.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain

# No conversation comes near these; a template that needs more is broken or hostile.
MAX_STEPS = 2_000_000
MAX_WEIGHT = 16 * 2**20  # of one value: its characters, and ITEM_WEIGHT for each element
MAX_MADE = 512 * 2**20  # of all values that were made, each counted once
MAX_INT_BITS = 4096
MAX_WIDTH = 10_000  # of a padded or indented field
MAX_SECONDS = 20.0

ITEM_WEIGHT = 16  # near the bytes of an element, so that a list weighs as much as its memory
_SIZED = (list, tuple, Set, KeysView, ValuesView, ItemsView, Mapping)


class Budget:
    """The use so far, against the limits."""

    def __init__(self) -> None:
        self.steps = 0
        self.made_weight = 0
        self.deadline = time.monotonic() + MAX_SECONDS
        # By identity, with the value, so that the identity stays its own. What a template can hold
        # does not change: the sandbox is immutable and a namespace weighs nothing.
        self._weights: dict[int, tuple[int, object]] = {}

    def step(self, cost: int = 0) -> None:
        """One turn, which writes up to `cost` characters."""
        self.steps += 1
        self.made_weight += cost
        if self.steps > MAX_STEPS:
            raise refusal(f"takes more than {MAX_STEPS} steps")
        if self.made_weight > MAX_MADE:
            raise refusal(f"makes more than {MAX_MADE} characters on its way")
        if time.monotonic() > self.deadline:
            raise refusal(f"takes longer than {MAX_SECONDS:.0f} s")

    def made(self, value: object) -> object:
        """The value, which must not be too large."""
        self.step()
        if isinstance(value, str | bytes):
            self.expect(len(value))
            self.made_weight += len(value)
        elif isinstance(value, int):
            check_bits(value.bit_length())
        elif isinstance(value, _SIZED):
            self.expect(self.weigh(value))
            self.made_weight += ITEM_WEIGHT * len(value)  # the elements were there already
        return value

    def expect(self, weight: float) -> None:
        """Refuses a value of this weight before it is made."""
        if weight > MAX_WEIGHT:
            raise refusal("builds a value that is too large")

    def weigh(self, value: object) -> int:
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, Mapping):
            parts: Iterable[object] = chain(value.keys(), value.values())
        elif isinstance(value, _SIZED):
            parts = value
        else:
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[0]
        weight = ITEM_WEIGHT
        for part in parts:
            weight += ITEM_WEIGHT + (len(part) if isinstance(part, str) else self.weigh(part))
            self.expect(weight)
        self._weights[id(value)] = (weight, value)
        return weight

    def know(self, value: object, weight: int) -> None:
        """That a list just made weighs this, so that a list which grows is not weighed each time"""
        self._weights[id(value)] = (weight, value)


_current: ContextVar[Budget] = ContextVar("_current")


@contextmanager
def new_budget() -> Iterator[Budget]:
    """A budget for the work inside; `current_budget` finds it."""
    budget = Budget()
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)


def current_budget() -> Budget:
    return _current.get()


def check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise refusal(f"computes a number of more than {MAX_INT_BITS} bits")


def check_width(width: object) -> None:
    """Of a field or an indent: a number of spaces, or the text to indent with."""
    size = len(width) if isinstance(width, str) else width
    if isinstance(size, int) and abs(size) > MAX_WIDTH:
        raise refusal(f"asks for a width of more than {MAX_WIDTH}")


def refusal(what: str) -> Exception:
    from jinja2.exceptions import SecurityError

    return SecurityError(f"the template {what}")
