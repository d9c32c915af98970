"""A loaded model around a scripted one, for generators."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import SampledToken
from exl_core.load import LoadedModel
from exl_core.sampling.params import SamplerParams
from support.scripted import EOS_ID, ByteTokenizer, Rule, ScriptedModel, ScriptedShape

GREEDY = SamplerParams(temperature=0)
SMALL = EngineOptions(cache_tokens=1024)


@dataclass(frozen=True, slots=True)
class Shape(ScriptedShape):
    eos_ids: tuple[int, ...] = (EOS_ID,)


def loaded_around(rule: Rule, *, max_seq_len: int = 1024) -> LoadedModel:
    shape = Shape(max_seq_len=max_seq_len)
    return LoadedModel(
        name="scripted",
        path=Path("scripted"),
        config=cast(Any, shape),
        model=cast(Any, ScriptedModel(rule, shape)),
        tokenizer=ByteTokenizer(),
        template=None,
        weights_bytes=0,
        load_s=0.0,
    )


class Counter:
    """A hook that counts tokens and does something at one of them."""

    def __init__(self, at: int, action: Any) -> None:
        self.seen = 0
        self._at, self._action = at, action

    def __call__(self, token: SampledToken) -> None:
        self.seen += 1
        if self.seen == self._at:
            self._action()
