"""Options of the engine beyond sampling: cache precision, drafts, adapters, constraints.

Declares the options and parses their values. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import prompts
from exl_cli.interrupt import exits_at_once
from exl_core.cache.format import KVFormat, parse_cache_type
from exl_core.errors import RequestError
from exl_core.files import CONFIG_LIMIT_BYTES, read_text_file
from exl_core.speculate.controller import (
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_MTP_TOKENS,
    DEFAULT_NGRAM_TOKENS,
)

if TYPE_CHECKING:
    from exl_core.constrain.filter import Constraint

DEFAULT_CACHE_TOKENS = 32768
"""Cache of the commands that run many requests at the same time, or one context if that is more."""

_RULE = re.compile(r"\s*[A-Za-z_][\w-]*\s*(::=|:\s)")
_DRAFTS = "Drafts"
_CONSTRAINTS = "Constraints"

DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="Smaller model with the same vocabulary, for speculative decoding: it drafts tokens "
        "that the model verifies. With --temp 0 the text stays the same.",
        rich_help_panel=_DRAFTS,
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        metavar="N",
        min=1,
        max=64,
        help="Maximum number of draft tokens per step. Default: "
        f"{DEFAULT_DRAFT_TOKENS}, with --mtp {DEFAULT_MTP_TOKENS}, with --ngram "
        f"{DEFAULT_NGRAM_TOKENS}. exl drafts fewer, or none, where drafting does not pay.",
        rich_help_panel=_DRAFTS,
    ),
]
Ngram = Annotated[
    bool,
    typer.Option(
        "--ngram",
        help="Draft tokens from earlier occurrences of the latest tokens (n-grams), without a "
        "second model. Pays for text that repeats itself.",
        rich_help_panel=_DRAFTS,
    ),
]
Mtp = Annotated[
    bool,
    typer.Option(
        "--mtp",
        help="Draft tokens with the model's own layer for multi-token prediction, which "
        "checkpoints of GLM-4.5 and later, DeepSeek V3, Qwen3-Next and Qwen3.5 have.",
        rich_help_panel=_DRAFTS,
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="DIR",
        help="LoRA adapter in PEFT format. DIR=0.5 applies it at half strength. May be given "
        "several times.",
        show_default=False,
        rich_help_panel="Adapters",
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="SCHEMA",
        help="Constrain the text to JSON that matches this schema: a file, or the schema itself, "
        "which begins with '{'.",
        rich_help_panel=_CONSTRAINTS,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(
        "--regex",
        metavar="PATTERN",
        help="Constrain the whole text to this regular expression.",
        rich_help_panel=_CONSTRAINTS,
    ),
]
Grammar = Annotated[
    str | None,
    typer.Option(
        "--grammar",
        metavar="FILE",
        help="Constrain the text to the grammar in FILE: Lark with the start rule 'start', or "
        "llama.cpp's GBNF. A grammar itself may be given too.",
        rich_help_panel=_CONSTRAINTS,
    ),
]


@dataclass(frozen=True, slots=True)
class EngineChoices:
    """Parsed engine options, checked as far as possible without a model."""

    kv_format: KVFormat = KVFormat.FP16
    draft_model: str | None = None
    draft_tokens: int | None = None
    ngram: bool = False
    loras: tuple[tuple[Path, float], ...] = ()
    mtp: bool = False

    def __post_init__(self) -> None:
        given = {
            "--draft-model": self.draft_model is not None,
            "--mtp": self.mtp,
            "--ngram": self.ngram,
        }
        names = [name for name, is_given in given.items() if is_given]
        if len(names) > 1:
            raise RequestError(
                "two kinds of drafts are selected",
                expected="--draft-model, --mtp or --ngram",
                got=" and ".join(names),
            )
        if self.draft_tokens is not None and not names:
            raise RequestError(
                "--draft-tokens without a drafter",
                next_step="Add --mtp, --ngram, or --draft-model MODEL.",
            )

    @property
    def has_drafts(self) -> bool:
        """Whether a kind of drafts is selected."""
        return self.ngram or self.mtp or self.draft_model is not None

    @property
    def longest_draft(self) -> int:
        """Most tokens of a draft."""
        default = DEFAULT_NGRAM_TOKENS if self.ngram else DEFAULT_DRAFT_TOKENS
        return self.draft_tokens or (DEFAULT_MTP_TOKENS if self.mtp else default)


def choices_of(
    cache_type: str,
    lora: Sequence[str] | None,
    draft_model: str | None,
    draft_tokens: int | None,
    *,
    ngram: bool,
    mtp: bool,
) -> EngineChoices:
    """Parse the values of the options."""
    kv_format, loras = parse_cache_type(cache_type), parse_loras(lora)
    return EngineChoices(kv_format, draft_model, draft_tokens, ngram, loras, mtp)


def parse_loras(given: Sequence[str] | None) -> tuple[tuple[Path, float], ...]:
    """Parse `DIR` or `DIR=SCALE`. A directory whose name contains '=' needs its scale, unless the
    whole text names an existing path."""
    parsed = []
    for text in given or ():
        folder, mark, scale = text.rpartition("=")
        if not mark or os.path.exists(text):  # noqa: PTH110 - Path raises for names that are too long
            parsed.append((Path(text), 1.0))
            continue
        if not folder:
            raise RequestError("--lora names no directory", expected="DIR or DIR=SCALE", got=text)
        parsed.append((Path(folder), _scale(text, scale)))
    return tuple(parsed)


def _scale(text: str, scale: str) -> float:
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RequestError("--lora has no number after '='", expected="DIR or DIR=SCALE", got=text)
    return value


def constraints_of(
    json_schema: str | None, regex: str | None, grammar: str | None
) -> tuple[Constraint, ...]:
    """Constraints on the text. This function reads the files. Checks that need a model come later,
    for example whether its tokens can form a matching text."""
    schema_text = None if json_schema is None else _schema_text(json_schema)
    grammar_text = None if grammar is None else _grammar_text(grammar)
    if schema_text is None and regex is None and grammar_text is None:
        return ()
    with exits_at_once():
        from exl_core.constrain.grammar import Grammar
        from exl_core.constrain.json_schema import JsonSchema
        from exl_core.constrain.regex import Regex
    constraints: list[Constraint] = []
    if schema_text is not None:
        constraints.append(JsonSchema(schema_text))
    if regex is not None:
        prompts.check_encodable(regex, "the regular expression")
        constraints.append(Regex(regex))
    if grammar_text is not None:
        from exl_cli.gbnf import is_gbnf, lark_of

        lark = lark_of(grammar_text) if is_gbnf(grammar_text) else grammar_text
        constraints.append(Grammar(lark))
    return tuple(constraints)


def _grammar_text(given: str) -> str:
    """The grammar in a file, or `given` itself if it has a rule."""
    is_inline = _RULE.match(given) is not None
    return given if is_inline else _file_text("--grammar", given)


def _schema_text(given: str) -> str:
    """The schema in a file, or `given` itself if it is an object."""
    is_inline = given.lstrip().startswith("{")
    text = given if is_inline else _file_text("--json-schema", given)
    where = "--json-schema" if is_inline else given
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("the JSON schema is not JSON", where=where, got=str(error)) from error
    return text


def _file_text(option: str, given: str) -> str:
    if not given:  # as a path, it would be the current directory
        raise RequestError(f"{option} is empty", next_step="Name a file, or leave the option out.")
    return read_text_file(Path(given), CONFIG_LIMIT_BYTES)
