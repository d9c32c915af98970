"""Events that a conversion reports, as plain data, and the exception that ends a stopped one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Stage(Enum):
    """Stages in order. CHECK reads the source before anything is computed. GATE compares the result
    with the source on a text that is not the calibration text."""

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
    """One report. `kind` is `resume` when an unfinished conversion goes on, `left_out` for a part
    of the source that is not converted, `stage` when a stage begins, `step` for its progress,
    `matrix` after a matrix was quantized, `gate` for the gate's result. `facts` are JSON values
    that depend on `kind`."""

    kind: str
    stage: Stage
    done: int = 0
    total: int = 0
    facts: Mapping[str, object] = field(default_factory=dict)


OnEvent = Callable[[Event], None]


class ConversionStopped(BaseException):
    """Raised once a conversion has stopped on request. All finished work is on the disk."""
