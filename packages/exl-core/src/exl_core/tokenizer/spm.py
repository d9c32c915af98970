"""Tokenizers that run on the sentencepiece library: a `tokenizer.model`, and GGUF's "llama" kind.

The library knows nothing of special tokens in text: it never turns text into a control piece. So
they are cut out here when they are allowed, and tokens that were added to the model later (whose
ids lie above the library's) are always cut out, as the models were trained with.

Round trips: the library writes a space as U+2581, so a text that holds U+2581 itself comes back
with a space; a model that folds spaces or normalizes Unicode gives back the folded text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl_core.errors import TokenizerError
from exl_core.files import read_bytes
from exl_core.tokenizer.base import ControlIds, Tokenizer
from exl_core.tokenizer.control_ids import FILE_LIMIT_BYTES
from exl_core.tokenizer.decoders import META_SPACE, byte_of_token
from exl_core.tokenizer.special_text import SpecialText
from exl_core.tokenizer.spm_proto import without_dummy_prefix

_NEXT_STEP = "The file looks truncated or damaged; download it again"


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model with the tokens that were added around it."""

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
        """`special`: control tokens. `added`: tokens beyond the model that are ordinary text.

        `prefixes_every_run`: whether the space that the model puts before a text is put before the
        text after each special token too, or before the first only.
        """
        super().__init__(control, special, where)
        self._processor = processor
        self._added = {number: text.encode() for text, number in added.items()}
        self._plain_split = SpecialText(added) if added else None
        self._special_split = SpecialText({**added, **special})
        self._pieces: dict[int, bytes] = {}
        self._piece_count: int = processor.get_piece_size()
        known: list[int] = [self._piece_count - 1, *self._added, *special.values()]
        self._vocab_size = 1 + max(known)
        probe: str = processor.normalize("a  a")
        self._adds_space = probe.startswith(META_SPACE)
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

    def as_model(self) -> bytes:
        """What `tokenizer.model` would hold: the library's model, without what was added."""
        return bytes(self._processor.serialized_model_proto())

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        splitter = self._special_split if allow_special else self._plain_split
        ids: list[int] = []
        processor = self._processor  # the text after a special token may go without a space
        for part in [text] if splitter is None else splitter.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += processor.encode(part)
            processor = self._continuation
        return ids

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
    """The library's processor of a serialized model."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        is_loaded = processor.LoadFromSerializedProto(model)
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
    return read_bytes(path, TokenizerError, FILE_LIMIT_BYTES)


def special_pieces(processor: Any) -> dict[str, int]:
    """The control pieces and the unknown piece of a model."""
    ids = list(range(processor.get_piece_size()))
    flags = zip(ids, processor.is_control(ids), processor.is_unknown(ids), strict=True)
    return {
        processor.id_to_piece(number): number
        for number, is_control, is_unknown in flags
        if is_control or is_unknown
    }
