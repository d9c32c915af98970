"""Filters of lm-format-enforcer and formatron, from the real packages, through the adapter.

Both packages import names of exllamav2, which small stand-ins provide here.
"""

from __future__ import annotations

import json
import random
import sys
import typing
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from exl_core.constrain.filter import Filter
from exl_core.constrain.foreign import Foreign
from exl_core.constrain.vocabulary import Vocabulary
from support.scripted import EOS_ID, ByteTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
VOCABULARY = Vocabulary(ByteTokenizer(), 288)
Make = Callable[[], object]


class OldTokenizer:
    """The part of exllamav2's tokenizer that the packages use: ASCII bytes are the pieces."""

    bos_token_id = pad_token_id = unk_token_id = None
    eos_token_id = EOS_ID
    actual_vocab_size = 288
    extended_id_to_piece: dict[int, str] = {}  # noqa: RUF012 - as in the class that it stands for

    def __init__(self) -> None:
        # Other ids get private characters, which no schema allows.
        self.pieces = [chr(i) if i < 128 else chr(0xE000 + i) for i in range(288)]
        self.tokenizer = self.tokenizer_model = SimpleNamespace(
            vocab={}, vocab_size=lambda: 288, id_to_piece=self.pieces.__getitem__
        )

    def get_id_to_piece_list(self) -> list[str]:
        return self.pieces

    def decode(self, ids: torch.Tensor) -> str:
        return "".join(self.pieces[i] for i in ids.flatten().tolist())


class OldFilter:
    def __init__(self, model: object, tokenizer: object) -> None:
        self.model, self.tokenizer, self.sequence_str = model, tokenizer, ""


@pytest.fixture
def old_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    names: dict[str, dict[str, object]] = {
        "exllamav2": {"ExLlamaV2Tokenizer": OldTokenizer, "ExLlamaV2": object},
        "exllamav2.generator": {},
        "exllamav2.generator.base": {"ExLlamaV2Filter": OldFilter},
    }
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    # formatron 0.5 reads names of the standard module from one of pydantic's own, which newer
    # versions of pydantic do not fill any more.
    monkeypatch.setitem(sys.modules, "pydantic.typing", typing)
    monkeypatch.setattr("pydantic.typing", typing, raising=False)
    yield
    for name in set(sys.modules) - before:
        if name.endswith("integrations.exllamav2"):
            del sys.modules[name]


def enforcer() -> object:
    from lmformatenforcer import JsonSchemaParser
    from lmformatenforcer.integrations.exllamav2 import ExLlamaV2TokenEnforcerFilter

    tokenizer: Any = OldTokenizer()
    return ExLlamaV2TokenEnforcerFilter(JsonSchemaParser(SCHEMA), tokenizer)


def formatron() -> object:
    from formatron.formatter import FormatterBuilder
    from formatron.integrations.exllamav2 import create_formatter_filter
    from formatron.integrations.utils import update_vocab_sentencepiece

    builder = FormatterBuilder()
    name, ok = builder.choose("Ada", "Bob"), builder.choose("true", "false")
    builder.append_str(f'{{"name": "{name}", "ok": {ok}}}')
    tokenizer: Any = OldTokenizer()
    model: Any = object()
    # An empty list of processors fails in formatron; this one has nothing to replace here.
    return create_formatter_filter(
        model, tokenizer, builder, vocab_processors=[update_vocab_sentencepiece]
    )


def written(filter_: Filter, seed: int, *, rewinds: bool = False) -> str:
    """A text of random allowed tokens; with `rewinds` some of them are taken back at times."""
    drawn, ids = random.Random(seed), list[int]()
    for step in range(400):
        mask = filter_.mask()
        assert mask is not None
        allowed = VOCABULARY.ids_of(mask)
        if EOS_ID in allowed:
            assert filter_.is_complete
            break
        printable = [i for i in allowed if chr(i).isprintable() and chr(i) != " "] or allowed
        ids.append(drawn.choice(printable))
        filter_.accept(ids[-1])
        if rewinds and step % 7 == 6:
            count = drawn.randint(1, 5)
            filter_.rewind(count)
            del ids[len(ids) - count :]
    return bytes(ids).decode()


@pytest.mark.usefixtures("old_names")
@pytest.mark.parametrize("make", [enforcer, formatron])
@pytest.mark.parametrize("rewinds", [False, True], ids=["forward", "rewinds"])
def test_replies_of_one_object_match_the_schema(make: Make, rewinds: bool) -> None:
    constraint = Foreign(make())
    texts = {written(constraint.filter(VOCABULARY), seed, rewinds=rewinds) for seed in range(6)}
    for text in texts:
        read = json.loads(text)
        assert read.keys() == {"name", "ok"}
        assert read["name"] in ("Ada", "Bob")
        assert isinstance(read["ok"], bool)
    assert len(texts) > 1


@pytest.mark.usefixtures("old_names")
@pytest.mark.parametrize("make", [enforcer, formatron])
def test_two_replies_at_once_do_not_disturb_each_other(make: Make) -> None:
    constraint = Foreign(make())
    one, two = constraint.filter(VOCABULARY), constraint.filter(VOCABULARY)
    for token in b'{"name"':
        one.accept(token)
    assert json.loads(written(two, seed=1))["name"] in ("Ada", "Bob")
    mask = one.mask()
    assert mask is not None
    assert ord(":") in VOCABULARY.ids_of(mask)
