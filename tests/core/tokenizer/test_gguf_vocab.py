"""Vocabulary of GGUF files: kinds, pre-tokenizers, control ids, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from exl_core.errors import TokenizerError
from exl_core.tokenizer.decoders import byte_alphabet
from exl_core.tokenizer.gguf_vocab import tokenizer_from_gguf_fields
from exl_core.tokenizer.pre_tokenizers import PRE_TOKENIZERS, install

# Patterns of the models' own tokenizer.json files, copied independently of the implementation.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The letters are those of deepseek-ai/DeepSeek-V2-Lite.
DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-"
    "\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-"
    "\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    DEEPSEEK_CJK,
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK)


def bpe_fields(pre: str | None = "gpt-2", **changes: object) -> dict[str, Any]:
    """Metadata with a byte alphabet, a few merges, two control tokens, one ordinary added token."""
    alphabet = list(byte_alphabet())
    merged = ["he", "hel", "Ġhe", "12", "123", "'s", "ĠĠ", "e'"]
    tokens = [*alphabet, *merged, "<|im_start|>", "<|im_end|>", "<tool>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    merges = ["h e", "he l", "Ġ he", "1 2", "12 3", "' s", "Ġ Ġ", "e '"]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    fields.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in fields.items() if value is not None}


def spm_fields(**changes: object) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "h", "i", "hi", "▁hi", "<|im_end|>", "   "]
    types = [2, 3, 3, *([6] * 256), 1, 1, 1, 1, 1, 3, 4]
    scores = [0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0, 0.0, 0.0]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    fields.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in fields.items() if value is not None}


def original(steps: list[Any], *, nfc: bool = False, whole_words: bool = False) -> Backend:
    fields = bpe_fields()
    vocab = {token: number for number, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def split(*patterns: str, has_digits: bool = False) -> list[Any]:
    digits = [pre_tokenizers.Digits(individual_digits=True)] if has_digits else []
    return [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
        *digits,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


GPT2_STEPS = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
ORIGINALS: dict[str, Callable[[], Backend]] = {
    "default": lambda: original(GPT2_STEPS),
    "gpt-2": lambda: original(GPT2_STEPS),
    "smollm": lambda: original([pre_tokenizers.Digits(individual_digits=True), *GPT2_STEPS]),
    "llama-bpe": lambda: original(split(LLAMA3), whole_words=True),
    "qwen2": lambda: original(split(QWEN2), nfc=True),
    "qwen35": lambda: original(split(QWEN35), nfc=True),
    "lfm2": lambda: original(split(LLAMA3), whole_words=True),
    "kimi-k2": lambda: original(split(KIMI)),
    "pixtral": lambda: original(split(LLAMA3), whole_words=True),
    "deepseek-llm": lambda: original(split(*DEEPSEEK_LLM, has_digits=True)),
    "deepseek-coder": lambda: original(split(*DEEPSEEK_CODER, has_digits=True)),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_words_are_split_as_in_the_original_tokenizer(pre: str, awkward_texts: list[str]) -> None:
    expected = ORIGINALS[pre]()
    tokenizer = tokenizer_from_gguf_fields(bpe_fields(pre), "made")
    assert tokenizer.kind == "bpe"
    for text in [t for t in awkward_texts if "<tool>" not in t]:
        assert tokenizer.encode(text) == expected.encode(text).ids
        if not PRE_TOKENIZERS[pre].is_nfc:
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder"])
def test_words_of_deepseek_are_split_as_in_the_original_tokenizer(pre: str) -> None:
    tokenizer, expected = PRE_TOKENIZERS[pre], ORIGINALS[pre]()
    backend = original([])
    install(tokenizer, backend)
    # Borders of every range that either side lists, in words of their own and next to others.
    borders = {ord(c) + step for c in DEEPSEEK_LETTERS + DEEPSEEK_CJK for step in (-1, 0, 1)}
    letters = [chr(c) for c in sorted(borders) if not 0xD800 <= c < 0xE000 and c >= 0x20]
    for text in (
        "".join(letters),
        " ".join(letters),
        "".join(f"a{letter}7{letter}\u4e2d{letter}!\n" for letter in letters),
        "x = 12;  \r\n\t\u3000y\u2019s \uff08\u4e2d\u6587\uff09 \u0e44\u0e17\u0e22 \ud55c\uad6d   ",
    ):
        words = [one.pre_tokenizer.pre_tokenize_str(text) for one in (backend, expected)]
        assert words[0] == words[1]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_round_trips(pre: str, awkward_texts: list[str]) -> None:
    tokenizer = tokenizer_from_gguf_fields(bpe_fields(pre), "made")
    for text in awkward_texts:
        back = normalizers.NFC().normalize_str(text) if PRE_TOKENIZERS[pre].is_nfc else text
        assert tokenizer.decode(tokenizer.encode(text)) == back


def test_pre_tokenizers_differ_in_digits_and_contractions() -> None:
    def words(pre: str, text: str) -> list[str]:
        tokenizer = tokenizer_from_gguf_fields(bpe_fields(pre), "made")
        return [tokenizer.token_text(number) for number in tokenizer.encode(text)]

    assert words("gpt-2", "123") == ["123"]
    assert words("smollm", "123") == ["1", "2", "3"]
    assert words("llama-bpe", "1231") == ["123", "1"]
    assert words("qwen2", "123") == ["1", "2", "3"]
    assert words("gpt-2", "he's") == ["he", "'s"]
    assert words("kimi-k2", "1231") == ["123", "1"]


def test_error_of_an_unknown_pre_tokenizer_lists_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"'brand-new'") as caught:
        tokenizer_from_gguf_fields(bpe_fields("brand-new"), "made.gguf")
    assert caught.value.where == "made.gguf"
    assert "llama-bpe" in str(caught.value)
    assert "smollm" in str(caught.value)


def test_a_missing_pre_tokenizer_means_gpt2() -> None:
    tokenizer = tokenizer_from_gguf_fields(bpe_fields(None), "made")
    assert len(tokenizer.encode("123")) == 1


def test_control_and_added_tokens_of_byte_level_bpe() -> None:
    tokenizer = tokenizer_from_gguf_fields(bpe_fields(), "made")
    start, end, tool = (tokenizer.vocab_size - n for n in (3, 2, 1))
    assert tokenizer.special_tokens == {"<|im_start|>": start, "<|im_end|>": end}
    text = "<|im_start|>a<tool><|im_end|>"
    plain = tokenizer.encode(text)
    assert tool in plain
    assert {start, end}.isdisjoint(plain)
    assert tokenizer.decode(plain) == text
    ids = tokenizer.encode(text, allow_special=True)
    assert (ids[0], ids[-2], ids[-1]) == (start, tool, end)


@pytest.mark.parametrize(("pre", "adds"), [("gpt-2", False), ("llama-bpe", True), ("qwen2", False)])
def test_add_bos_defaults_to_the_family_and_is_overridden_by_the_file(pre: str, adds: bool) -> None:
    assert tokenizer_from_gguf_fields(bpe_fields(pre, bos_token_id=3), "x").adds_bos is adds
    for says in (True, False):
        fields = bpe_fields(pre, bos_token_id=3, add_bos_token=says)
        assert tokenizer_from_gguf_fields(fields, "x").adds_bos is says
    assert not tokenizer_from_gguf_fields(bpe_fields(pre, add_bos_token=True), "x").adds_bos


def test_eos_eot_and_eom_are_all_eos_ids() -> None:
    fields = spm_fields(eot_token_id=263, eom_token_id=259, add_eos_token=True)
    tokenizer = tokenizer_from_gguf_fields(fields, "made")
    assert tokenizer.eos_ids == (2, 263, 259)
    assert tokenizer.adds_eos


def test_end_of_turn_token_is_an_eos_id_of_a_chat_model() -> None:
    base = spm_fields()
    assert tokenizer_from_gguf_fields(base, "made").eos_ids == (2,)
    chat = {**base, "tokenizer.chat_template": "{{ messages }}"}
    assert tokenizer_from_gguf_fields(chat, "made").eos_ids == (2, 264)


def test_the_end_of_a_harmony_message_does_not_end_the_reply() -> None:
    fields = bpe_fields("gpt-4o")
    ends = ["<|end|>", "<|return|>", "<|call|>"]
    for key, more in (("tokens", ends), ("token_type", [3] * 3)):
        fields[f"tokenizer.ggml.{key}"] = [*fields[f"tokenizer.ggml.{key}"], *more]
    first = len(fields["tokenizer.ggml.tokens"]) - 3
    fields["tokenizer.ggml.eos_token_id"] = first + 1
    fields["tokenizer.chat_template"] = "{{ messages }}"
    assert tokenizer_from_gguf_fields(fields, "made").eos_ids == (first + 1, first + 2)

    fields["tokenizer.ggml.tokens"][-1] = "<|other|>"  # another chat format
    assert first in tokenizer_from_gguf_fields(fields, "made").eos_ids


def test_sentencepiece_adds_a_space_unless_the_file_disables_it() -> None:
    with_space = tokenizer_from_gguf_fields(spm_fields(), "made")
    assert with_space.kind == "sentencepiece"
    assert with_space.adds_bos
    assert with_space.encode("hi") == [263]
    without = tokenizer_from_gguf_fields(spm_fields(add_space_prefix=False), "made")
    assert without.encode("hi") == [262]
    assert without.encode(" hi") == [263]
    for tokenizer in (with_space, without):
        for text in ("hi", " hi", "  hi", "é\n\x00🙂", "a   b"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_of_several_spaces_are_matched() -> None:
    tokenizer = tokenizer_from_gguf_fields(spm_fields(add_space_prefix=False), "made")
    assert tokenizer.encode("h   i") == [260, 265, 261]
    assert tokenizer.token_text(265) == "   "


def test_an_unknown_piece_marked_as_control_is_accepted() -> None:
    fields = spm_fields()
    fields["tokenizer.ggml.token_type"] = [3, *fields["tokenizer.ggml.token_type"][1:]]
    tokenizer = tokenizer_from_gguf_fields(fields, "made")
    assert tokenizer.unk_id == 0
    assert tokenizer.special_tokens["<unk>"] == 0
    assert tokenizer.encode("<unk>", allow_special=True) == [0]
    assert 0 not in tokenizer.encode("<unk>")


def test_tokenizer_model_and_gguf_give_equal_ids(
    train_sentencepiece: Callable[..., bytes], awkward_texts: list[str]
) -> None:
    library = SentencePieceProcessor(
        model_proto=train_sentencepiece("bpe", user_defined_symbols=["<code>"])
    )
    count = library.get_piece_size()
    types = [6 if library.is_byte(n) else 3 if library.is_control(n) else 1 for n in range(count)]
    types[library.unk_id()] = 2
    types[library.piece_to_id("<code>")] = 4
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(n) for n in range(count)],
        "tokenizer.ggml.scores": [library.get_score(n) for n in range(count)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": library.unk_id(),
    }
    tokenizer = tokenizer_from_gguf_fields(fields, "made")
    for text in [*awkward_texts, "a<code>b"]:
        assert tokenizer.encode(text) == library.encode(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no 'tokenizer.ggml.tokens'"),
        (bpe_fields(model="bert"), "unsupported tokenizer model"),
        (bpe_fields(model=None), "unsupported tokenizer model"),
        (bpe_fields(merges=None), "no 'tokenizer.ggml.merges'"),
        (bpe_fields(merges=["q he", "nothing"]), "the merges do not fit the tokens"),
        (bpe_fields(tokens=[]), "not a list of the right type"),
        (bpe_fields(tokens="abc"), "not a list of the right type"),
        (bpe_fields(token_type=None), "no 'tokenizer.ggml.token_type'"),
        (bpe_fields(token_type=[1, 2]), "does not match the tokens"),
        (bpe_fields(tokens=["a"] * 267), "holds a token twice"),
        (bpe_fields(bos_token_id=10**6), "the BOS id is not an id of the tokenizer"),
        (bpe_fields(eos_token_id="2"), "has the wrong type"),
        (bpe_fields(add_bos_token=1), "has the wrong type"),
        (spm_fields(scores=None), "no 'tokenizer.ggml.scores'"),
        (spm_fields(scores=[0.0]), "does not match the tokens"),
        (spm_fields(token_type=[99] * 266), "a token has an unknown type"),
        (spm_fields(tokens=["", *["x"] * 265]), "sentencepiece library"),
        (spm_fields(unknown_token_id=5000), "no token for unknown text"),
    ],
)
def test_unusable_metadata_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        tokenizer_from_gguf_fields(fields, "made.gguf")
    assert caught.value.where == "made.gguf"


@pytest.mark.parametrize("fields", [bpe_fields, spm_fields])
def test_a_padding_id_outside_the_vocabulary_is_ignored(fields: Callable[..., Any]) -> None:
    size = len(fields()["tokenizer.ggml.tokens"])
    for pad_id, expected in ((size - 1, size - 1), (size, None), (2**32 - 1, None), (-1, None)):
        found = fields(padding_token_id=pad_id)
        assert tokenizer_from_gguf_fields(found, "made.gguf").pad_id == expected


def test_characters_merge_and_spaces_are_marked() -> None:
    """Gemma 4's kind: merges of characters, with tokens of bytes, line breaks apart."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    first = len(tokens)
    tokens += ["#", "\u2581", "h", "i", "hi", "\u2581hi", "\n", "\n\n", "#", "<|channel>"]
    types = [3, 3, 3, 2, *([6] * 256), *([1] * 9), 4]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h i", "\u2581 hi", "\n \n"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    tokenizer = tokenizer_from_gguf_fields(fields, "test")

    text = "hi hi\n\n#\u00e9<|channel>"
    ids = tokenizer.encode(text, allow_special=False)

    hi, marked, breaks, later, channel = (first + offset for offset in (4, 5, 7, 8, 9))
    assert ids == [hi, marked, breaks, later, 4 + 0xC3, 4 + 0xA9, channel]
    assert tokenizer.decode(ids) == text
    assert tokenizer.control.adds_bos
