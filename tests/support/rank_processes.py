"""Models divided among processes on the CPU, and their replies to a few prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.session.load import LoadedModel, load_model
from support.driving import ask, run_all, submit
from support.rank_failures import is_alive, processes_of

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time")
GROWTH_LIMIT_KB = 6 * 1024
"""Growth of a process from the second tenth of many jobs to the last: pages of the heap that differ
by chance. A leak of a batch's tensors in every pass would be some hundred MB."""


@contextmanager
def loaded_ranks(path: Path, count: int = 2, **changes: Any) -> Iterator[LoadedModel]:
    """A model divided among processes. At the end none of them is left."""
    loaded = load_model(path, device="cpu", threads=2, tensor_parallel=count, **changes)
    processes = processes_of(loaded)
    try:
        assert len(processes) == count - 1
        yield loaded
    finally:
        loaded.unload()
        assert not any(map(is_alive, processes))
        assert not list(Path(tempfile.gettempdir()).glob("exl-ranks-*"))


def replies(loaded: LoadedModel, max_tokens: int) -> list[tuple[int, ...]]:
    engine = Engine(loaded.model, loaded.tokenizer, EngineOptions(max_batch=2))
    for number, prompt in enumerate(PROMPTS):
        ids = loaded.tokenizer.encode(prompt)
        submit(engine, ask(ids, max_tokens=max_tokens, request_id=str(number)))
    ends = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
    return [end.token_ids for end in sorted(ends, key=lambda end: end.request_id)]


def resident_kb(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(text.partition("VmRSS:")[2].split()[0])
