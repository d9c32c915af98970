"""Options of the engine beyond sampling: cache precision, drafts, adapters, constraints.

Declarations and what they mean; no torch until something is opened.
"""

from __future__ import annotations

import json
import math
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import prompts
from exl_cli.interrupt import exits_at_once
from exl_core.cache.format import KVFormat, parse_cache_type
from exl_core.errors import RequestError
from exl_core.files import read_text_file

if TYPE_CHECKING:
    from exl_core.constrain.filter import Constraint

DEFAULT_DRAFT_TOKENS = 4
DEFAULT_NGRAM_TOKENS = 8

_DRAFTS = "Drafts"
_CONSTRAINTS = "Constraints"

DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="A smaller model with the same vocabulary that guesses ahead, for the model to check: "
        "faster where the guesses are good, and with --temp 0 the same text.",
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
        help=f"Guess at most N tokens at a time. Without it: {DEFAULT_DRAFT_TOKENS}, with --ngram "
        f"{DEFAULT_NGRAM_TOKENS}; fewer, or none, where guessing does not pay.",
        rich_help_panel=_DRAFTS,
    ),
]
Ngram = Annotated[
    bool,
    typer.Option(
        "--ngram",
        help="Guess ahead from what stands in the text already, without a second model: good for "
        "text that repeats itself.",
        rich_help_panel=_DRAFTS,
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="DIR",
        help="A LoRA adapter, as PEFT saves it; DIR=0.5 applies it at half strength. May be given "
        "several times.",
        show_default=False,
        rich_help_panel="Adapters",
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="The text is JSON that the schema in FILE allows.",
        rich_help_panel=_CONSTRAINTS,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(
        "--regex",
        metavar="PATTERN",
        help="The whole text matches this regular expression.",
        rich_help_panel=_CONSTRAINTS,
    ),
]
Grammar = Annotated[
    str | None,
    typer.Option(
        "--grammar",
        metavar="FILE",
        help="The text is one that the Lark grammar in FILE derives; its first rule is 'start'.",
        rich_help_panel=_CONSTRAINTS,
    ),
]


@dataclass(frozen=True, slots=True)
class EngineChoices:
    """What the options above come to, checked as far as that goes without a model."""

    kv_format: KVFormat = KVFormat.FP16
    draft_model: str | None = None
    draft_tokens: int | None = None
    ngram: bool = False
    loras: tuple[tuple[Path, float], ...] = ()

    def __post_init__(self) -> None:
        if self.ngram and self.draft_model is not None:
            raise RequestError(
                "two ways to guess ahead are asked for",
                expected="--draft-model or --ngram",
                got="both",
            )
        if self.draft_tokens is not None and not self.ngram and self.draft_model is None:
            raise RequestError(
                "--draft-tokens without anything that guesses",
                next_step="Add --ngram, or --draft-model MODEL.",
            )


def choices_of(
    cache_type: str,
    lora: Sequence[str] | None,
    draft_model: str | None,
    draft_tokens: int | None,
    *,
    ngram: bool,
) -> EngineChoices:
    """What the options say, taken apart."""
    return EngineChoices(
        parse_cache_type(cache_type), draft_model, draft_tokens, ngram, parse_loras(lora)
    )


def parse_loras(given: Sequence[str] | None) -> tuple[tuple[Path, float], ...]:
    """DIR or DIR=SCALE each. A directory whose name holds '=' is given with its scale."""
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
    """What the text must look like. Files are read here; what of them only a model can tell, such
    as whether its tokens can write it, comes later."""
    schema_text = None if json_schema is None else _schema_text(Path(json_schema))
    grammar_text = None if grammar is None else read_text_file(Path(grammar))
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
        constraints.append(Grammar(grammar_text))
    return tuple(constraints)


def _schema_text(path: Path) -> str:
    text = read_text_file(path)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("the JSON schema is not JSON", where=path, got=str(error)) from error
    return text
