"""Tokenizers based on the `tokenizers` library: from a `tokenizer.json`, or BPE from a GGUF file.

Owns the switch that decides whether the text of a special token becomes that token, and the bytes
of each token. Ids of control tokens are passed in (`control_ids.py`, `gguf_vocab.py`). The
library's post-processor is never used, because `Tokenizer.encode` adds BOS.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl_core.errors import ContextLengthError, TokenizerError
from exl_core.files import check_no_lfs_pointer, read_bytes
from exl_core.tokenizer.base import ControlIds, Tokenizer
from exl_core.tokenizer.bpe_rules import BpeRules, bpe_rules
from exl_core.tokenizer.control_ids import FILE_LIMIT_BYTES, DeclaredToken
from exl_core.tokenizer.decoders import PieceRule, piece_rule
from exl_core.tokenizer.library import check_growth_of_json, library_errors
from exl_core.tokenizer.long_text import TokenLengths, is_long
from exl_core.tokenizer.special_text import SpecialText, Trust, named_marks

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SHORT_CHARS = 4 * 1024  # takes about 1 ms; `encode_batch_fast` costs a thread switch


class LibraryTokenizer(Tokenizer):
    """Tokenizer based on the `tokenizers` library."""

    def __init__(self, backend: Backend, rule: PieceRule, control: ControlIds, where: str) -> None:
        added = backend.get_added_tokens_decoder()
        special = {str(token.content): number for number, token in added.items() if token.special}
        super().__init__(control, special, where)
        self.kind = type(backend.model).__name__.lower()
        self._backend = backend
        self._hidden: dict[frozenset[str], tuple[Backend, dict[str, str]]] = {}
        self._mark_splits: dict[str, tuple[dict[str, int], SpecialText]] = {}
        self._lock = threading.Lock()
        self._rule = rule
        self._added = {number: str(token.content) for number, token in added.items()}
        self._pieces: dict[int, bytes] = {}
        self._vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._model_unk_id = model_unk_id(backend)
        self._forbidden = frozenset(special.values()) - {self._model_unk_id}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def leading_spaces_dropped(self) -> int:
        return self._rule.dropped_spaces

    def as_json(self) -> str:
        """Content of an equivalent `tokenizer.json`."""
        return str(self._backend.to_str())

    @property
    def _token_lengths(self) -> TokenLengths | None:
        return self._rules.lengths

    @cached_property
    def _rules(self) -> BpeRules:
        return bpe_rules(self._backend)

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        return self._encode_within(text, None, allow_special=allow_special)

    def _encode_within(
        self, text: str, max_tokens: int | None, *, allow_special: bool
    ) -> list[int]:
        ids = self._encode_with(self._backend, text, max_tokens, allow_special=allow_special)
        if allow_special or self._forbidden.isdisjoint(ids):
            return ids
        # The model, not the list of added tokens, found a special token in the text. Unigram and
        # word vocabularies contain special tokens beside ordinary pieces.
        hidden, _ = self._hiding(self.special_tokens)
        return self._encode_with(hidden, text, max_tokens, allow_special=False)

    def _encode_trusted(self, text: str, max_tokens: int | None, trust: Trust) -> list[int]:
        marks, splitter = self._marks_and_split(trust.template)
        trusted = list(splitter.places(text, trust.characters))
        if trusted == list(splitter.places(text)):
            ids = self._encode_within(text, max_tokens, allow_special=True)
            # A normalizer may turn text into a mark that the text does not spell.
            numbers = frozenset(marks.values()) - {self._model_unk_id}
            if [i for i in ids if i in numbers] == [marks[mark] for _, mark in trusted]:
                return ids
        # A copy of the tokenizer knows the marks by secret names: no text can spell them, and what
        # the library does around a mark (added or absorbed spaces) stays the same.
        hidden, names = self._hiding(marks)
        parts: list[str] = []
        start = 0
        for position, mark in trusted:
            parts += [text[start:position], names[mark]]
            start = position + len(mark)
        parts.append(text[start:])
        return self._encode_with(hidden, "".join(parts), max_tokens, allow_special=True)

    def prepare_trust(self, template: str) -> None:
        self._hiding(self._marks_and_split(template)[0])

    def _marks_and_split(self, template: str) -> tuple[dict[str, int], SpecialText]:
        found = self._mark_splits.get(template)
        if found is None:
            added = {text: number for number, text in self._added.items()}
            marks = {**named_marks(added, template), **self.special_tokens}
            found = self._mark_splits[template] = marks, SpecialText(marks, marks)
        return found

    def _encode_with(
        self, backend: Backend, text: str, max_tokens: int | None, *, allow_special: bool
    ) -> list[int]:
        if not is_long(text) or self._rules.cuts is None:
            return self._encode_part(backend, text, max_tokens, allow_special=allow_special)
        ids: list[int] = []
        for part in self._rules.cuts.parts(text):
            ids += self._encode_part(backend, part, max_tokens, allow_special=allow_special)
            if max_tokens is not None and len(ids) > max_tokens:
                break
        return ids

    def _encode_part(
        self, backend: Backend, text: str, max_tokens: int | None, *, allow_special: bool
    ) -> list[int]:
        # The switch is state of the backend and not an argument of its methods: hence the lock.
        with self._lock, library_errors("the tokenizer cannot write this text", self.where):
            backend.encode_special_tokens = not allow_special
            if len(text) <= _SHORT_CHARS:
                found = backend.encode(text, add_special_tokens=False)
            else:  # releases the GIL while it runs, unlike `encode`
                (found,) = backend.encode_batch_fast([text], add_special_tokens=False)
        if max_tokens is not None and len(found) > max_tokens:
            raise ContextLengthError(len(found), max_tokens)  # before making a list of the ids
        ids: list[int] = found.ids
        return ids

    def _hiding(self, marks: Mapping[str, int]) -> tuple[Backend, dict[str, str]]:
        """Copy of the backend that knows these tokens by secret names only, and the names."""
        key = frozenset(marks)
        with self._lock:
            if key not in self._hidden:
                names = {text: _secret_name(number) for text, number in marks.items()}
                with library_errors("the tokenizer cannot hide its special tokens", self.where):
                    self._hidden[key] = _renamed(self._backend, names), names
            return self._hidden[key]

    @property
    def base_size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=False))

    def raw_token(self, token_id: int) -> str | None:
        with library_errors("the tokenizer cannot read this id", self.where):
            token: str | None = self._backend.id_to_token(token_id)
        return token

    def _piece(self, token_id: int) -> bytes | None:
        piece = self._pieces.get(token_id)
        if piece is not None:
            return piece
        added = self._added.get(token_id)
        if added is not None:
            piece = self._rule.added_to_bytes(added)
        else:
            with library_errors("the tokenizer cannot read this id", self.where):
                token = self._backend.id_to_token(token_id)
            if token is None:
                return None
            piece = self._rule.to_bytes(token)
        self._pieces[token_id] = piece
        return piece


def open_backend(path: Path) -> Backend:
    """Loads a `tokenizer.json` as the library's tokenizer."""
    from tokenizers import Tokenizer as Backend

    try:
        data = read_bytes(path, TokenizerError, FILE_LIMIT_BYTES)
        check_no_lfs_pointer(data, TokenizerError, path)
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError("cannot read the tokenizer", where=path, got=error) from error
    check_growth_of_json(text, path)
    with library_errors("not a tokenizer.json that the tokenizers library can read", path):
        backend = Backend.from_str(text)
        backend.no_truncation()  # a file may enable truncation or padding, which change the ids
        backend.no_padding()
    return backend


