"""Documents of random tokens under a JSON schema, checked with an independent validator.

No model takes part. Each token is drawn at random from the mask of a real tokenizer, with a
preference for tokens that end the document.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker
from numpy.typing import NDArray

from exl_core.constrain.filter_set import FilterSet
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.detect import load_tokenizer
from support.profiles import first_by_default
from support.real_models import smollm2_gguf
from support.schemas import SCHEMAS

DOCUMENTS = 10  # per schema
LONGEST = 400  # tokens; the longest of the 200 documents has 90
HURRY_AFTER = 60  # tokens, after which optional parts are avoided


class Writer:
    """Draws random documents. Kinds of tokens are boolean arrays over the vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        texts = vocabulary.token_bytes
        self.silent = np.array([not text for text in texts])
        self.delaying = np.array([bool(set(text) & set(b"{[ \t\r\n")) for text in texts])
        ending = np.array([len(t) < 3 and bool(set(t) & set(b'"}],')) for t in texts])
        self.closing = ending & ~self.delaying

    def write(self, constraint: JsonSchema, rng: random.Random) -> bytes:
        vocabulary = self.vocabulary
        filters = FilterSet([constraint.filter(vocabulary)], vocabulary.eos_ids, vocabulary)
        text = b""
        for written in range(LONGEST):
            if filters.is_finished:
                return text
            mask = filters.mask()
            assert mask is not None
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed = bits[: vocabulary.num_tokens].astype(bool)
            assert filters.is_complete == allowed[list(vocabulary.eos_ids)].any()
            if filters.is_complete and rng.random() < 0.3:
                return text
            token_id = self.draw(allowed & ~self.silent, written, rng)
            filters.accept(token_id)
            text += vocabulary.token_bytes[token_id]
        raise AssertionError(f"no end: {text.decode(errors='replace')}")

    def draw(self, allowed: NDArray[np.bool_], written: int, rng: random.Random) -> int:
        closing = allowed & self.closing
        if rng.random() < min(0.9, 0.3 + written / 100) and closing.any():
            return int(rng.choice(np.flatnonzero(closing)))
        prompt = allowed & ~self.delaying
        if written > HURRY_AFTER and prompt.any():
            allowed = prompt
        return int(rng.choice(np.flatnonzero(allowed)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2_gguf())


@pytest.fixture(scope="module")
def writer(tokenizer: Tokenizer) -> Writer:
    return Writer(Vocabulary(tokenizer, tokenizer.vocab_size))


@pytest.mark.parametrize("name", first_by_default(SCHEMAS, 8))
def test_random_replies_satisfy_the_schema(name: str, writer: Writer) -> None:
    schema = SCHEMAS[name]
    validator = Draft202012Validator(schema, format_checker=FormatChecker())
    validator.check_schema(schema)
    for number in range(DOCUMENTS):
        rng = random.Random(f"{name} {number}")
        constraint = JsonSchema(schema, compact=number % 2 == 1)
        document = json.loads(writer.write(constraint, rng))
        validator.validate(document)


@pytest.mark.parametrize("name", SCHEMAS)
def test_reserialized_documents_are_accepted(
    name: str, writer: Writer, tokenizer: Tokenizer
) -> None:
    """A random document, reserialized by Python and encoded by the tokenizer, is accepted."""
    rng = random.Random(name)
    constraint = JsonSchema(SCHEMAS[name])
    document = json.loads(writer.write(constraint, rng))
    layouts = (json.dumps(document, ensure_ascii=False), json.dumps(document, indent=2))
    for text in layouts[: 2 if layouts[0].isascii() else 1]:
        f = constraint.filter(writer.vocabulary)
        for token_id in tokenizer.encode(text):
            f.accept(token_id)
        assert f.is_complete
