"""ExLlamaV2Tokenizer: the tokenizer of a model with tensors, padding and tables of the old kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from exl_core.errors import TokenizerError
from exl_core.files import read_optional_json_object
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.batch import encode_with_aliases, padding_id
from exl_core.tokenizer.pieces import CharTrie, Pieces
from exl_exllamav2.config import ExLlamaV2Config
from exl_exllamav2.errors import OldAssertionError, old_types


class InnerTokenizer:
    """The vocabulary as integrations read it: raw spellings, and ids without added tokens."""

    def __init__(self, tokenizer: Tokenizer, *, reads_special: bool) -> None:
        self._tokenizer = tokenizer
        self.reads_special = reads_special
        """Whether special tokens in a text are tokens, whatever a program asks for."""

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Ids by raw spelling."""
        return {piece: i for i, piece in enumerate(self.enumerate_tokens()) if piece}

    def vocab_size(self) -> int:
        return self._tokenizer.base_size

    def id_to_piece(self, idx: int) -> str:
        return self._tokenizer.raw_token(int(idx)) or ""

    def piece_to_id(self, text: str) -> int | None:
        return self.vocab.get(text)

    def enumerate_tokens(self) -> Iterator[str]:
        for token_id in range(self.vocab_size()):
            yield self.id_to_piece(token_id)

    def encode(self, text: str | Sequence[str]) -> Any:
        if isinstance(text, str):
            return self._tokenizer.encode(text, allow_special=self.reads_special)
        return [self.encode(one) for one in text]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def unk_id(self) -> int | None:
        return self._tokenizer.unk_id

    def bos_id(self) -> int | None:
        return self._tokenizer.bos_id

    def eos_id(self) -> int | None:
        return next(iter(self._tokenizer.eos_ids), None)

    def pad_id(self) -> int | None:
        return self._tokenizer.pad_id

    def unk_token(self) -> str | None:
        return _text_of(self._tokenizer, self.unk_id())

    def bos_token(self) -> str | None:
        return _text_of(self._tokenizer, self.bos_id())

    def eos_token(self) -> str | None:
        return _text_of(self._tokenizer, self.eos_id())

    def space_symbol(self) -> str:
        return "Ġ" if "Ġ" in self.vocab else "▁"


