"""Record of draft acceptance, and the figures computed from rounds and times.

N rounds, D drafted tokens, A accepted tokens, R rounds that ended in a rejection, E emitted tokens.
`exl_core.speculate.stats` defines these counts. Plain data without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from exl_core.speculate.stats import DraftStats
from exl_eval.result import SCHEMA_VERSION

if TYPE_CHECKING:
    from exl_eval.draft_rounds import Round


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error; None if there are too few values."""

    mean: float | None
    stderr: float | None


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per draft token, and per forward pass with 1, 2, ... rows. A pass that verifies a
    draft of g tokens has g + 1 rows; without a draft it has one."""

    draft_s: float
    pass_s: tuple[float, ...]

    @property
    def plain_s(self) -> float:
        return self.pass_s[0]

    def round_s(self, drafted: int) -> float:
        """Seconds of a round with `drafted` draft tokens."""
        return self.pass_s[drafted] + drafted * self.draft_s


@dataclass(frozen=True, slots=True)
class Speeds:
    """Decoded tokens per second on the same prompts with the same sampler: without drafts, with
    full-length drafts, with adaptive drafts."""

    plain: float
    drafted: float
    adaptive: float

    def as_dict(self) -> dict[str, float | None]:
        return {
            "plain_tok_s": self.plain,
            "drafted_tok_s": self.drafted,
            "adaptive_tok_s": self.adaptive,
            "measured_speed_up": _ratio(self.drafted, self.plain),
            "adaptive_speed_up": _ratio(self.adaptive, self.plain),
        }


@dataclass(frozen=True, slots=True)
class AcceptanceFigures:
    """Figures of one group of rounds.

    tau                 mean number of emitted tokens per round
    alpha               exact: mean of sum min(p, q) over the verified draft positions
    alpha_estimate      A / (A + R)
    theory_tokens       (1 - alpha^(g + 1)) / (1 - alpha) with the exact alpha; g is D / N
    theory_speed_up     theory_tokens / (1 + g c); c is the cost of a draft token in plain passes
    break_even_tau      drafting pays if a round emits more tokens than this
    predicted_speed_up  tau / break_even_tau
    best_length         draft length with the highest predicted speed; 0: no draft
    """

    stats: DraftStats
    system_efficiency: float | None
    tau: Estimate
    alpha: Estimate
    alpha_estimate: Estimate
    theory_tokens: float | None
    theory_speed_up: float | None
    break_even_tau: float | None
    predicted_speed_up: float | None
    best_length: int
    best_speed_up: float
    speeds: Speeds

    def as_dict(self) -> dict[str, object]:
        stats = self.stats
        return {
            "N": stats.rounds,
            "D": stats.drafted,
            "A": stats.accepted,
            "R": stats.rejected,
            "E": stats.emitted,
            "utilization": stats.utilization,
            "tau": asdict(self.tau),
            "mean_accepted": stats.mean_accepted,
            "system_efficiency": self.system_efficiency,
            "position_rates": list(stats.position_rates),
            "alpha": asdict(self.alpha),
            "alpha_estimate": asdict(self.alpha_estimate),
            "theory_tokens": self.theory_tokens,
            "theory_speed_up": self.theory_speed_up,
            "break_even_tau": self.break_even_tau,
            "predicted_speed_up": self.predicted_speed_up,
            **self.speeds.as_dict(),
            "best_length": self.best_length,
            "best_speed_up": self.best_speed_up,
        }


@dataclass(frozen=True, slots=True)
class SamplerFigures:
    """Figures of one sampler, over all rounds and by category of prompts."""

    name: str
    costs: Costs
    overall: AcceptanceFigures
    categories: dict[str, AcceptanceFigures]

    def as_dict(self) -> dict[str, object]:
        verify = self.costs.pass_s
        return {
            "name": self.name,
            "t_draft_s": self.costs.draft_s,
            "t_plain_s": verify[0],
            "t_verify_s": {str(rows): verify[rows - 1] for rows in range(1, len(verify) + 1)},
            "overall": self.overall.as_dict(),
            "categories": {name: group.as_dict() for name, group in self.categories.items()},
        }


@dataclass(frozen=True, slots=True)
class AcceptanceResult:
    """`kind` of the drafter is `model`, `mtp` or `ngram`. `prompts` is the number per category.
    `max_tokens` limits each reply, `draft_tokens` each draft."""

    model: str
    kind: str
    draft_model: str | None
    draft_tokens: int
    max_tokens: int
    prompts: int
    seed: int
    kv_format: str
    device: str
    threads: int
    exact: bool
    samplers: tuple[SamplerFigures, ...]

    def as_dict(self) -> dict[str, object]:
        facts = {key: value for key, value in asdict(self).items() if key != "samplers"}
        samplers = [one.as_dict() for one in self.samplers]
        return {
            "schema_version": SCHEMA_VERSION,
            "measurement": "acceptance",
            **facts,
            "samplers": samplers,
        }


def figures_of(
    rounds: Sequence[Round],
    stats: DraftStats,
    costs: Costs,
    speeds: Speeds,
    *,
    draft_tokens: int,
    longest: int,
) -> AcceptanceFigures:
    """Figures of `rounds`. `stats` has their counts. `longest` is the longest draft that may be
    recommended."""
    chances = [chance for one in rounds for chance in one.chances]
    alpha = _estimate(chances)
    looked_at = stats.accepted + stats.rejected
    estimate = stats.alpha
    stderr = None if estimate is None else math.sqrt(estimate * (1.0 - estimate) / looked_at)
    drafted = stats.drafted / stats.rounds if stats.rounds else 0.0
    theory = None if alpha.mean is None else _geometric(alpha.mean, drafted)
    spent = sum(costs.round_s(one.drafted) for one in rounds)
    break_even = spent / len(rounds) / costs.plain_s if rounds else None
    best = _best_length(rounds, costs, alpha.mean, draft_tokens, longest)
    return AcceptanceFigures(
        stats=stats,
        system_efficiency=_ratio(stats.emitted, stats.rounds * (draft_tokens + 1)),
        tau=_estimate([one.emitted for one in rounds]),
        alpha=alpha,
        alpha_estimate=Estimate(estimate, stderr),
        theory_tokens=theory,
        theory_speed_up=None
        if theory is None
        else theory / (1.0 + drafted * costs.draft_s / costs.plain_s),
        break_even_tau=break_even,
        predicted_speed_up=None if not break_even else _ratio(stats.mean_length, break_even),
        best_length=best[0],
        best_speed_up=best[1],
        speeds=speeds,
    )


def _best_length(
    rounds: Sequence[Round], costs: Costs, alpha: float | None, draft_tokens: int, longest: int
) -> tuple[int, float]:
    """Draft length with the highest speed-up over plain decoding, and that speed-up. (0, 1.0) if no
    length is faster.

    Each recorded round is replayed with another draft length. A shorter draft is the recorded one,
    cut. A longer one continues a recorded one that was fully accepted, at the accept rate alpha.
    """
    best = (0, 1.0)
    for length in range(1, longest + 1):
        tokens = seconds = 0.0
        for one in rounds:
            is_full = one.drafted == draft_tokens < length
            drafted = length if is_full else min(one.drafted, length)
            tokens += 1 + min(one.accepted, length)
            if is_full and one.accepted == draft_tokens and alpha is not None:
                tokens += _geometric(alpha, length - draft_tokens) - 1.0
            seconds += costs.round_s(drafted)
        speed_up = tokens * costs.plain_s / seconds if seconds else 0.0
        if speed_up > best[1]:
            best = (length, speed_up)
    return best


def _geometric(alpha: float, drafted: float) -> float:
    """Expected tokens per round if each draft token is accepted with probability alpha. Includes
    the token that the target model adds."""
    if alpha >= 1.0:
        return drafted + 1.0
    return (1.0 - math.pow(alpha, drafted + 1.0)) / (1.0 - alpha)


def _estimate(values: Sequence[float]) -> Estimate:
    if not values:
        return Estimate(None, None)
    stderr = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), stderr)


def _ratio(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole else None
