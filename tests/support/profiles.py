"""How much of a test runs by default, and how much in `nox -s thorough` only.

A property test tries as many examples as its Hypothesis profile says: `default` a fifth of the full
number, `thorough` all of them. Neither fails a test for being slow: the machine may be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

FULL = 100  # Hypothesis' own default


def register() -> None:
    """Makes both profiles known and selects `default`, unless `--hypothesis-profile` names one."""
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("default", patient, max_examples=FULL // 5)
    settings.register_profile("thorough", patient, max_examples=FULL)
    settings.load_profile("default")


def examples(full: int) -> int:
    """`max_examples` of a test that tries `full` examples in the profile `thorough`.

    Read it while a test module is imported or while a test runs: by then the profile is selected.
    """
    assert settings.default is not None
    return full * settings.default.max_examples // FULL


def first_by_default(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Parameters of a test: the first `count` run by default, the others are thorough.

    A tuple holds the values of several arguments.
    """
    return [
        value
        if i < count
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough
        )
        for i, value in enumerate(values)
    ]