class ExLlamaV2Tokenizer:
    """Tokenizer of the model that `config` names."""

    unspecial_piece_to_id: ClassVar[dict[str, int]] = {}
    unspecial_id_to_piece: ClassVar[dict[int, str]] = {}
    extended_piece_to_id: dict[str, int] = {}  # noqa: RUF012 - programs assign to the class
    extended_id_to_piece: dict[int, str] = {}  # noqa: RUF012 - programs assign to the class
    max_cached_strings = 100

    def __init__(
        self,
        config: ExLlamaV2Config,
        lazy_init: bool = True,
        force_json: bool = False,
        force_spm: bool = False,
    ) -> None:
        self.config = config
        files = config.opened()
        if force_spm and not (files.path / "tokenizer.model").is_file():
            raise OldAssertionError("force_spm, but there is no tokenizer.model")
        with old_types():
            self.exl = files.tokenizer
            is_dir = files.path.is_dir()
            path = files.path / "tokenizer_config.json"
            self.tokenizer_config_dict: dict[str, Any] | None = (
                dict(read_optional_json_object(path, TokenizerError)) or None if is_dir else None
            )
            template = files.path / "chat_template.jinja"
            if self.tokenizer_config_dict and template.is_file():  # where newer models have it
                text = template.read_text(encoding="utf-8")
                self.tokenizer_config_dict.setdefault("chat_template", text)
        # exllamav2 passes texts to the library of tokenizer.json, which knows the special tokens.
        # Programs have the choice with tokenizer.model only.
        reads_special = not is_dir or (files.path / "tokenizer.json").is_file()
        inner = InnerTokenizer(self.exl, reads_special=reads_special and not force_spm)
        self.tokenizer_model = self.tokenizer = inner
        self.pieces = Pieces(self.exl)
        self.extended_piece_to_id = dict(self.exl.special_tokens)
        self.extended_id_to_piece = {i: text for text, i in self.extended_piece_to_id.items()}
        self.actual_vocab_size = self.exl.vocab_size
        self.bos_token_id = self.exl.bos_id
        self.eos_token_id = next(iter(self.exl.eos_ids), None)
        self.eos_token_ids = list(self.exl.eos_ids)
        self.pad_token_id = padding_id(self.exl)
        self.unk_token_id = self.exl.unk_id
        self.bos_token = _text_of(self.exl, self.bos_token_id)
        self.eos_token = _text_of(self.exl, self.eos_token_id)
        self.unk_token = _text_of(self.exl, self.unk_token_id)
        self.pad_token = _text_of(self.exl, self.exl.pad_id) or ""
        self.newline_token_id = self._last_id("\n")
        self.space_token_id = self._last_id(" ")
        self._encode_cached = lru_cache(self.max_cached_strings)(self.encode)
        if not lazy_init:
            self.get_id_to_piece_list()
            self.get_id_to_piece_list(True)

    def encode(
        self,
        text: str | Sequence[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings: Sequence[Any] | None = None,
    ) -> Any:
        """Ids int64 [texts, n], padded on the left; `return_offsets` adds offsets, int32 [texts].

        Special tokens in a text become plain text only if `encode_special_tokens` is False and the
        model has a `tokenizer.model` alone. `embeddings`: objects with `text_alias` and `get_ids`.
        """
        texts = [text] if isinstance(text, str) else list(text)
        aliases = {one.text_alias: one.get_ids() for one in embeddings or ()}
        bos = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        eos = [self.eos_token_id] if add_eos and self.eos_token_id is not None else []
        allows = self.reads_special(encode_special_tokens)
        with old_types():
            rows = [
                [
                    *bos,
                    *encode_with_aliases(self.exl, one, aliases, allow_special=allows),
                    *eos,
                ]
                for one in texts
            ]
        longest = max(map(len, rows), default=0)
        padded = [[self.pad_token_id] * (longest - len(row)) + row for row in rows]
        ids = torch.tensor(padded, dtype=torch.long).view(len(rows), longest)
        if not return_offsets:
            return ids
        return ids, torch.tensor([len(row) - longest for row in rows], dtype=torch.int)

    def decode(self, ids: Any, decode_special_tokens: bool = False) -> Any:
        """Text of ids [n], or a list of texts for ids [texts, n] or for a list of tensors."""
        if isinstance(ids, list):
            return [self.decode(one, decode_special_tokens) for one in ids]
        if not isinstance(ids, Tensor):
            raise OldAssertionError("ids to decode are no tensor", got=type(ids).__name__)
        if ids.dim() == 1:
            return self._decode(ids.tolist(), shows_special=decode_special_tokens)
        return [self._decode(row, shows_special=decode_special_tokens) for row in ids.tolist()]

    def _decode(self, ids: list[int], *, shows_special: bool) -> str:
        is_shown = shows_special and self.pad_token_id == self.eos_token_id
        dropped = None if is_shown else self.pad_token_id
        known = [i for i in ids if 0 <= i < self.actual_vocab_size and i != dropped]
        return self.exl.decode(known, skip_special=not shows_special)

    def single_id(self, token: str) -> int | None:
        return self.pieces.single_id(token)

    def single_token(self, token_id: int) -> Tensor:
        return torch.tensor([[token_id]], dtype=torch.long)

    def num_tokens(self, text: str) -> int:
        return len(self.encode_unspecial(text))

    def padding_mask(self, ids: Tensor) -> Tensor:
        """Half [texts, n]: minus infinity at padding, else 0."""
        mask = torch.zeros(ids.shape, dtype=torch.half)
        return mask.masked_fill_(ids == self.pad_token_id, -torch.inf)

    def get_vocab_size(self) -> int:
        return self.actual_vocab_size

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        return self._shown_pieces if include_special_tokens else self._plain_pieces

    def get_piece_to_id_dict(self) -> dict[str, int]:
        return self.pieces.id_of_text

    def get_id_to_ord_list(self) -> list[int]:
        return list(self.pieces.byte_values)

    @cached_property
    def _plain_pieces(self) -> list[str]:
        return list(self.pieces.texts)

    @cached_property
    def _shown_pieces(self) -> list[str]:
        return list(self.pieces.texts_with_special)

    def get_prefix_to_ids_dict(self) -> dict[str, list[int]]:
        return {text: self.pieces.starting_with(text) for text in self.pieces.id_of_text}

    def get_prefix_id_to_ids_dict(self) -> dict[int, list[int]]:
        return {i: self.pieces.replacements(i) for i in range(self.actual_vocab_size)}

    def get_char_trie(self) -> CharTrie:
        return self.pieces.trie

    def get_char_trie_ci(self) -> CharTrie:
        return self.pieces.lower_trie

    def cached_encode_str(self, text: str) -> Any:
        return self._encode_cached(text)

    def encode_special(self, text: str) -> list[int]:
        return self.exl.encode(text, allow_special=True)

    def encode_unspecial(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer_model.encode(text)
        return ids

    def reads_special(self, is_asked: bool) -> bool:
        """Whether special tokens in a text become tokens, for a program's choice."""
        return is_asked or self.tokenizer_model.reads_special

    def hf_render_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Text of a conversation in the model's own chat template."""
        template = self.config.opened().template
        if template is None:
            raise OldAssertionError("the model has no chat template", where=self.config.model_dir)
        with old_types():
            return template.render(
                messages, add_generation_prompt=add_generation_prompt, **template_kwargs
            )

    def hf_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        embeddings: Sequence[Any] | None = None,
        **template_kwargs: Any,
    ) -> Tensor:
        """Ids int64 [1, n] of a conversation in the model's own chat template."""
        text = self.hf_render_chat_template(messages, add_generation_prompt, **template_kwargs)
        ids: Tensor = self.encode(text, encode_special_tokens=True, embeddings=embeddings)
        return ids

    def _last_id(self, text: str) -> int | None:
        ids = self.encode_unspecial(text)
        return ids[-1] if ids else None


def _text_of(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_text(token_id)
