"""Ids of the control tokens, from the JSON files of a model directory.

Owns the order of precedence. The token of a role (BOS, UNK, PAD) is named by
`tokenizer_config.json`, then by `special_tokens_map.json`; otherwise `config.json` gives its id.
EOS differs: a model may end with any of several tokens, and its files disagree about them.
Therefore every id that `generation_config.json`, `config.json` (also under `text_config`) or the
tokenizer's files name is an EOS id, in that order. There are no defaults: each id is read from a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from exl_core.errors import TokenizerError
from exl_core.files import read_optional_json_object

Json = Mapping[str, object]
FILE_LIMIT_BYTES = 256 * 2**20  # per tokenizer file; the largest known are below 40 MiB
_ID_DIGITS = 10  # enough for any vocabulary; rejects numbers of thousands of digits


@dataclass(frozen=True, slots=True)
class DeclaredToken:
    """Token declared by a file beside the tokenizer. `is_special` None: not stated."""

    text: str
    token_id: int
    is_special: bool | None


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Parsed JSON files beside a tokenizer. {} for a file that does not exist."""

    folder: Path
    config: Json
    generation: Json
    tokenizer: Json
    special_map: Json
    added: Json

    def special_text(self, key: str) -> str | None:
        """Text of the token that the tokenizer's files name for a key such as 'bos_token'."""
        for source in (self.tokenizer, self.special_map):
            value = source.get(key)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str) and value:
                return self._checked(value, key)
        return None

    def _checked(self, text: str, key: str) -> str:
        """Refuses half of a surrogate pair, which JSON can spell and no token can be."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text of a token of {key!r} holds half of a surrogate pair",
                where=self.folder,
                got=ascii(text)[:100],
            ) from error
        return text

    def declared_tokens(self) -> list[DeclaredToken]:
        """Tokens of `added_tokens.json` and `added_tokens_decoder`. The latter has precedence."""
        found = {
            number: DeclaredToken(self._checked(text, "added_tokens.json"), number, None)
            for text, number in self.added.items()
            if isinstance(number, int)
        }
        decoder = self.tokenizer.get("added_tokens_decoder")
        for key, entry in (decoder if isinstance(decoder, Mapping) else {}).items():
            match entry:
                case {"content": str(text)} if _is_id(key):
                    special = entry.get("special", False) is True
                    text = self._checked(text, "added_tokens_decoder")
                    found[int(key)] = DeclaredToken(text, int(key), special)
                case _:
                    raise TokenizerError(
                        "an entry of added_tokens_decoder is not a token",
                        where=self.folder / "tokenizer_config.json",
                        got=f"{key!r}: {entry!r}"[:200],
                    )
        return list(found.values())

    def flag(self, key: str) -> bool | None:
        value = self.tokenizer.get(key)
        return value if isinstance(value, bool) else None

    def config_ids(self, key: str) -> Iterator[int]:
        """Ids that the model's files give for a key such as 'eos_token_id': a number or a list."""
        text_config = self.config.get("text_config")
        inner = text_config if isinstance(text_config, Mapping) else {}
        for name, source in (
            ("generation_config.json", self.generation),
            ("config.json", self.config),
            ("config.json", inner),
        ):
            value = source.get(key)
            numbers = value if isinstance(value, list) else [] if value is None else [value]
            for number in numbers:
                if not isinstance(number, int) or isinstance(number, bool):
                    raise TokenizerError(
                        f"'{key}' is not a token id",
                        where=self.folder / name,
                        expected="a number or a list of numbers",
                        got=repr(value)[:200],
                    )
                if number >= 0:  # some files write -1 for "none"
                    yield number


def read_side_files(folder: Path) -> SideFiles:
    return SideFiles(
        folder=folder,
        config=read_optional_json_object(folder / "config.json", TokenizerError),
        generation=read_optional_json_object(folder / "generation_config.json", TokenizerError),
        tokenizer=read_optional_json_object(folder / "tokenizer_config.json", TokenizerError),
        special_map=read_optional_json_object(folder / "special_tokens_map.json", TokenizerError),
        added=read_optional_json_object(folder / "added_tokens.json", TokenizerError),
    )


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= _ID_DIGITS


def role_id(files: SideFiles, role: str, id_of: Callable[[str], int | None]) -> int | None:
    """Id of the token with role 'bos', 'unk' or 'pad'."""
    text = files.special_text(f"{role}_token")
    number = None if text is None else id_of(text)
    return number if number is not None else next(files.config_ids(f"{role}_token_id"), None)


def eos_ids(files: SideFiles, id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    """All ids that end a text, without duplicates."""
    found = list(files.config_ids("eos_token_id"))
    text = files.special_text("eos_token")
    number = None if text is None else id_of(text)
    if number is not None:
        found.append(number)
    return tuple(dict.fromkeys(found))
