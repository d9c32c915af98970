"""The real model that the generators are tried on."""

from __future__ import annotations

import pytest

from exl_core.load import LoadedModel, load_model
from support.real_models import smollm2_gguf


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model(str(smollm2_gguf()))
