"""`tokenizer.json`: ids, special and added tokens, decoders, compared with the library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from exl_core.errors import ContextLengthError, RequestError, TokenizerError
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.decoders import byte_alphabet, piece_rule
from exl_core.tokenizer.detect import load_tokenizer
from support.profiles import examples

WriteDirectory = Callable[..., Path]
MARK = "\u2581"
SPM_DECODER = [
    decoders.Replace(MARK, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


@pytest.fixture
def byte_level(
    write_directory: WriteDirectory, byte_level_backend: Callable[[], Backend]
) -> Tokenizer:
    config = {"eos_token": "<|end|>", "bos_token": None}
    files = {"tokenizer.json": byte_level_backend().to_str(), "tokenizer_config.json": config}
    return load_tokenizer(write_directory(files))


@pytest.mark.parametrize("text", [None, 5, b"ab", ["ab"]], ids=repr)
@pytest.mark.parametrize("max_tokens", [None, 4])
def test_only_texts_are_encoded(byte_level: Tokenizer, text: Any, max_tokens: int | None) -> None:
    with pytest.raises(RequestError, match=r"the text has the wrong type .*expected a str, got"):
        byte_level.encode(text, max_tokens=max_tokens)


@pytest.mark.parametrize("ids", [None, 5, "x", ["x"], [1.5], [[1, 2]]], ids=repr)
def test_only_ids_are_decoded(byte_level: Tokenizer, ids: Any) -> None:
    with pytest.raises(RequestError, match=r"ids has the wrong type .*a list of token ids"):
        byte_level.decode(ids)


def test_ids_of_tensors_and_arrays_are_decoded_as_those_of_lists(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("ab"), *byte_level.eos_ids]
    assert byte_level.decode(ids) == "ab"
    for given_ids in (torch.tensor(ids), torch.tensor(ids).numpy(), iter(ids)):
        assert byte_level.decode(given_ids) == "ab"


def unigram_backend() -> Backend:
    """Unigram vocabulary that contains its special tokens beside ordinary pieces, like T5's."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<x>", 0.0)]
    pieces += [(MARK, -2.0), ("a", -3.0), ("b", -3.0), ("ab", -2.5), ("<", -4.0), (">", -4.0)]
    pieces += [("/", -4.0), ("s", -4.0), ("x", -4.0)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["</s>", "<x>"])
    return backend