def rule_of(backend: Backend, where: str) -> PieceRule:
    decoder = backend.decoder
    return piece_rule(None if decoder is None else _state_of(decoder), where)


def _state_of(part: Any) -> dict[str, object]:
    state: dict[str, object] = json.loads(part.__getstate__())
    return state


def probe_added_around(backend: Backend, where: Path) -> tuple[list[int], list[int]]:
    """Ids that the post-processor adds before and after a text."""
    with library_errors("the tokenizer cannot write a plain text", where):
        text = next((t for t in "a0 あ" if backend.encode(t, add_special_tokens=False).ids), "")
        plain = backend.encode(text, add_special_tokens=False).ids
        whole = backend.encode(text, add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def model_unk_id(backend: Backend) -> int | None:
    """Id of the unknown token, or None if this kind of model has none."""
    model = backend.model
    text = getattr(model, "unk_token", None)
    if text is not None:
        return backend.token_to_id(text)
    number: int | None = getattr(model, "unk_id", None)
    return number


def add_declared_tokens(backend: Backend, declared: Sequence[DeclaredToken], where: Path) -> None:
    """Adds tokens, or their `special` flag, from the files beside `tokenizer.json`."""
    from tokenizers import AddedToken

    added = backend.get_added_tokens_decoder()
    for token in sorted(declared, key=lambda token: token.token_id):
        present = backend.token_to_id(token.text)
        known = added.get(token.token_id)
        was_special = None if known is None else bool(known.special)
        is_special = token.is_special
        if is_special is None:  # not stated: as in the tokenizer, or special if it is not there
            is_special = bool(was_special) if present is not None else True
        if present is None or was_special not in (None, is_special):
            with library_errors(f"token {token.text!r} cannot be added", where):
                new = AddedToken(token.text, special=is_special, normalized=False)
                (backend.add_special_tokens if is_special else backend.add_tokens)([new])
            present = backend.token_to_id(token.text)
        if present != token.token_id:
            raise TokenizerError(
                f"token {token.text!r} is declared with an id that the tokenizer does not give it",
                where=where,
                expected=token.token_id,
                got=present,
                next_step="The files of the tokenizer do not belong together",
            )


def _secret_name(number: int) -> str:
    """Private-use characters around it are no letters, so that nothing joins with the name."""
    return f"\ue000{secrets.token_hex(16)}-{number}\ue001"


def _renamed(backend: Backend, names: Mapping[str, str]) -> Backend:
    """Copies the backend with other names for some tokens, which keep their ids.

    Merges that would produce one of these tokens are removed.
    """
    from tokenizers import Tokenizer as Backend

    data = json.loads(backend.to_str())
    for added in data["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    model = data["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            pair
            for pair in model["merges"]
            if not {pair[0], pair[1], pair[0] + pair[1]} & names.keys()
        ]
    data["post_processor"] = None  # unused, and it may name special tokens
    return Backend.from_str(json.dumps(data))
