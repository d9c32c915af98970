"""Hypothesis profiles: how many examples a property test tries.

`default` tries a fifth of the full number; `thorough` (`nox -s thorough`) tries all of them.
Neither fails a test for being slow: the machine may be loaded.
"""

from __future__ import annotations

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
    return full * settings.default.max_examples // FULL
