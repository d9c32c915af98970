"""Constraints operate on bytes and therefore hold for every kind of tokenizer."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from exl_core.constrain.choice import OneOf
from exl_core.constrain.filter import Constraint
from exl_core.constrain.filter_set import FilterSet
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.regex import Regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.detect import load_tokenizer
from support.real_models import smollm2_gguf

TEXTS = ['{"name": "value", "list": [1, 2, 3]} yes no maybe, é ö ü ☕ 0123456789'] * 40
END = "<end>"


def byte_level_bpe(folder: Path) -> Path:
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return written(made, folder)


def unigram(folder: Path) -> Path:
    characters = sorted(set("".join(TEXTS)) - {" "})
    pieces = ["<unk>", END, "\u2581", "\u2581yes", "no", "\u2581may", "be", '{"', '":', *characters]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    made = Backend(models.Unigram([(p, -1.0) for p in pieces + bytes_], 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([END])
    return written(made, folder)


def sentencepiece_model(folder: Path) -> Path:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=out,
        model_type="bpe",
        vocab_size=310,
        character_coverage=1.0,
        byte_fallback=True,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    return folder


def gguf(_folder: Path) -> Path:
    return smollm2_gguf()


def written(made: Backend, folder: Path) -> Path:
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


@pytest.fixture(scope="module", params=[byte_level_bpe, unigram, sentencepiece_model, gguf])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    make: Callable[[Path], Path] = request.param
    return load_tokenizer(make(tmp_path_factory.mktemp("tokenizer")))


CONSTRAINTS: list[tuple[Constraint, set[str]]] = [
    (OneOf(["yes", "no", " maybe ☕"]), {"yes", "no", " maybe ☕"}),
    (Regex("(é|ö){1,2}[0-3]"), {f"{a}{b}{n}" for a in "éö" for b in ("", *"éö") for n in "0123"}),
    (
        JsonSchema({"enum": ["ö", {"name": [1, True]}]}, compact=True),
        {'"ö"', '{"name":[1,true]}'},
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("constraint", "expected"), CONSTRAINTS, ids=["one_of", "regex", "json"])
def test_decoded_replies_satisfy_the_constraint(
    tokenizer: Tokenizer, constraint: Constraint, expected: set[str]
) -> None:
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size + 70)
    assert vocabulary.eos_ids
    prompt = tokenizer.encode("yes")
    for seed in range(15):
        rng = random.Random(seed)
        filters = FilterSet([constraint.filter(vocabulary)], vocabulary.eos_ids, vocabulary)
        ids: list[int] = []
        while not filters.is_finished:
            mask = filters.mask()
            assert mask is not None
            ids.append(rng.choice(vocabulary.ids_of(mask)))
            filters.accept(ids[-1])
            if ids[-1] in vocabulary.eos_ids:
                break
        # The decoder has read a prompt, so that it keeps a space at the start of the reply.
        reply = tokenizer.decode(prompt + ids).removeprefix(tokenizer.decode(prompt))
        assert reply in expected


def test_texts_encoded_by_the_tokenizer_are_accepted(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size)
    for text in ("yes", "maybe ☕, ö", '{"name": "value"}'):
        f = Regex(r" ?[\s\S]{1,40}").filter(vocabulary)
        for token_id in tokenizer.encode(text):
            f.accept(token_id)
        assert f.is_complete
