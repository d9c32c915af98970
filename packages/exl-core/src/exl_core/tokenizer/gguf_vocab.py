"""Builds the tokenizer of a GGUF file from its metadata.

Owns the meaning of the `tokenizer.ggml.*` keys. There are three kinds. "gpt2" is byte-level BPE
with merges, "gemma4" is BPE of characters with merges and tokens of bytes. Both use the tokenizers
library. "llama" is SentencePiece with scores and uses the sentencepiece library. Reading the
metadata belongs to `gguf_fields.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from exl_core.errors import TokenizerError
from exl_core.tokenizer.base import ControlIds, Tokenizer
from exl_core.tokenizer.check import check_control_ids
from exl_core.tokenizer.decoders import (
    BYTE_LEVEL,
    META_SPACE,
    PieceRule,
    byte_of_token,
    piece_rule,
)
from exl_core.tokenizer.hf_json import LibraryTokenizer
from exl_core.tokenizer.library import library_errors
from exl_core.tokenizer.pre_tokenizers import find_pre_tokenizer, install
from exl_core.tokenizer.spm import SentencePieceTokenizer, open_processor
from exl_core.tokenizer.spm_proto import PieceType, bpe_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Tokens that end a turn in the chat formats of common families. A file names at most three of a
# model's end tokens, and often only the one that ends a document.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_turn|>",
    "<turn|>",
    "<|eom_id|>",
    "<end_of_utterance>",
)
HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Ends of a reply in the chat format of gpt-oss, where `<|end|>` ends one of its messages only."""
_PREFIX = "tokenizer.ggml."
T = TypeVar("T", str, int, bool)


def tokenizer_from_gguf_fields(fields: Mapping[str, object], where: str) -> Tokenizer:
    """Builds the tokenizer that the metadata describes. `where` is the path for messages."""
    vocab = _Vocab(fields, where)
    model = vocab.get("model", str)
    builders: dict[str | None, Callable[[_Vocab], Tokenizer]] = {
        "gpt2": _byte_level_bpe,
        "llama": _sentencepiece,
        "gemma4": _character_bpe,
    }
    builder = builders.get(model)
    if builder is None:
        raise TokenizerError(
            "unsupported tokenizer model in the GGUF file (tokenizer.ggml.model)",
            where=where,
            expected=" or ".join(f"'{name}'" for name in builders),
            got=repr(model),
            next_step="Use the model's safetensors files with their tokenizer",
        )
    tokenizer = builder(vocab)
    check_control_ids(tokenizer.control, len(vocab.tokens), where)
    return tokenizer


class _Vocab:
    """Metadata with checked types."""

    def __init__(self, fields: Mapping[str, object], where: str) -> None:
        self.fields = fields
        self.where = where
        self.tokens = self.texts("tokens")
        self.types = cast("list[int]", self.numbers("token_type", int))

    def get(self, key: str, kind: type[T]) -> T | None:
        value = self.fields.get(_PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f"'{_PREFIX}{key}' has the wrong type", kind.__name__, value)
        return value

    def texts(self, key: str) -> list[str]:
        return cast("list[str]", self.listed(key, str))

    def numbers(self, key: str, kind: type[int] | type[float]) -> list[float]:
        """List with one number per token."""
        values = self.listed(key, kind)
        count = len(self.tokens)
        if len(values) != count:
            raise self.error(f"'{_PREFIX}{key}' does not match the tokens", count, len(values))
        return cast("list[float]", values)

    def listed(self, key: str, kind: type) -> Sequence[object]:
        values = self.fields.get(_PREFIX + key)
        if values is None:
            raise self.error(f"the GGUF file has no '{_PREFIX}{key}'", None, None)
        if not isinstance(values, list) or not values or not isinstance(values[0], kind):
            raise self.error(f"'{_PREFIX}{key}' is not a list of the right type", None, None)
        return values

    def merges(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for merge in self.texts("merges"):
            left, _, right = merge.partition(" ")
            found.append((left, right))
        return found

    def error(self, what: str, expected: object, got: object) -> TokenizerError:
        return TokenizerError(
            what,
            where=self.where,
            expected=expected,
            got=got,
            next_step="Convert the model again with a current converter",
        )

    def special(self) -> dict[str, int]:
        """Control tokens and the unknown token, by text."""
        numbers = self.of_type(PieceType.CONTROL) + self.of_type(PieceType.UNKNOWN)
        return {self.tokens[number]: number for number in numbers}

    def of_type(self, kind: PieceType) -> list[int]:
        wanted = int(kind)  # comparing enumeration members 262144 times is slow
        return [number for number, found in enumerate(self.types) if found == wanted]

    def control_ids(self, special: Mapping[str, int], *, adds_bos: bool) -> ControlIds:
        """`adds_bos`: default if the file does not contain 'add_bos_token'."""
        bos_id = self.get("bos_token_id", int)
        named = [self.get(f"{role}_token_id", int) for role in ("eos", "eot", "eom")]
        ends = [number for number in named if number is not None]
        if self.fields.get("tokenizer.chat_template") is not None:
            is_harmony = all(text in special for text in HARMONY_ENDS)
            texts = HARMONY_ENDS if is_harmony else END_OF_TURN
            ends += [special[text] for text in texts if text in special]
        says = self.get("add_bos_token", bool)
        return ControlIds(
            bos_id=bos_id,
            eos_ids=tuple(dict.fromkeys(ends)),
            unk_id=self.get("unknown_token_id", int),
            pad_id=self.get("padding_token_id", int),
            adds_bos=bos_id is not None and (adds_bos if says is None else says),
            adds_eos=self.get("add_eos_token", bool) is True,
        )


def _byte_level_bpe(vocab: _Vocab) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    pre = find_pre_tokenizer(vocab.get("pre", str) or "default", vocab.where)
    merges = vocab.merges()
    ids = {text: number for number, text in enumerate(vocab.tokens)}
    if len(ids) != len(vocab.tokens):
        raise vocab.error("the vocabulary holds a token twice", len(vocab.tokens), len(ids))
    with library_errors("the merges do not fit the tokens", vocab.where):
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words)
    with library_errors("the tokenizer cannot be built from the metadata", vocab.where):
        backend = Backend(model)
        install(pre, backend)
    return _library_tokenizer(vocab, backend, BYTE_LEVEL, adds_bos=pre.adds_bos)


