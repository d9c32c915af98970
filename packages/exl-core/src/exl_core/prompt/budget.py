"""Limits on rendering a chat template: steps, characters, size of a value, and time.

A template is an untrusted program: it can loop for days or fill the memory without writing any
text. Its environment (`sandbox.py`) reports every loop iteration, call, operation and filter to the
budget, and every value that they create. Lists can share their elements, so that a few dozen nested
lists of two stand for an astronomical number of elements. The weight of a value therefore counts
each occurrence of each element. This module uses jinja2 only for the error that refuses a template.

The time limit is checked between two steps. It stops templates that are slow without being large.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain

# No real conversation comes near these limits; a template that does is broken or hostile.
MAX_STEPS = 2_000_000
MAX_WEIGHT = 16 * 2**20  # of one value: its characters, plus ITEM_WEIGHT for each element
MAX_MADE = 512 * 2**20  # of all values that were created, each counted once
MAX_INT_BITS = 4096
MAX_WIDTH = 10_000  # of a padded or indented field
MAX_SECONDS = 20.0

ITEM_WEIGHT = 16  # about the bytes of an element, so that weight approximates memory
_SIZED = (list, tuple, Set, KeysView, ValuesView, ItemsView, Mapping)


class Budget:
    """Resources used so far by one rendering; raises past a limit."""

    def __init__(self) -> None:
        self.steps = 0
        self.made_weight = 0
        self.deadline = time.monotonic() + MAX_SECONDS
        # Weights by id. The value is kept too, so that its id is not reused. Cached weights stay
        # valid because the sandbox is immutable and a namespace weighs nothing.
        self._weights: dict[int, tuple[int, object]] = {}

    def step(self, cost: int = 0) -> None:
        """Count one step that writes up to `cost` characters."""
        self.steps += 1
        self.made_weight += cost
        if self.steps > MAX_STEPS:
            raise refusal(f"takes more than {MAX_STEPS} steps")
        if self.made_weight > MAX_MADE:
            raise refusal(f"makes more than {MAX_MADE} characters on its way")
        if time.monotonic() > self.deadline:
            raise refusal(f"takes longer than {MAX_SECONDS:.0f} s")

    def made(self, value: object) -> object:
        """Count a new value and return it; raises if it is too large."""
        self.step()
        if isinstance(value, str | bytes):
            self.expect(len(value))
            self.made_weight += len(value)
        elif isinstance(value, int):
            check_bits(value.bit_length())
        elif isinstance(value, _SIZED):
            self.expect(self.weigh(value))
            self.made_weight += ITEM_WEIGHT * len(value)  # its elements existed before
        return value

    def expect(self, weight: float) -> None:
        """Raise if a value of this weight would be too large, before it is created."""
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

    def set_weight(self, value: object, weight: int) -> None:
        """Set the weight of a new list, so that a growing list is not weighed again each time."""
        self._weights[id(value)] = (weight, value)


_current: ContextVar[Budget] = ContextVar("_current")


@contextmanager
def new_budget() -> Iterator[Budget]:
    """Budget of the `with` block; `current_budget` returns it."""
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
    """Raise if a field or an indent is too wide. `width` is a number or the indent's text."""
    size = len(width) if isinstance(width, str) else width
    if isinstance(size, int) and abs(size) > MAX_WIDTH:
        raise refusal(f"asks for a width of more than {MAX_WIDTH}")


def refusal(reason: str) -> Exception:
    from jinja2.exceptions import SecurityError

    return SecurityError(f"the template {reason}")
