"""What a conversion says while it runs, as plain data; and how it is asked to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Stage(Enum):
    """In their order. CHECK reads the source before anything is computed; GATE compares the result
    with the source, on a text of its own."""

    CHECK = "check"
    CALIBRATE = "calibrate"
    SENSITIVITY = "sensitivity"
    MEASURE = "measure"
    QUANTIZE = "quantize"
    ENDS = "ends"
    TUNE = "tune"
    WRITE = "write"
    GATE = "gate"


@dataclass(frozen=True, slots=True)
class Event:
    """`kind`: `stage` when one begins, `step` while it goes on, `matrix` for each that has been
    quantized, `note` for what a user should know of. `facts` are JSON values, by `kind`."""

    kind: str
    stage: Stage
    done: int = 0
    total: int = 0
    facts: Mapping[str, object] = field(default_factory=dict)


OnEvent = Callable[[Event], None]


class ConversionStopped(BaseException):
    """It was asked to stop, and has: everything that is finished is on the disk."""
