"""Tokenizers based on the sentencepiece library: `tokenizer.model`, or "llama" kind of a GGUF file.

The library never converts text to a control piece. This module therefore splits a text at its
special tokens, if they are allowed. It always splits at tokens that were added to the model later,
whose ids are above those of the library, because models were trained in this way.

Round trips: the library encodes a space as U+2581, so U+2581 in a text decodes to a space. A model
that collapses spaces or normalizes Unicode decodes to the changed text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from exl_core.errors import TokenizerError
from exl_core.files import check_no_lfs_pointer, read_bytes
from exl_core.tokenizer.base import ControlIds, Tokenizer
from exl_core.tokenizer.control_ids import FILE_LIMIT_BYTES
from exl_core.tokenizer.decoders import META_SPACE, byte_of_token
from exl_core.tokenizer.long_text import (
    Cuts,
    TokenLengths,
    bytes_of_marked,
    covered_bytes,
    cuts_of_marked_pieces,
    is_long,
)
from exl_core.tokenizer.special_text import SpecialText, Trust, named_marks
from exl_core.tokenizer.spm_proto import TextRules, text_rules, without_dummy_prefix

_NEXT_STEP = "The file looks truncated or damaged; download it again"


class SentencePieceTokenizer(Tokenizer):
    """Sentencepiece model with its special and added tokens."""

    kind = "sentencepiece"

    def __init__(
        self,
        processor: Any,
        control: ControlIds,
        where: str,
        *,
        special: Mapping[str, int],
        added: Mapping[str, int],
        prefixes_every_run: bool = True,
    ) -> None:
        """Wraps a processor.

        special             control tokens
        added               tokens beyond the model that are ordinary text
        prefixes_every_run  the space that the model adds before a text is also added after each
                            special token, and not only at the start
        """
        super().__init__(control, special, where)
        self._processor = processor
        self._added = {number: text.encode() for text, number in added.items()}
        self._added_ids = dict(added)
        self._plain_split = SpecialText(added) if added else None
        self._special_split = SpecialText({**added, **special})
        self._pieces: dict[int, bytes] = {}
        self._piece_count: int = processor.get_piece_size()
        known: list[int] = [self._piece_count - 1, *self._added, *special.values()]
        self._vocab_size = 1 + max(known)
        probe: str = processor.normalize("a  a")
        self._adds_space = probe.startswith(META_SPACE)
        self._prefixes_every_run = prefixes_every_run
        self._folds_spaces = probe.count(META_SPACE) - self._adds_space == 1
        self._continuation = processor
        if self._adds_space and not prefixes_every_run:
            self._continuation = open_processor(
                without_dummy_prefix(processor.serialized_model_proto()), where
            )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def leading_spaces_dropped(self) -> int:
        if self._folds_spaces:
            return sys.maxsize
        return 1 if self._adds_space else 0

    @property
    def adds_space(self) -> bool | None:
        """Whether the model adds a space before each text between special tokens. None: only before
        a text at the start."""
        return self._adds_space if self._prefixes_every_run or not self._adds_space else None

    def as_model(self) -> bytes:
        """Content of `tokenizer.model`: the library's model, without added tokens."""
        return bytes(self._processor.serialized_model_proto())

    @cached_property
    def _token_lengths(self) -> TokenLengths | None:
        rules = self._text_rules
        if rules.has_charsmap or not rules.escapes_spaces:
            return None
        pieces = self._all_pieces
        num_bytes = sum(self._processor.is_byte(list(range(self._piece_count))))
        covered = covered_bytes(set(pieces), has_bytes=num_bytes == 256)
        if rules.removes_extra_spaces:
            covered.discard(ord(" "))
        added = [*self._added.values(), *(text.encode() for text in self.special_tokens)]
        return TokenLengths([*map(bytes_of_marked, pieces), *added], covered)

    @cached_property
    def _cuts(self) -> Mapping[bool, Cuts | None]:
        """Cuts by whether the processor adds a space before a text."""
        rules = self._text_rules
        is_known = rules.is_bpe and rules.escapes_spaces
        if not is_known or rules.has_charsmap or rules.removes_extra_spaces:
            return {False: None, True: None}
        if rules.puts_spaces_behind:
            return {False: None, True: None}
        pieces = set(self._all_pieces)
        return {adds: cuts_of_marked_pieces(pieces, adds_space=adds) for adds in (False, True)}

    @cached_property
    def _text_rules(self) -> TextRules:
        return text_rules(self.as_model())

    @property
    def _all_pieces(self) -> list[str]:
        """Pieces of the model, without unused single characters, which are unknown to it."""
        ids = list(range(self._piece_count))
        pieces = zip(self._processor.id_to_piece(ids), self._processor.is_unused(ids), strict=True)
        return [piece for piece, is_unused in pieces if len(piece) > 1 or not is_unused]

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        return self._encode_within(text, None, allow_special=allow_special)

    def _encode_within(
        self, text: str, max_tokens: int | None, *, allow_special: bool
    ) -> list[int]:
        splitter = self._special_split if allow_special else self._plain_split
        return self._encode_parts([text] if splitter is None else splitter.split(text), max_tokens)

    def _encode_trusted(self, text: str, max_tokens: int | None, trust: Trust) -> list[int]:
        marks = self._marks(trust.template)
        splitter = SpecialText({**self._added_ids, **marks}, marks)
        return self._encode_parts(splitter.split(text, trust.characters), max_tokens)

    def _marks(self, template: str) -> dict[str, int]:
        return {**named_marks(self._added_ids, template), **self.special_tokens}

    def _encode_parts(self, parts: Iterable[str | int], max_tokens: int | None) -> list[int]:
        ids: list[int] = []
        processor = self._processor  # `_continuation` after a special token: may add no space
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                for short in self._parts_of(part, processor):
                    ids += processor.encode(short)
                    if max_tokens is not None and len(ids) > max_tokens:
                        return ids
            processor = self._continuation
        return ids

    def _parts_of(self, text: str, processor: Any) -> Iterable[str]:
        if not is_long(text):
            return [text]
        adds_space = self._adds_space and processor is self._processor
        cuts = self._cuts[adds_space]
        return [text] if cuts is None else cuts.parts(text)

    @property
    def base_size(self) -> int:
        return self._piece_count

    def raw_token(self, token_id: int) -> str | None:
        added = self._added.get(token_id)
        if added is not None:
            return added.decode()
        if 0 <= token_id < self._piece_count:
            return str(self._processor.id_to_piece(token_id))
        return self._special_text.get(token_id)

    def _piece(self, token_id: int) -> bytes | None:
        piece = self._pieces.get(token_id)
        if piece is not None:
            return piece
        piece = self._added.get(token_id)
        if piece is not None:
            return piece
        if token_id >= self._piece_count:
            return None
        text: str = self._processor.id_to_piece(token_id)
        byte = byte_of_token(text) if self._processor.is_byte(token_id) else None
        piece = text.replace(META_SPACE, " ").encode() if byte is None else bytes([byte])
        self._pieces[token_id] = piece
        return piece


def open_processor(model: bytes, where: object) -> Any:
    """Loads a serialized model as the library's processor."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        is_loaded = processor.LoadFromSerializedProto(model)
        processor.id_to_piece(list(range(processor.get_piece_size())))  # are they all UTF-8?
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(
            "not a model that the sentencepiece library can read",
            where=where,
            got=str(error)[:200],
            next_step=_NEXT_STEP,
        ) from error
    if not is_loaded or processor.get_piece_size() == 0:
        raise TokenizerError("the sentencepiece model is empty", where=where, next_step=_NEXT_STEP)
    return processor


def read_model(path: Path) -> bytes:
    data = read_bytes(path, TokenizerError, FILE_LIMIT_BYTES)
    check_no_lfs_pointer(data, TokenizerError, path)
    return data


def special_pieces(processor: Any) -> dict[str, int]:
    """Ids of a model's control pieces and unknown piece, by text."""
    ids = list(range(processor.get_piece_size()))
    flags = zip(ids, processor.is_control(ids), processor.is_unknown(ids), strict=True)
    return {
        processor.id_to_piece(number): number
        for number, is_control, is_unknown in flags
        if is_control or is_unknown
    }
