"""Which ids have a role, from the JSON files that lie in a model directory.

Owns the reading order: a role's token is named by `tokenizer_config.json` (then
`special_tokens_map.json`), else numbered by `config.json`. EOS is the exception, because a model
may end with any of several tokens and the files disagree about which: every id that
`generation_config.json`, `config.json` (also under `text_config`) or the tokenizer's files name is
one, in that order. Nothing is assumed that no file says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from exl_core.errors import TokenizerError
from exl_core.files import read_optional_json_object

Json = Mapping[str, object]
FILE_LIMIT_BYTES = 256 * 2**20  # of a tokenizer; the largest known are below 40 MiB
_ID_DIGITS = 10  # no vocabulary needs more, and a number of thousands of digits is no number


@dataclass(frozen=True, slots=True)
class DeclaredToken:
    """A token that a file beside the tokenizer declares; `is_special` None: it does not say."""

    text: str
    token_id: int
    is_special: bool | None


@dataclass(frozen=True, slots=True)
class SideFiles:
    """The files beside a tokenizer, parsed; {} where there is none."""

    folder: Path
    config: Json
    generation: Json
    tokenizer: Json
    special_map: Json
    added: Json

    def special_text(self, key: str) -> str | None:
        """The token that the tokenizer's own files name for a role such as 'bos_token'."""
        for source in (self.tokenizer, self.special_map):
            value = source.get(key)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str) and value:
                return value
        return None

    def declared_tokens(self) -> list[DeclaredToken]:
        """The tokens of `added_tokens.json` and of `added_tokens_decoder`, the latter deciding."""
        found = {
            number: DeclaredToken(text, number, None)
            for text, number in self.added.items()
            if isinstance(number, int)
        }
        decoder = self.tokenizer.get("added_tokens_decoder")
        for key, entry in (decoder if isinstance(decoder, Mapping) else {}).items():
            match entry:
                case {"content": str(text)} if _is_id(key):
                    special = entry.get("special", False) is True
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
        """What the model's files give for a key such as 'eos_token_id': a number or a list."""
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
                if number >= 0:  # -1 is how some files write "none"
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
    """The id of 'bos', 'unk' or 'pad'."""
    text = files.special_text(f"{role}_token")
    number = None if text is None else id_of(text)
    return number if number is not None else next(files.config_ids(f"{role}_token_id"), None)


def eos_ids(files: SideFiles, id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    """Every id that ends a text, each once."""
    found = list(files.config_ids("eos_token_id"))
    text = files.special_text("eos_token")
    number = None if text is None else id_of(text)
    if number is not None:
        found.append(number)
    return tuple(dict.fromkeys(found))
