"""Long texts: lower bound on the number of tokens, cuts that keep the ids, quick refusal."""

from __future__ import annotations

import json
import threading
import time
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from exl_core.errors import ContextLengthError
from exl_core.tokenizer import long_text
from exl_core.tokenizer.base import ControlIds, Tokenizer
from exl_core.tokenizer.decoders import BYTE_LEVEL
from exl_core.tokenizer.hf_json import LibraryTokenizer, open_backend
from exl_core.tokenizer.long_text import Cuts, TokenLengths, cuts_of_marked_pieces
from exl_core.tokenizer.pre_tokenizers import PRE_TOKENIZERS, install
from exl_core.tokenizer.spm import SentencePieceTokenizer, open_processor, special_pieces
from exl_core.tokenizer.spm_proto import text_rules

MARK = "\u2581"
TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox does not.",
    "I'm sure that you're right: 1234 apples and 56 pears cost $7.89 in all.",
    "def f(x):\n    return x ** 2  # squares\n\n\nprint('a b\\nc')\n",
    "Ünïcödé wörds, naïve cafés and straße; Привет, мир! 你好 世界。",
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789",
] * 8
TEXT = st.text(alphabet="ab1AZ'st  \n\n.<|>\u0301é\u2581\u3000你\t") | st.lists(
    st.sampled_from(
        ["a b", "a\nb", " a", "1 2 3", "<|end|>", "  ", ".\n", "x's", "don't ", "\u0301"]
    )
).map("".join)
Rules = tuple[TokenLengths | None, Cuts | None]


def rules_of(tokenizer: Tokenizer) -> Rules:
    if isinstance(tokenizer, LibraryTokenizer):
        rules = tokenizer._rules
        return rules.lengths, rules.cuts
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer._token_lengths, tokenizer._cuts[tokenizer._adds_space]


def byte_level(pre: str) -> Backend:
    """Trained byte-level BPE with the pre-tokenizer of a model family."""
    backend = Backend(models.BPE(ignore_merges=PRE_TOKENIZERS[pre].whole_words))
    install(PRE_TOKENIZERS[pre], backend)
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    return backend