def _library_tokenizer(
    vocab: _Vocab, backend: Backend, rule: PieceRule, *, adds_bos: bool
) -> Tokenizer:
    """The tokenizer, after control tokens and tokens defined by the user are added to `backend`."""
    from tokenizers import AddedToken

    special = vocab.special()
    ordinary = [vocab.tokens[number] for number in vocab.of_type(PieceType.USER_DEFINED)]
    with library_errors("the tokenizer cannot be built from the metadata", vocab.where):
        backend.add_special_tokens([AddedToken(text, normalized=False) for text in special if text])
        backend.add_tokens([AddedToken(text, normalized=False) for text in ordinary if text])
    control = vocab.control_ids(special, adds_bos=adds_bos)
    return LibraryTokenizer(backend, rule, control, vocab.where)


_MARKED_SPACES: dict[str, object] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": META_SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def _character_bpe(vocab: _Vocab) -> Tokenizer:
    """Merges of characters, with a mark in place of each space. Line breaks merge only with each
    other. Characters without a token become tokens of their bytes.

    Published files have a few tokens twice. The later ones are used.
    """
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    ids = {text: number for number, text in enumerate(vocab.tokens)}
    unknown = vocab.of_type(PieceType.UNKNOWN)
    unk = vocab.tokens[unknown[0]] if unknown else None
    with library_errors("the merges do not fit the tokens", vocab.where):
        model = models.BPE(
            vocab=ids, merges=vocab.merges(), unk_token=unk, fuse_unk=True, byte_fallback=True
        )
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", META_SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    steps = [decoders.Replace(META_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    rule = piece_rule(_MARKED_SPACES, vocab.where)
    return _library_tokenizer(vocab, backend, rule, adds_bos=True)


def _sentencepiece(vocab: _Vocab) -> Tokenizer:
    scores = vocab.numbers("scores", float)
    unknown_kinds = set(vocab.types) - set(map(int, PieceType))
    if unknown_kinds:
        raise vocab.error("a token has an unknown type", "1 to 6", min(unknown_kinds))
    special = vocab.special()
    control = vocab.control_ids(special, adds_bos=True)
    marked = vocab.of_type(PieceType.UNKNOWN)
    unk_id = next(iter(marked), None) if control.unk_id is None else control.unk_id
    if unk_id is None or not 0 <= unk_id < len(vocab.tokens):
        raise vocab.error("the vocabulary has no token for unknown text", None, unk_id)
    # The library requires exactly one unknown piece. Some converters mark it as a control token.
    types = list(vocab.types)
    for number in marked:
        types[number] = PieceType.CONTROL
    types[unk_id] = PieceType.UNKNOWN
    texts = list(vocab.tokens)
    for number in vocab.of_type(PieceType.USER_DEFINED):  # GGUF stores these with plain spaces
        texts[number] = texts[number].replace(" ", META_SPACE)
    bytes_present = {byte_of_token(texts[number]) for number in vocab.of_type(PieceType.BYTE)}
    model = bpe_model(
        zip(texts, scores, types, strict=True),
        byte_fallback=len(bytes_present - {None}) == 256,
        add_dummy_prefix=vocab.get("add_space_prefix", bool) is not False,
        remove_extra_spaces=vocab.get("remove_extra_whitespaces", bool) is True,
        charsmap=_charsmap(vocab),
    )
    special[vocab.tokens[unk_id]] = unk_id
    return SentencePieceTokenizer(
        open_processor(model, vocab.where), control, vocab.where, special=special, added={}
    )


def _charsmap(vocab: _Vocab) -> bytes:
    """The model's table of Unicode replacements, or b"". The file has signed or unsigned bytes."""
    if vocab.fields.get(_PREFIX + "precompiled_charsmap") is None:
        return b""
    values = vocab.listed("precompiled_charsmap", int)
    return bytes(cast("int", value) & 0xFF for value in values)
