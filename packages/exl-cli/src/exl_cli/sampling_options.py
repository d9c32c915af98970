"""Options of the sampler, one for each setting that users adjust. Imports no torch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import typer

from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams

if TYPE_CHECKING:
    from exl_core.tokenizer.base import Tokenizer

_COMMON = "Sampling"
_CUTS = "Sampling: further cuts"
_TEMPERATURE = "Sampling: temperature"
_REPETITION = "Sampling: repetition"


def _check_share(share: float) -> float:
    """Check for 0 < share <= 1. Typer's `min` and `max` cannot exclude the lower bound."""
    if not 0.0 < share <= 1.0:
        raise typer.BadParameter(f"{share:g} is not above 0 and at most 1.")
    return share


Temperature = Annotated[
    float,
    typer.Option(
        "--temp",
        "--temperature",
        metavar="T",
        min=0.0,
        help="Temperature. 0 always picks the most probable token; higher values vary more.",
        rich_help_panel=_COMMON,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        metavar="K",
        min=0,
        help="Keep only the K most probable tokens; 0: all.",
        rich_help_panel=_COMMON,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        callback=_check_share,
        help="Keep only the most probable tokens whose probabilities sum to P, above 0; 1: all.",
        rich_help_panel=_COMMON,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        metavar="P",
        min=0.0,
        max=1.0,
        help="Keep only tokens at least P times as probable as the most probable one; 0: all.",
        rich_help_panel=_COMMON,
    ),
]
RepeatPenalty = Annotated[
    float,
    typer.Option(
        "--repeat-penalty",
        metavar="X",
        help="Make tokens that have occurred less probable; 1: no penalty.",
        rich_help_panel=_COMMON,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of the sampler; the same seed repeats the same text. Default: a random seed, "
        "which --json shows.",
        rich_help_panel=_COMMON,
    ),
]
TopA = Annotated[
    float,
    typer.Option(
        "--top-a",
        metavar="A",
        min=0.0,
        max=1.0,
        help="Keep only tokens with a probability of at least A times the square of the highest "
        "one; 0: all.",
        rich_help_panel=_CUTS,
    ),
]
TopNSigma = Annotated[
    float,
    typer.Option(
        "--top-n-sigma",
        metavar="N",
        min=0.0,
        max=100.0,
        help="Keep only tokens whose logit is at most N standard deviations below the highest "
        "one, whatever the temperature; 0: all.",
        rich_help_panel=_CUTS,
    ),
]
Typical = Annotated[
    float,
    typer.Option(
        "--typical",
        metavar="P",
        callback=_check_share,
        help="Typical sampling: keep the tokens whose surprise is closest to the entropy, up to a "
        "total probability of P; 1: all.",
        rich_help_panel=_CUTS,
    ),
]
TailFree = Annotated[
    float,
    typer.Option(
        "--tfs",
        metavar="Z",
        callback=_check_share,
        help="Tail-free sampling: cut the tail where the curve of sorted probabilities turns flat; "
        "1: no cut.",
        rich_help_panel=_CUTS,
    ),
]
XtcProbability = Annotated[
    float,
    typer.Option(
        "--xtc-probability",
        metavar="P",
        min=0.0,
        max=1.0,
        help="Probability of removing the most probable tokens (XTC), except the least probable of "
        "them; 0: never.",
        rich_help_panel=_CUTS,
    ),
]
XtcThreshold = Annotated[
    float,
    typer.Option(
        "--xtc-threshold",
        metavar="P",
        min=0.0,
        max=1.0,
        help="Probability from which XTC counts a token among the most probable ones.",
        rich_help_panel=_CUTS,
    ),
]
Mirostat = Annotated[
    float | None,
    typer.Option(
        "--mirostat",
        metavar="TAU",
        min=0.0,
        max=100.0,
        help="Mirostat: keep the surprise near TAU bits by moving a cut. Default: off.",
        show_default=False,
        rich_help_panel=_CUTS,
    ),
]
MirostatEta = Annotated[
    float,
    typer.Option(
        "--mirostat-eta",
        metavar="ETA",
        min=0.0,
        max=1.0,
        help="Learning rate of Mirostat's cut.",
        rich_help_panel=_CUTS,
    ),
]
MirostatVersion = Annotated[
    int,
    typer.Option(
        "--mirostat-version",
        metavar="N",
        min=1,
        max=2,
        help="Mirostat's cut. 2: by surprise; 1: by rank, from an estimated Zipf distribution.",
        rich_help_panel=_CUTS,
    ),
]
Skew = Annotated[
    float,
    typer.Option(
        "--skew",
        metavar="X",
        min=-20.0,
        max=20.0,
        help="Values above 0 favor rare tokens, values below 0 probable ones.",
        rich_help_panel=_CUTS,
    ),
]
Dynatemp = Annotated[
    str | None,
    typer.Option(
        "--dynatemp",
        metavar="MIN,MAX[,EXP]",
        help="Dynamic temperature: from MIN to MAX with the entropy of the choice, on a curve with "
        "exponent EXP. Applied in addition to --temp.",
        show_default=False,
        rich_help_panel=_TEMPERATURE,
    ),
]
Smoothing = Annotated[
    float,
    typer.Option(
        "--smoothing",
        metavar="X",
        min=0.0,
        max=100.0,
        help="Quadratic smoothing: logits fall with the square of their distance from the largest; "
        "0: off.",
        rich_help_panel=_TEMPERATURE,
    ),
]
SmoothingCurve = Annotated[
    float,
    typer.Option(
        "--smoothing-curve",
        metavar="X",
        min=1.0,
        max=100.0,
        help="With --smoothing: above 1, logits fall faster far from the largest, and slower close "
        "to it.",
        rich_help_panel=_TEMPERATURE,
    ),
]
TempLast = Annotated[
    bool,
    typer.Option(
        "--temp-last",
        help="Apply the temperature after the cuts instead of before.",
        rich_help_panel=_TEMPERATURE,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        metavar="X",
        help="Subtracted from a token's logit for each occurrence.",
        rich_help_panel=_REPETITION,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        metavar="X",
        help="Subtracted once from the logit of each token that occurred.",
        rich_help_panel=_REPETITION,
    ),
]
RepeatRange = Annotated[
    int | None,
    typer.Option(
        "--repeat-range",
        metavar="N",
        min=0,
        help="The three penalties look at the latest N tokens, including the prompt. Default: all.",
        show_default=False,
        rich_help_panel=_REPETITION,
    ),
]
RepeatDecay = Annotated[
    int,
    typer.Option(
        "--repeat-decay",
        metavar="N",
        min=0,
        help="Number of tokens before that range over which the penalties fade out.",
        rich_help_panel=_REPETITION,
    ),
]
DryMultiplier = Annotated[
    float,
    typer.Option(
        "--dry-multiplier",
        metavar="X",
        min=0.0,
        max=100.0,
        help="DRY: size of the penalty on continuing a repetition of earlier text; 0: off.",
        rich_help_panel=_REPETITION,
    ),
]
DryBase = Annotated[
    float,
    typer.Option(
        "--dry-base",
        metavar="X",
        min=0.0,
        max=100.0,
        help="Factor by which the DRY penalty grows with each token of the repetition.",
        rich_help_panel=_REPETITION,
    ),
]
DryAllowedLength = Annotated[
    int,
    typer.Option(
        "--dry-allowed-length",
        metavar="N",
        min=0,
        help="Longest repetition that costs no more than the DRY multiplier.",
        rich_help_panel=_REPETITION,
    ),
]
DryRange = Annotated[
    int,
    typer.Option(
        "--dry-range",
        metavar="N",
        min=0,
        help="DRY searches only the latest N tokens for repetitions; 0: all.",
        rich_help_panel=_REPETITION,
    ),
]
DryBreakers = Annotated[
    str,
    typer.Option(
        "--dry-breakers",
        metavar="CHARS",
        help="Characters (\\n: line end, \\t: tab). A repetition ends at a token with one of them, "
        "and at a special token. none: it ends at no token.",
        rich_help_panel=_REPETITION,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling options of the command line. `params` converts them for the engine."""

    temp: Temperature = 0.8
    top_k: TopK = 40
    top_p: TopP = 0.95
    min_p: MinP = 0.05
    repeat_penalty: RepeatPenalty = 1.0
    seed: Seed = None
    top_a: TopA = 0.0
    top_n_sigma: TopNSigma = 0.0
    typical: Typical = 1.0
    tfs: TailFree = 1.0
    xtc_probability: XtcProbability = 0.0
    xtc_threshold: XtcThreshold = 0.1
    mirostat: Mirostat = None
    mirostat_eta: MirostatEta = 0.1
    mirostat_version: MirostatVersion = 2
    skew: Skew = 0.0
    dynatemp: Dynatemp = None
    smoothing: Smoothing = 0.0
    smoothing_curve: SmoothingCurve = 1.0
    temp_last: TempLast = False
    frequency_penalty: FrequencyPenalty = 0.0
    presence_penalty: PresencePenalty = 0.0
    repeat_range: RepeatRange = None
    repeat_decay: RepeatDecay = 0
    dry_multiplier: DryMultiplier = 0.0
    dry_base: DryBase = 1.75
    dry_allowed_length: DryAllowedLength = 2
    dry_range: DryRange = 0
    dry_breakers: DryBreakers = r'\n:"*'

    def params(self, tokenizer: Tokenizer | None = None) -> SamplerParams:
        """Settings for the engine. Without a seed, one is drawn here, so that the command can show
        it and the run can be repeated.

        Without a tokenizer the set of DRY breakers stays empty, which is enough to check the other
        settings.
        """
        breakers: frozenset[int] = frozenset()
        if tokenizer is not None and self.dry_multiplier > 0:
            breakers = _breakers(tokenizer, self.dry_breakers)
        min_temp, max_temp, exponent = _dynatemp(self.dynatemp)
        return SamplerParams(
            temperature=self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
            seed=secrets.randbits(31) if self.seed is None else self.seed,
            top_a=self.top_a,
            top_n_sigma=self.top_n_sigma,
            typical=self.typical,
            tfs=self.tfs,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            mirostat_tau=self.mirostat,
            mirostat_eta=self.mirostat_eta,
            mirostat_version=self.mirostat_version,
            skew=self.skew,
            min_temp=min_temp,
            max_temp=max_temp,
            temp_exponent=exponent,
            smoothing_factor=self.smoothing,
            smoothing_curve=self.smoothing_curve,
            temperature_last=self.temp_last,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            penalty_range=self.repeat_range,
            penalty_decay=self.repeat_decay,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_range=self.dry_range,
            dry_breakers=breakers,
        )


@lru_cache(maxsize=1)
def _breakers(tokenizer: Tokenizer, option: str) -> frozenset[int]:
    """Token ids that end a repetition. Cached, because a chat needs them in each turn and the
    search of a large vocabulary takes a tenth of a second."""
    if option in ("", "none"):
        return frozenset()
    characters = option.replace(r"\n", "\n").replace(r"\t", "\t")
    special = frozenset(tokenizer.special_tokens.values())
    return tokenizer.tokens_with(characters) | special


def _dynatemp(text: str | None) -> tuple[float, float, float]:
    """Minimum, maximum and exponent of `--dynatemp`. `SamplerParams` checks their ranges."""
    if text is None:
        return 0.0, 0.0, 1.0
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not numbers[0] < numbers[1]:
        raise RequestError(
            "--dynatemp is not a range of temperatures",
            expected="MIN,MAX or MIN,MAX,EXPONENT with MIN below MAX, such as 0.5,1.5",
            got=text,
        )
    return numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else 1.0