def marked(normalizer: object, words: object) -> Backend:
    """BPE over U+2581 with byte fallback."""
    trained = Backend(models.BPE())
    # Training splits words, so that no token contains a space after a letter.
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=["<unk>", "<|end|>"], show_progress=False
    )
    trained.train_from_iterator(TRAINING_TEXT, trainer)
    data = json.loads(trained.to_str())
    vocab = data["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    data["model"] |= {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    backend = Backend.from_str(json.dumps(data))
    backend.normalizer, backend.pre_tokenizer = normalizer, words  # type: ignore[assignment]
    return backend


def library_tokenizer(backend: Backend) -> Tokenizer:
    return LibraryTokenizer(backend, BYTE_LEVEL, ControlIds(), "test")


DISTINCT = {pre: name for name, pre in PRE_TOKENIZERS.items()}.values()
PREPEND = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
REPLACE = normalizers.Replace(" ", MARK)
AT_SPACES = pre_tokenizers.Split(" ", "merged_with_previous")
BACKENDS: dict[str, Callable[[], Backend]] = {
    **{f"byte level, {name}": partial(byte_level, name) for name in DISTINCT},
    "Llama 2": lambda: marked(PREPEND, None),
    "Gemma": lambda: marked(REPLACE, AT_SPACES),
    "Metaspace, always": lambda: marked(None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "Metaspace, first": lambda: marked(None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "Metaspace, never": lambda: marked(None, pre_tokenizers.Metaspace(prepend_scheme="never")),
}
PROCESSORS: dict[str, dict[str, object]] = {
    "BPE": {},
    "BPE without a space before": {"add_dummy_prefix": False},
    "BPE with tokens of several characters": {"user_defined_symbols": ["<x>", "  ", "\n\n"]},
}


def sentencepiece_tokenizer(model: bytes, *, prefixes_every_run: bool = True) -> Tokenizer:
    processor = open_processor(model, "test")
    return SentencePieceTokenizer(
        processor,
        ControlIds(),
        "test",
        special={**special_pieces(processor), "<|end|>": processor.get_piece_size()},
        added={},
        prefixes_every_run=prefixes_every_run,
    )


def check_parts_and_bound(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, cuts = rules_of(tokenizer)
    assert lengths is not None and cuts is not None
    num_cut = 0

    @settings(max_examples=200, deadline=None)
    @given(TEXT, st.booleans())
    def check(text: str, allow_special: bool) -> None:
        nonlocal num_cut
        whole = tokenizer.encode(text, allow_special=allow_special)
        assert lengths.lower_bound(text) <= len(whole)
        with monkeypatch.context() as patch:
            patch.setattr(long_text, "PART_CHARS", 3)
            patch.setattr(long_text, "_CHUNK_CHARS", 5)
            num_cut += len(list(cuts.parts(text))) > 1
            assert tokenizer.encode(text, allow_special=allow_special) == whole
            assert lengths.lower_bound(text) <= len(whole)

    check()
    assert num_cut > 20


@pytest.mark.parametrize("name", BACKENDS)
def test_ids_of_parts_equal_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parts_and_bound(library_tokenizer(BACKENDS[name]()), monkeypatch)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("prefixes_every_run", [True, False])
def test_ids_of_sentencepiece_parts_equal_those_of_the_whole(
    train_sentencepiece: Callable[..., bytes],
    name: str,
    prefixes_every_run: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters = "".join(chr(code) for code in range(128) if chr(code).isalnum())
    options = {"vocab_size": 420, "required_chars": letters, **PROCESSORS[name]}
    model = train_sentencepiece("bpe", **options)
    tokenizer = sentencepiece_tokenizer(model, prefixes_every_run=prefixes_every_run)
    check_parts_and_bound(tokenizer, monkeypatch)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_ids_of_parts_equal_those_of_the_whole_in_real_models(
    model: str,
    request: pytest.FixtureRequest,
    awkward_texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{model}_tokenizer")
    whole = [tokenizer.encode(text, allow_special=True) for text in awkward_texts]
    lengths, _ = rules_of(tokenizer)
    assert lengths is not None
    monkeypatch.setattr(long_text, "PART_CHARS", 4)
    for text, ids in zip(awkward_texts, whole, strict=True):
        assert tokenizer.encode(text, allow_special=True) == ids
        assert lengths.lower_bound(text) <= len(ids)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_bound_holds_for_the_longest_tokens(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{model}_tokenizer")
    lengths, _ = rules_of(tokenizer)
    assert lengths is not None
    ids = range(tokenizer.vocab_size)
    texts = sorted((tokenizer.token_text(i) for i in ids if tokenizer.has_token(i)), key=len)
    for text in texts[-500:]:
        repeated = text * 50
        found = lengths.lower_bound(repeated)
        assert found <= len(tokenizer.encode(repeated, allow_special=True))
    assert found > 20, "the bound is of use"


def test_nfc_shrinks_no_character_more_than_the_bound_allows() -> None:
    shrinkage = 0.0
    for number in range(0x30000):  # of the later characters none has a decomposition
        char = chr(number)
        if unicodedata.category(char) == "Cs":
            continue
        composed = unicodedata.normalize("NFC", char).encode()
        decomposed = unicodedata.normalize("NFD", char).encode()
        longest = max(len(char.encode()), len(decomposed))
        shrinkage = max(shrinkage, longest / len(composed))
    assert shrinkage <= 3 < long_text._MAX_COMPOSITION


def with_added(backend: Backend, token: AddedToken) -> Backend:
    backend.add_tokens([token])
    return backend


def with_words(words: pre_tokenizers.PreTokenizer) -> Backend:
    backend = byte_level("gpt-2")
    backend.pre_tokenizer = words
    return backend


@pytest.mark.parametrize(
    "make",
    [
        lambda: with_words(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda: with_words(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        lambda: with_words(
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split("b c", "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        ),
        lambda: with_added(byte_level("gpt-2"), AddedToken("a b", normalized=False)),
        lambda: with_added(byte_level("gpt-2"), AddedToken("b", normalized=False, lstrip=True)),
        lambda: with_added(marked(PREPEND, None), AddedToken("x1", normalized=False)),
    ],
    ids=["prefix", "no words", "unknown pattern", "spanning token", "lstrip", "marked"],
)
def test_no_cuts_for_steps_without_a_proof(make: Callable[[], Backend]) -> None:
    assert rules_of(library_tokenizer(make()))[1] is None


@pytest.mark.parametrize(
    ("pieces", "adds_space", "expected"),
    [
        ([], False, Cuts(newlines=False)),
        ([], True, Cuts(newlines=False, drops_space=True)),
        (["\n"], False, Cuts(newlines=True)),
        (["\n"], True, Cuts(newlines=False, drops_space=True)),
        (["\n", "a\n"], False, Cuts(newlines=False)),
        ([f"a{MARK}b"], False, None),
    ],
)
def test_pieces_that_cross_a_cut_disable_it(
    pieces: list[str], adds_space: bool, expected: Cuts | None
) -> None:
    letters = [chr(code) for code in range(128) if chr(code).isalnum()]
    assert cuts_of_marked_pieces({*letters, MARK, *pieces}, adds_space=adds_space) == expected
    assert cuts_of_marked_pieces({*letters[1:], MARK}, adds_space=adds_space) is None


def test_unknown_steps_have_no_bound() -> None:
    removing = with_words(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    )
    lowering = byte_level("gpt-2")
    lowering.normalizer = normalizers.Lowercase()
    words = Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    for backend in (removing, lowering, words):
        assert rules_of(library_tokenizer(backend)) == (None, None)


def test_spaces_absorbed_by_added_tokens_do_not_count() -> None:
    backend = byte_level("gpt-2")
    token = AddedToken("<|x|>", normalized=False, lstrip=True, rstrip=True, special=True)
    backend.add_special_tokens([token])
    tokenizer = library_tokenizer(backend)
    lengths, _ = rules_of(tokenizer)
    assert lengths is not None
    text = f"{' ' * 5000}<|x|>{' ' * 5000}"
    assert len(tokenizer.encode(text, allow_special=True)) == 1
    assert lengths.lower_bound(text) <= 1


def test_characters_without_a_token_do_not_count(smollm2_tokenizer: Tokenizer) -> None:
    lengths, _ = rules_of(smollm2_tokenizer)
    assert lengths is not None
    text = "\x16" * 10_000
    assert smollm2_tokenizer.encode(text) == [] and lengths.lower_bound(text) == 0


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_settings_are_read_from_a_sentencepiece_model(
    train_sentencepiece: Callable[..., bytes], kind: str
) -> None:
    plain = text_rules(train_sentencepiece(kind))
    assert plain.is_bpe == (kind == "bpe") and plain.escapes_spaces
    assert not (plain.has_charsmap or plain.removes_extra_spaces or plain.puts_spaces_behind)
    folded = train_sentencepiece(
        kind, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True
    )
    assert text_rules(folded).has_charsmap and text_rules(folded).removes_extra_spaces
    assert rules_of(sentencepiece_tokenizer(folded)) == (None, None)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_a_text_of_exactly_max_tokens_is_encoded(
    model: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{model}_tokenizer")
    for text in ("a b c", "word " * 20_000, "\n" * 100_000):
        ids = tokenizer.encode(text, add_bos=True)
        assert tokenizer.encode(text, add_bos=True, max_tokens=len(ids)) == ids
        with pytest.raises(ContextLengthError) as caught:
            tokenizer.encode(text, add_bos=True, max_tokens=len(ids) - 1)
        assert caught.value.max_tokens < caught.value.num_tokens <= len(ids)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.parametrize("text", ["word and word ", "a", "你好", "<"])
def test_eight_megabytes_are_refused_without_being_tokenized(
    model: str, text: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{model}_tokenizer")
    long = text * (8_000_000 // len(text.encode()))
    rules_of(tokenizer)
    started = time.thread_time()
    with pytest.raises(ContextLengthError):
        tokenizer.encode(long, allow_special=True, max_tokens=8192)
    assert time.thread_time() - started < 0.5


def test_encoding_a_long_text_does_not_hold_the_gil(
    smollm2_tokenizer: Tokenizer, wikitext_path: Path
) -> None:
    """The library's `encode` would hold the GIL for the whole call."""
    text = wikitext_path.read_text(encoding="utf-8")
    gaps: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watching = threading.Thread(target=watch)
    watching.start()
    started = time.perf_counter()
    smollm2_tokenizer.encode(text)
    elapsed = time.perf_counter() - started
    is_over.set()
    watching.join()
    assert max(gaps) < elapsed / 3


def test_rules_survive_writing_and_reading_tokenizer_json(
    write_directory: Callable[..., Path],
) -> None:
    """A saved `tokenizer.json` has the same rules as the objects that it was written from."""
    for make in BACKENDS.values():
        backend = make()
        path = write_directory({"tokenizer.json": backend.to_str()}) / "tokenizer.json"
        again = rules_of(library_tokenizer(open_backend(path)))
        assert again[1] == rules_of(library_tokenizer(backend))[1] is not None
