"""Options of the engine beyond sampling: cache precision, drafts, adapters, constraints.

Declarations and what they mean; no torch until something is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import prompts
from exl_core.cache.format import KVFormat
from exl_core.errors import RequestError

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
        help="A smaller model with the same vocabulary that guesses ahead; the text stays the "
        "same, and comes faster where the guesses are good.",
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
        help="Guess ahead from what stands in the text already: no second model; good for text "
        "that repeats itself.",
        rich_help_panel=_DRAFTS,
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="DIR",
        help="A PEFT adapter; DIR=0.5 applies it at half strength. May be given several times.",
        show_default=False,
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="The text is JSON that this schema allows.",
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
        help="The text is one that this Lark grammar derives.",
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


def parse_loras(given: Sequence[str] | None) -> tuple[tuple[Path, float], ...]:
    """DIR or DIR=SCALE each. A directory whose name holds '=' is given with its scale."""
    parsed = []
    for text in given or ():
        folder, mark, scale = text.rpartition("=")
        if not mark or Path(text).exists():
            parsed.append((Path(text), 1.0))
            continue
        try:
            parsed.append((Path(folder), float(scale)))
        except ValueError as error:
            raise RequestError(
                "--lora has no number after '='", expected="DIR=SCALE", got=text
            ) from error
    return tuple(parsed)


def constraints_of(
    json_schema: str | None, regex: str | None, grammar: str | None
) -> tuple[Constraint, ...]:
    """What the text must look like; files are read here."""
    constraints: list[Constraint] = []
    if json_schema is not None:
        from exl_core.constrain.json_schema import JsonSchema

        constraints.append(JsonSchema(prompts.read_text_file(Path(json_schema))))
    if regex is not None:
        from exl_core.constrain.regex import Regex

        constraints.append(Regex(regex))
    if grammar is not None:
        from exl_core.constrain.grammar import Grammar

        constraints.append(Grammar(prompts.read_text_file(Path(grammar))))
    return tuple(constraints)
