"""Tokenizers of two real models, compared with ids of other programs (data/README.md)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core.errors import RequestError
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.detect import load_tokenizer
from support.profiles import examples

SPACE_MARK = "\u2581"
SPLIT = "\u2003"  # a character that takes several tokens in both vocabularies
# Bytes without a token in SmolLM2's vocabulary, because its training text had none. The original
# tokenizer drops them too. They are lead bytes of unassigned characters and control characters.
SMOLLM2_MISSING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
MODELS = ["smollm2", "gemma3"]
TEXT = st.one_of(
    st.text(max_size=60),
    st.text(alphabet=" \n\t<|>im_startendofur_0123é你🙂\u0301\u200d", max_size=60),
    st.lists(
        st.sampled_from(["<|im_start|>", "<bos>", "<start_of_turn>", "<unused7>", " a", "\n", "🙂"])
    ).map("".join),
)


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(name: str, request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    return found


def written_back(model: str, text: str) -> str:
    """Text after encoding and decoding, given the known losses of a model's vocabulary."""
    if model == "gemma3":
        return text.replace(SPACE_MARK, " ")
    kept = bytes(byte for byte in text.encode() if byte not in SMOLLM2_MISSING)
    return kept.decode("utf-8", errors="replace")


ReferenceIds = Callable[[str], list[tuple[list[int], list[int]]]]


def test_ids_match_independent_programs(
    name: str, tokenizer: Tokenizer, awkward_texts: list[str], reference_ids: ReferenceIds
) -> None:
    expected = reference_ids(name)
    assert len(expected) == len(awkward_texts) > 600
    wrong = [
        text
        for text, (plain, special) in zip(awkward_texts, expected, strict=True)
        if (tokenizer.encode(text), tokenizer.encode(text, allow_special=True)) != (plain, special)
    ]
    assert wrong == []


def test_special_token_text_is_text_unless_allowed(
    name: str, tokenizer: Tokenizer, awkward_texts: list[str], reference_ids: ReferenceIds
) -> None:
    special = set(tokenizer.special_tokens.values())
    for text, (plain, allowed) in zip(awkward_texts, reference_ids(name), strict=True):
        assert special.isdisjoint(tokenizer.encode(text))
        if plain != allowed:
            assert not special.isdisjoint(tokenizer.encode(text, allow_special=True))


def test_decode_round_trips(name: str, tokenizer: Tokenizer, awkward_texts: list[str]) -> None:
    """The exception is U+2581 in a SentencePiece vocabulary, which decodes to a space."""
    for text in awkward_texts:
        expected = text.replace(SPACE_MARK, " ") if name == "gemma3" else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected
        with_special = tokenizer.encode(text, allow_special=True)
        assert tokenizer.decode(with_special, skip_special=False) == expected


def test_sentencepiece_encodes_the_space_mark_as_a_space(
    gemma3_tokenizer: Tokenizer,
) -> None:
    assert gemma3_tokenizer.encode(f"a{SPACE_MARK}b") == gemma3_tokenizer.encode("a b")


def test_bytes_missing_from_smollm2_are_known(smollm2_tokenizer: Tokenizer) -> None:
    written = {smollm2_tokenizer.token_bytes(n) for n in range(smollm2_tokenizer.vocab_size)}
    assert {byte for byte in range(256) if bytes([byte]) not in written} == SMOLLM2_MISSING
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode("a\x16b")) == "ab"


def test_streamed_text_equals_decoded_text(tokenizer: Tokenizer, awkward_texts: list[str]) -> None:
    for text in awkward_texts:
        ids = tokenizer.encode(text, allow_special=True)
        for skip_special in (True, False):
            stream = tokenizer.stream_decoder(skip_special=skip_special)
            pieces = [stream.feed(number) for number in ids]
            assert "".join(pieces) + stream.flush() == tokenizer.decode(
                ids, skip_special=skip_special
            )


def test_a_stream_never_emits_incomplete_characters(tokenizer: Tokenizer) -> None:
    text = f"🦜{SPLIT}한"
    ids = tokenizer.encode(text)
    assert len(ids) > 3
    stream = tokenizer.stream_decoder()
    pieces = [stream.feed(number) for number in ids]
    assert "" in pieces
    assert "".join(pieces) == text
    assert stream.flush() == ""


def test_an_incomplete_character_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"x{SPLIT}")[:-1]
    stream = tokenizer.stream_decoder()
    assert stream.feed_all(ids) == "x"
    assert stream.flush() == "\ufffd"
    assert tokenizer.decode(ids) == "x\ufffd"


