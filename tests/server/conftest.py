"""A server with the default model, shared by all tests that only send requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exl_core.session.load import LoadedModel
from support.server import Running, running, runtime_of


@pytest.fixture(scope="session")
def server(smollm2: LoadedModel) -> Iterator[Running]:
    with running(runtime_of(smollm2, ctx_size=1024, max_batch=16, cache_tokens=16384)) as one:
        yield one
