"""`tokenizer.model`: ids and text compared with the library, special and added tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from exl_core.errors import TokenizerError
from exl_core.tokenizer.detect import load_tokenizer
from exl_core.tokenizer.spm_proto import without_dummy_prefix
from support.profiles import examples

Train = Callable[..., bytes]
WriteDirectory = Callable[..., Path]
MARK = "\u2581"
KINDS = ["bpe", "unigram"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adds_space", [True, False], ids=["space", "no-space"])
def test_ids_and_text_are_those_of_the_library(
    train_sentencepiece: Train,
    write_directory: WriteDirectory,
    awkward_texts: list[str],
    kind: str,
    adds_space: bool,
) -> None:
    model = train_sentencepiece(
        kind, add_dummy_prefix=adds_space, user_defined_symbols=["<code>", "🙂🙂"]
    )
    library = SentencePieceProcessor(model_proto=model)
    tokenizer = load_tokenizer(write_directory({"tokenizer.model": model}))
    assert tokenizer.kind == "sentencepiece"
    assert tokenizer.vocab_size == library.get_piece_size()
    for text in [*awkward_texts, "<code>x</code>", " <code> 🙂🙂🙂"]:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == library.decode(ids) == text.replace(MARK, " ")


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_any_text_round_trips_and_streams(
    train_sentencepiece: Train, write_directory: WriteDirectory, kind: str
) -> None:
    model = train_sentencepiece(kind)
    library = SentencePieceProcessor(model_proto=model)
    tokenizer = load_tokenizer(write_directory({"tokenizer.model": model}))

    @settings(max_examples=examples(100))
    @given(st.text(max_size=40) | st.text(alphabet=" <s>/the🙂\u0301", max_size=40))
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace(MARK, " ")
        stream = tokenizer.stream_decoder()
        assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids)
        assert not any(tokenizer.is_special(number) for number in ids)
        allowed = tokenizer.encode(text, allow_special=True)
        if allowed == ids:
            assert library.decode(ids) == tokenizer.decode(ids)

    check()


def test_only_one_leading_space_is_removed(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    model = train_sentencepiece("bpe")
    library = SentencePieceProcessor(model_proto=model)
    tokenizer = load_tokenizer(write_directory({"tokenizer.model": model}))
    space = library.piece_to_id(MARK)
    the = tokenizer.encode("The")
    for ids in ([space, *the], [1, *the], [1, space, space], [*the, *the], [space], []):
        assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode([1, *the], skip_special=False) == "<s> The"


def test_collapsed_spaces_are_lost(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    """Such a model removes leading, trailing and repeated spaces before it matches pieces."""
    model = train_sentencepiece("unigram", remove_extra_whitespaces=True)
    library = SentencePieceProcessor(model_proto=model)
    tokenizer = load_tokenizer(write_directory({"tokenizer.model": model}))
    for text in ("  the   dog  ", "the dog", " "):
        ids = tokenizer.encode(text)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == library.decode(ids) == " ".join(text.split())
    the = tokenizer.encode("the")
    space = library.piece_to_id(MARK)
    assert tokenizer.decode([space, space, *the]) == library.decode([space, space, *the]) == "the"


def test_unknown_characters_are_lost_without_byte_pieces(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    model = train_sentencepiece("bpe", byte_fallback=False, vocab_size=200)
    tokenizer = load_tokenizer(write_directory({"tokenizer.model": model}))
    ids = tokenizer.encode("the 𒀀 dog")
    assert tokenizer.unk_id in ids
    assert tokenizer.decode(ids) == "the  dog"
    assert tokenizer.decode(ids, skip_special=False) == "the <unk> dog"


def test_control_pieces_are_text_unless_allowed(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    model = train_sentencepiece("bpe", control_symbols=["<|user|>", "<|end|>"])
    tokenizer = load_tokenizer(write_directory({"tokenizer.model": model}))
    user, end = (tokenizer.special_tokens[text] for text in ("<|user|>", "<|end|>"))
    text = "<|user|>the dog<|end|>"
    plain = tokenizer.encode(text)
    assert {user, end, 1, 2}.isdisjoint(plain)
    assert tokenizer.decode(plain) == text
    ids = tokenizer.encode(text, allow_special=True)
    assert ids == [user, *tokenizer.encode("the dog"), end]
    # The model was trained with the space that it adds before every text between special tokens.
    assert tokenizer.decode(ids, skip_special=False) == "<|user|> the dog<|end|>"


def test_a_non_legacy_tokenizer_adds_one_space_at_the_start(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    model = train_sentencepiece("bpe", control_symbols=["<c>"])
    files = {"tokenizer.model": model, "tokenizer_config.json": {"legacy": False}}
    tokenizer = load_tokenizer(write_directory(files))
    bare = SentencePieceProcessor(model_proto=without_dummy_prefix(model))
    c = tokenizer.special_tokens["<c>"]
    ids = tokenizer.encode("the<c>the dog", allow_special=True)
    assert ids == [*tokenizer.encode("the"), c, *bare.encode("the dog")]
    assert tokenizer.decode(ids, skip_special=False) == "the<c>the dog"


def test_tokens_with_ids_above_the_model_are_split_first(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    model = train_sentencepiece("bpe")
    size = SentencePieceProcessor(model_proto=model).get_piece_size()
    declared = {
        "1": {"content": "<s>", "special": True},
        str(size): {"content": "<|im_start|>", "special": True},
        str(size + 2): {"content": "<tool>", "special": False},
    }
    files = {
        "tokenizer.model": model,
        "tokenizer_config.json": {"added_tokens_decoder": declared, "eos_token": "<|im_end|>"},
        "added_tokens.json": {"<|im_end|>": size + 1, "<|im_start|>": size},
    }
    tokenizer = load_tokenizer(write_directory(files))
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.eos_ids == (size + 1,)
    text = "<|im_start|>the<tool>dog<|im_end|>"
    plain = tokenizer.encode(text)
    assert size + 2 in plain
    assert {size, size + 1}.isdisjoint(plain)
    ids = tokenizer.encode(text, allow_special=True)
    assert (ids[0], ids[-1]) == (size, size + 1)
    assert size + 2 in ids
    assert not tokenizer.is_special(size + 2)
    assert tokenizer.token_text(size + 2) == "<tool>"
    assert tokenizer.decode([size + 2]) == "<tool>"


def test_control_ids_default_to_those_of_the_model(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    model = train_sentencepiece("bpe", pad_id=3)
    tokenizer = load_tokenizer(write_directory({"tokenizer.model": model}))
    roles = (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id, tokenizer.pad_id)
    assert roles == (
        1,
        (2,),
        0,
        3,
    )
    assert tokenizer.adds_bos
    assert tokenizer.encode("the", add_bos=None)[0] == 1


def test_configuration_disables_bos(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    files = {
        "tokenizer.model": train_sentencepiece("bpe"),
        "tokenizer_config.json": {"add_bos_token": False, "add_eos_token": True},
    }
    tokenizer = load_tokenizer(write_directory(files))
    assert not tokenizer.adds_bos
    assert tokenizer.adds_eos
    assert tokenizer.encode("the", add_bos=None) == tokenizer.encode("the")


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02", b"\x0a\xff\xff\xff\xff\x0f", b"hello"])
def test_a_damaged_model_is_a_tokenizer_error(
    write_directory: WriteDirectory, content: bytes
) -> None:
    folder = write_directory({"tokenizer.model": content})
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(folder)
    assert caught.value.where == str(folder / "tokenizer.model")


def test_a_truncated_model_is_refused(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    model = train_sentencepiece("bpe")
    with pytest.raises(TokenizerError, match="sentencepiece"):
        load_tokenizer(write_directory({"tokenizer.model": model[: len(model) // 2]}))
