"""Counts of speculative decoding and the figures derived from them, without torch.

All figures are defined here. The counts of requests add up to those of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Counts of a request or of a run. A figure whose divisor is 0 is None.

    rounds       N  passes of the model that gave tokens, including those without a draft
    drafted      D  draft tokens that were verified in a pass
    accepted     A  draft tokens that were kept: those before a round's first rejection
    rejected     R  rounds that ended in a rejection
    emitted      E  resulting tokens: A + N, minus tokens cut off by the end of a reply
    accepted_at     how often the first, second ... token of a draft was accepted; their sum is A
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    emitted: int = 0
    accepted_at: tuple[int, ...] = ()

    def with_round(self, *, drafted: int, accepted: int, emitted: int) -> DraftStats:
        """These counts plus one pass.

        `emitted` counts the accepted tokens and the model's own token after them. It lacks the
        latter if the reply ended with an accepted token; then nothing after it was rejected.
        """
        reached = tuple(1 for _ in range(accepted))
        return self + DraftStats(
            rounds=1,
            drafted=drafted,
            accepted=accepted,
            rejected=int(accepted < drafted and emitted > accepted),
            emitted=emitted,
            accepted_at=reached,
        )

    def __add__(self, other: DraftStats) -> DraftStats:
        return DraftStats(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.rejected + other.rejected,
            self.emitted + other.emitted,
            tuple(a + b for a, b in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)),
        )

    @property
    def utilization(self) -> float | None:
        """A / D: accepted share of all draft tokens.

        This is not alpha: tokens after a rejection are never verified.
        """
        return _ratio(self.accepted, self.drafted)

    @property
    def alpha(self) -> float | None:
        """A / (A + R): accepted share of the verified draft tokens."""
        return _ratio(self.accepted, self.accepted + self.rejected)

    @property
    def mean_length(self) -> float | None:
        """Tau, E / N: tokens per pass; 1 without drafts."""
        return _ratio(self.emitted, self.rounds)

    @property
    def mean_accepted(self) -> float | None:
        """A / N."""
        return _ratio(self.accepted, self.rounds)

    @property
    def efficiency(self) -> float | None:
        """E / (D + N): share of the computed rows that gave a token."""
        return _ratio(self.emitted, self.drafted + self.rounds)

    @property
    def position_rates(self) -> tuple[float, ...]:
        """Accepted tokens per round for each position of a draft; their sum is A / N."""
        return tuple(count / self.rounds for count in self.accepted_at)


def expected_length(alpha: float, num_drafted: int) -> float:
    """Tokens per pass when each of `num_drafted` is accepted with probability `alpha`."""
    return sum(alpha**i for i in range(num_drafted + 1))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
