"""Options that change a model while it is loaded. Every command that loads a model takes them.

Declarations only; imports no torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exl_core.errors import RequestError, printable
from exl_core.session.split import parse_reserve

if TYPE_CHECKING:
    from collections.abc import Iterable

    from exl_core.session.load import LoadOptions

_CHANGES = "Changes to the model"

RopeScale = Annotated[
    float | None,
    typer.Option(
        "--rope-scale",
        metavar="X",
        help="Divide all positions by X (linear RoPE scaling). Replaces the model's own scaling.",
        rich_help_panel=_CHANGES,
    ),
]
RopeAlpha = Annotated[
    float | None,
    typer.Option(
        "--rope-alpha",
        metavar="X",
        help="Raise the RoPE base by the NTK factor X: 2.6 for about twice the context.",
        rich_help_panel=_CHANGES,
    ),
]
RopeYarn = Annotated[
    float | None,
    typer.Option(
        "--rope-yarn",
        metavar="X",
        help="Stretch the model's own context by the factor X with YaRN.",
        rich_help_panel=_CHANGES,
    ),
]
LoadIn4Bit = Annotated[
    bool,
    typer.Option(
        "--load-in-4bit",
        help="Round float weights of the layers to 4 bits while they are read, in groups of 64 "
        "(4.5 bits per weight). 'exl convert' yields better models.",
        rich_help_panel=_CHANGES,
    ),
]
ExpertsPerToken = Annotated[
    int | None,
    typer.Option(
        "--experts-per-token",
        metavar="N",
        min=1,
        help="Of a model with experts, use N for each token instead of the model's own number.",
        rich_help_panel=_CHANGES,
    ),
]
EmbeddingsOn = Annotated[
    Literal["device", "cpu"],
    typer.Option(
        "--embeddings-on",
        help="cpu: on a GPU, keep the embedding in the host's memory. For models whose head is "
        "another matrix.",
        rich_help_panel=_CHANGES,
    ),
]

Reserve = Annotated[
    str,
    typer.Option(
        "--reserve",
        metavar="GB",
        help="GB that stay free on each GPU beside the model and its cache, or one number for each "
        "GPU: '1.5,0.5'. Without a GPU, one number for the machine's memory. A model that does "
        "not leave so much free is refused.",
        rich_help_panel="Running",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How the files of a model are changed while it is loaded, and the memory that must be left."""

    rope_scale: RopeScale = None
    rope_alpha: RopeAlpha = None
    rope_yarn: RopeYarn = None
    experts_per_token: ExpertsPerToken = None
    load_in_4bit: LoadIn4Bit = False
    embeddings_on: EmbeddingsOn = "device"
    reserve: Reserve = "0"

    def load_options(self) -> LoadOptions:
        """`LoadOptions` with these options. Raises RequestError if they contradict. Imports
        torch."""
        from exl_core.session.load import LoadOptions

        parse_reserve(self.reserve)
        if self.rope_scale is not None and self.rope_yarn is not None:
            raise RequestError(
                "two ways to stretch the positions",
                expected="--rope-scale or --rope-yarn",
                got="both",
            )
        return LoadOptions(
            rope_factor=self.rope_scale,
            rope_alpha=self.rope_alpha,
            yarn_factor=self.rope_yarn,
            experts_per_token=self.experts_per_token,
            load_in_4bit=self.load_in_4bit,
            embeddings_on=self.embeddings_on,
            reserve=self.reserve,
            is_command=True,
        )


def print_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        if sys.stderr is not None:
            print(f"exl: warning: {printable(warning)}", file=sys.stderr, flush=True)
