"""Vocabularies for the tests of constraints."""

from __future__ import annotations

import pytest

from exl_core.constrain.vocabulary import Vocabulary
from support.constraints import vocabularies


@pytest.fixture(scope="session", params=["bytes", "made"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return vocabularies()[request.param]