@pytest.mark.hypothesis
@pytest.mark.parametrize("model", MODELS)
def test_any_text_round_trips_without_special_tokens(
    model: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{model}_tokenizer")
    special = set(tokenizer.special_tokens.values())

    @settings(max_examples=examples(150))
    @given(TEXT)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        expected = written_back(model, text)
        assert tokenizer.decode(ids) == expected
        assert special.isdisjoint(ids)
        allowed = tokenizer.encode(text, allow_special=True)
        assert tokenizer.decode(allowed, skip_special=False) == expected

    check()


@pytest.mark.hypothesis
@pytest.mark.parametrize("model", MODELS)
def test_any_ids_stream_as_they_decode(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{model}_tokenizer")
    ids = st.integers(0, tokenizer.vocab_size + 5) | st.integers(0, 600)

    @settings(max_examples=examples(150))
    @given(st.lists(ids, max_size=40), st.booleans())
    def check(ids: list[int], skip_special: bool) -> None:
        stream = tokenizer.stream_decoder(skip_special=skip_special)
        text = "".join([stream.feed(number) for number in ids]) + stream.flush()
        assert text == tokenizer.decode(ids, skip_special=skip_special)
        joined = b"".join(tokenizer.token_bytes(n, skip_special=skip_special) for n in ids)
        assert text == joined.decode("utf-8", errors="replace")

    check()


def test_roles_and_sizes_of_smollm2(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    assert tokenizer.kind == "bpe"
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert (tokenizer.unk_id, tokenizer.pad_id) == (0, 2)
    assert not tokenizer.adds_bos
    assert not tokenizer.adds_eos
    assert tokenizer.encode("hi", add_bos=None) == tokenizer.encode("hi")
    assert tokenizer.encode("hi", add_bos=True) == [1, *tokenizer.encode("hi")]
    assert len(tokenizer.special_tokens) == 17
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(100)
    assert tokenizer.token_text(1) == "<|im_start|>"
    assert tokenizer.token_text(tokenizer.encode(" the")[0]) == " the"


def test_roles_and_sizes_of_gemma3(gemma3_tokenizer: Tokenizer) -> None:
    tokenizer = gemma3_tokenizer
    assert tokenizer.kind == "sentencepiece"
    assert tokenizer.vocab_size == 262144
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (2, (1,))
    assert (tokenizer.unk_id, tokenizer.pad_id) == (3, 0)
    assert tokenizer.adds_bos
    assert tokenizer.encode("hi", add_bos=None) == [2, *tokenizer.encode("hi")]
    assert tokenizer.encode("", add_bos=None) == [2]
    assert tokenizer.decode(tokenizer.encode(" hi", add_bos=None)) == " hi"
    assert tokenizer.token_text(2) == "<bos>"
    assert tokenizer.special_tokens["<end_of_turn>"] == 106


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b", "\udfff"])
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair at character"):
        tokenizer.encode(text)


def test_an_id_without_a_token_decodes_to_a_replacement(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 3]) == "\ufffd"
    with pytest.raises(RequestError, match="negative"):
        tokenizer.decode([-1])


def test_a_long_text_streams_in_linear_time(
    smollm2_tokenizer: Tokenizer, gemma3_tokenizer: Tokenizer
) -> None:
    """200,000 tokens take about a second. Decoding the whole text per token would take hours."""
    for tokenizer in (smollm2_tokenizer, gemma3_tokenizer):
        ids = tokenizer.encode("The cat, 猫 and 🐈. ") * 15_000
        stream = tokenizer.stream_decoder()
        started = time.perf_counter()
        text = stream.feed_all(ids)
        assert time.perf_counter() - started < 10
        assert text == "The cat, 猫 and 🐈. " * 15_000


def test_loading_is_quick_and_imports_no_torch(smollm2_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; started = time.perf_counter();"
        "from exl_core.tokenizer.detect import load_tokenizer;"
        "from exl_core.tokenizer.gguf_fields import read_gguf_fields;"
        "from exl_core.prompt.detect import load_template;"
        f"path = Path({str(smollm2_path)!r});"
        "load_tokenizer(path); load_template(path, read_gguf_fields(path));"
        "assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules;"
        "print(time.perf_counter() - started)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 4  # 0.25 s on an idle machine; the margin is for busy ones


@pytest.mark.thorough
def test_a_text_of_a_million_characters_round_trips(
    wikitext_path: Path, smollm2_path: Path
) -> None:
    text = wikitext_path.read_text(encoding="utf-8")
    tokenizer = load_tokenizer(smollm2_path)
    ids = tokenizer.encode(text)
    assert len(text) / 5 < len(ids) < len(text) / 3
    assert tokenizer.decode(ids) == text