def llama_style_backend() -> Backend:
    """BPE over U+2581 with byte fallback and a space before the text, like Llama 2's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [MARK, "h", "i", "hi", MARK + "hi", "é"]
    backend = Backend(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[("h", "i"), (MARK, "hi")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    )
    backend.decoder = decoders.Sequence(SPM_DECODER)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return backend


def test_ids_and_text_are_those_of_the_library(
    byte_level: Tokenizer, byte_level_backend: Callable[[], Backend], awkward_texts: list[str]
) -> None:
    library = byte_level_backend()
    library.encode_special_tokens = True
    assert byte_level.kind == "bpe"
    for text in awkward_texts:
        ids = byte_level.encode(text)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert byte_level.decode(ids) == text


def test_special_tokens_are_text_unless_allowed(byte_level: Tokenizer) -> None:
    text = "<|user|>hi<|end|>"
    ids = byte_level.encode(text, allow_special=True)
    assert (ids[0], ids[-1]) == (1, 0)
    assert byte_level.decode(ids) == "hi"
    assert byte_level.decode(ids, skip_special=False) == text
    plain = byte_level.encode(text)
    assert {0, 1}.isdisjoint(plain)
    assert byte_level.decode(plain) == text
    assert byte_level.eos_ids == (0,)
    assert byte_level.bos_id is None
    assert not byte_level.adds_bos


def test_ordinary_added_tokens_round_trip_as_their_text(
    byte_level: Tokenizer, byte_level_backend: Callable[[], Backend]
) -> None:
    """The library would decode 'é' of such a token as the byte E9."""
    text = "<think>a<café>    x"
    library = byte_level_backend()
    added = {library.token_to_id(token) for token in ("<think>", "<café>", "    ")}
    for allow_special in (False, True):
        ids = byte_level.encode(text, allow_special=allow_special)
        assert added <= set(ids)
        assert byte_level.decode(ids) == text
    assert "é" not in library.decode(ids)
    assert not byte_level.is_special(ids[0])


@pytest.mark.hypothesis
def test_any_text_round_trips(byte_level: Tokenizer) -> None:
    @settings(max_examples=examples(150))
    @given(st.text() | st.text(alphabet="<|end>user é  \n🙂think"))
    def check(text: str) -> None:
        ids = byte_level.encode(text)
        assert byte_level.decode(ids) == text
        assert {0, 1}.isdisjoint(ids)
        allowed = byte_level.encode(text, allow_special=True)
        assert byte_level.decode(allowed, skip_special=False) == text

    check()


@pytest.mark.parametrize("text", ["</s>", "a</s>b <x>", "<x><x>", "ab <s>"])
def test_unigram_never_encodes_text_as_special_tokens(
    write_directory: WriteDirectory, text: str
) -> None:
    backend = unigram_backend()
    tokenizer = load_tokenizer(write_directory({"tokenizer.json": backend.to_str()}))
    backend.encode_special_tokens = True
    naive = backend.encode(text, add_special_tokens=False).ids

    ids = tokenizer.encode(text)

    assert tokenizer.kind == "unigram"
    assert {1, 2}.isdisjoint(ids)
    assert tokenizer.decode(ids) == text
    if {1, 2}.isdisjoint(naive):
        assert ids == naive
    else:
        assert not {1, 2}.isdisjoint(tokenizer.encode(text, allow_special=True))


def test_wordlevel_never_encodes_text_as_special_tokens(
    write_directory: WriteDirectory,
) -> None:
    vocab = {"[UNK]": 0, "[END]": 1, "hello": 2, "world": 3}
    backend = Backend(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[UNK]", "[END]"])
    tokenizer = load_tokenizer(write_directory({"tokenizer.json": backend.to_str()}))
    assert tokenizer.unk_id == 0
    assert tokenizer.encode("hello [END] world") == [2, 0, 3]
    assert tokenizer.encode("hello [END] world", allow_special=True) == [2, 1, 3]
    assert tokenizer.decode([2, 3, 2]) == backend.decode([2, 3, 2]) == "hello world hello"


def test_merges_never_produce_special_tokens_from_text(
    write_directory: WriteDirectory,
) -> None:
    vocab = {"<": 0, "e": 1, ">": 2, "<e": 3, "<e>": 4}
    backend = Backend(models.BPE(vocab=vocab, merges=[("<", "e"), ("<e", ">")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<e>"])
    tokenizer = load_tokenizer(write_directory({"tokenizer.json": backend.to_str()}))
    assert tokenizer.encode("<e>") == [3, 2]
    assert tokenizer.encode("<e>", allow_special=True) == [4]


@pytest.mark.parametrize(
    ("text", "back"),
    [("hi", "hi"), (" hi", " hi"), ("  hi hi ", "  hi hi "), ("é🙂\n", "é🙂\n"), (" ", " ")],
)
def test_llama_style_prefix_space_is_added_and_removed(
    write_directory: WriteDirectory, text: str, back: str
) -> None:
    backend = llama_style_backend()
    tokenizer = load_tokenizer(write_directory({"tokenizer.json": backend.to_str()}))
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == backend.decode(ids) == back
    assert tokenizer.adds_bos
    assert tokenizer.bos_id == 1
    with_bos = tokenizer.encode(text, add_bos=None)
    assert with_bos == backend.encode(text).ids
    assert tokenizer.decode(with_bos) == back


def test_default_bos_is_not_added_to_a_text_that_begins_with_it(
    write_directory: WriteDirectory,
) -> None:
    tokenizer = load_tokenizer(write_directory({"tokenizer.json": llama_style_backend().to_str()}))
    bos = tokenizer.token_text(1)
    spelled = tokenizer.encode(f"{bos}hi", allow_special=True)
    assert spelled[0] == 1
    assert spelled[1] != 1
    assert tokenizer.encode(f"{bos}hi", allow_special=True, add_bos=None) == spelled
    assert tokenizer.encode(f"{bos}hi", allow_special=True, add_bos=True) == [1, *spelled]
    assert tokenizer.encode(f"{bos}hi", add_bos=None) == [1, *tokenizer.encode(f"{bos}hi")]
    for text in ("hi", f"{bos}hi", "hi " * 50):
        encode = partial(tokenizer.encode, text, allow_special=True, add_bos=None)
        ids = encode()
        assert (ids[0], ids.count(1)) == (1, 1)
        assert encode(max_tokens=len(ids)) == ids
        with pytest.raises(ContextLengthError, match=str(len(ids) - 1)):
            encode(max_tokens=len(ids) - 1)


def test_nfc_normalizer_is_applied(write_directory: WriteDirectory) -> None:
    """Qwen's tokenizer normalizes to NFC first, so the decoded text is composed."""
    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = load_tokenizer(write_directory({"tokenizer.json": backend.to_str()}))
    assert tokenizer.decode(tokenizer.encode("cafe\u0301 \u212b")) == "caf\u00e9 \u00c5"


def test_truncation_and_padding_in_the_file_are_ignored(
    write_directory: WriteDirectory, byte_level_backend: Callable[[], Backend]
) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 1)]
    )
    tokenizer = load_tokenizer(write_directory({"tokenizer.json": backend.to_str()}))
    assert tokenizer.adds_bos
    assert tokenizer.bos_id == 1
    text = "one two three four five six seven"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_of_tokenizer_config_are_added(
    write_directory: WriteDirectory, byte_level_backend: Callable[[], Backend]
) -> None:
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    think = backend.token_to_id("<think>")
    assert think is not None
    declared = {
        str(think): {"content": "<think>", "special": True},
        str(size): {"content": "<new>", "special": True},
        str(size + 1): {"content": "plain", "special": False},
    }
    files = {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": {"added_tokens_decoder": declared},
    }
    tokenizer = load_tokenizer(write_directory(files))
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.special_tokens["<new>"] == size
    assert tokenizer.is_special(think)
    assert tokenizer.encode("plain<new>")[0] == size + 1
    assert size not in tokenizer.encode("plain<new>")
    assert tokenizer.encode("plain<new>", allow_special=True) == [size + 1, size]


def test_a_conflicting_declared_id_is_refused(
    write_directory: WriteDirectory, byte_level_backend: Callable[[], Backend]
) -> None:
    files = {"tokenizer.json": byte_level_backend().to_str(), "added_tokens.json": {"<new>": 9999}}
    with pytest.raises(TokenizerError, match="'<new>' is declared with an id"):
        load_tokenizer(write_directory(files))


def test_a_token_declared_twice_keeps_one_id(
    write_directory: WriteDirectory, byte_level_backend: Callable[[], Backend]
) -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<|end|>")])
    files = {"tokenizer.json": backend.to_str(), "added_tokens.json": {"<|user|>": 1}}
    tokenizer = load_tokenizer(write_directory(files))
    assert tokenizer.vocab_size == byte_level_backend().get_vocab_size()
    assert tokenizer.encode("<|user|>", allow_special=True) == [1]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "not json",
        "{}",
        '{"version": "1.0"}',
        "[]",
        b"\xff\xfe",
        '{"model": {"type": "?"}}',
    ],
)
def test_a_damaged_tokenizer_json_is_a_tokenizer_error(
    write_directory: WriteDirectory, content: str | bytes
) -> None:
    folder = write_directory({"tokenizer.json": content})
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(folder)
    assert caught.value.where == str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder(), decoders.Strip(" ", 1, 1)],
)
def test_a_decoder_that_is_not_per_token_is_refused(
    write_directory: WriteDirectory,
    byte_level_backend: Callable[[], Backend],
    decoder: decoders.Decoder,
) -> None:
    backend = byte_level_backend()
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match="unsupported decoder"):
        load_tokenizer(write_directory({"tokenizer.json": backend.to_str()}))


def test_byte_alphabet_matches_the_library() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert backend.encode("aé🙂 \n\x00").ids == list("aé🙂 \n\x00".encode())


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True},
        {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "never", "split": True},
        None,
    ],
    ids=["always", "never", "none"],
)
def test_piece_rules_match_the_librarys_decoders(decoder: dict[str, object] | None) -> None:
    tokens = [MARK + "Hello", ",", MARK, MARK + "you", "<0x41>", "é"]
    backend = Backend(models.WordLevel({t: n for n, t in enumerate(tokens)}, unk_token="é"))
    if decoder is not None:
        scheme = str(decoder["prepend_scheme"])
        backend.decoder = decoders.Metaspace(MARK, prepend_scheme=scheme)
    rule = piece_rule(decoder, "here")
    joined = b"".join(map(rule.to_bytes, tokens)).decode()
    leading = len(joined) - len(joined.lstrip(" "))
    ours = joined[min(leading, rule.dropped_spaces) :]
    assert ours == backend.decode(list(range(len(tokens))))


def test_concurrent_encode_calls_keep_their_own_special_switch(byte_level: Tokenizer) -> None:
    """The switch for special tokens is state of the shared library object."""
    from concurrent.futures import ThreadPoolExecutor

    text = "<|user|>hello<|end|>" * 20
    expected = {flag: byte_level.encode(text, allow_special=flag) for flag in (False, True)}
    flags = [number % 3 == 0 for number in range(400)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda flag: byte_level.encode(text, allow_special=flag), flags))
    assert found == [expected[flag] for flag in flags]


def test_library_has_the_special_token_switch() -> None:
    """`encode_special_tokens` exists from version 0.21 on."""
    assert tuple(map(int, tokenizers.__version__.split(".")[:2])) >= (0, 21)
