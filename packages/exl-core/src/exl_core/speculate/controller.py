"""Draft length control: as many draft tokens as pay, by measured times and acceptance.

A pass with a draft takes longer than one without, whether or not the draft is accepted. `PassCosts`
learns how much longer, for the whole engine. A `DraftController` learns how often the drafts of one
request are accepted, and chooses the length with the most tokens per second, or 0. This module
reads no clock: equal times and counts give equal answers. It does not import torch.

The loss from useless drafts is bounded by an account per request, in units of passes. The account
starts with a small credit and earns a small share of every pass. The cost of drafts is subtracted
and their gain is added, up to a limit. While the account is negative, nothing is drafted.
"""

from __future__ import annotations

import math
from bisect import bisect_left

DEFAULT_DRAFT_TOKENS = 4
DEFAULT_MTP_TOKENS = 3
DEFAULT_NGRAM_TOKENS = 8
"""Default length limits of drafts: by a draft model, by the model's own layer for multi-token
prediction, which is trained for one token, and by n-grams, which cost almost nothing."""

_LARGEST = 128
"""Passes of more rows carry a prompt chunk. Their cost is extrapolated, not recorded."""
_PRIOR_SLOPE = 0.15
"""Assumed cost of one more row, in passes of one row, before any measurement."""
_LEVEL_RATE = 0.3
"""Learning rate of the common level. Longer contexts and other load slow all passes at once."""
_SHAPE_RATE = 0.1
"""Learning rate of the relative costs, which change slowly."""
_SHORTEST_S = 1e-9
_LARGEST_STEP = math.log(2.0)
"""Largest log ratio that one pass may contribute. A pass beyond it was disturbed by other load."""


class PassCosts:
    """Estimated seconds of a pass by its number of rows. One instance per engine."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._shape: dict[int, float] = {}  # seconds / level
        self._rows: list[int] = []  # the keys, ascending

    def record(self, rows: int, seconds: float) -> None:
        """Record the time of one pass. Times of zero, from a stopped test clock, are ignored."""
        if seconds < _SHORTEST_S or not 1 <= rows <= _LARGEST:
            return
        if self._level is None:
            self._level = seconds / _prior_shape(rows)
        if rows not in self._shape:
            self._shape[rows] = seconds / self._level
            self._rows.insert(bisect_left(self._rows, rows), rows)
            return
        surprise = math.log(seconds / (self._level * self._shape[rows]))
        surprise = max(-_LARGEST_STEP, min(_LARGEST_STEP, surprise))
        self._level *= math.exp(_LEVEL_RATE * surprise)
        self._shape[rows] *= math.exp(_SHAPE_RATE * surprise)

    def seconds(self, rows: int) -> float:
        """Estimated seconds of a pass of `rows` rows (of one-row passes before any)."""
        level = 1.0 if self._level is None else self._level
        return level * self._shape_at(rows)

    def _shape_at(self, rows: int) -> float:
        known, shape = self._rows, self._shape
        if not known:
            return _prior_shape(rows)
        if rows in shape:
            return shape[rows]
        above = bisect_left(known, rows)
        if above == 0:
            return shape[known[0]] * _prior_shape(rows) / _prior_shape(known[0])
        low = known[above - 1]
        if above < len(known):
            high = known[above]
            return shape[low] + (shape[high] - shape[low]) * (rows - low) / (high - low)
        slope = _PRIOR_SLOPE * shape[known[0]] / _prior_shape(known[0])
        if low > known[0]:
            slope = max(0.0, (shape[low] - shape[known[0]]) / (low - known[0]))
        return shape[low] + slope * (rows - low)


def _prior_shape(rows: int) -> float:
    return 1.0 + _PRIOR_SLOPE * (rows - 1)


_CREDIT = 2.0
"""Passes that a request may lose before its first gain."""
_ALLOWANCE = 0.015
"""Share of each pass that may be spent on testing whether drafts pay again."""
_MOST_SAVED = 8.0
"""Upper limit of the account: the loss allowed when the text of a well-drafted request changes."""
_MOST_OWED = 4.0

_ALPHA = 0.6
_ALPHA_WEIGHT = 2.0
"""Prior acceptance probability, and its weight in draft tokens."""
_MEMORY = 0.95
_POSITION_WEIGHT = 4.0
"""Weight of the overall acceptance in the estimate for one position, in verified tokens."""
_DRAFT_RATE = 0.2
_LEAST_GAIN = 1.02
"""Smallest expected gain in tokens per second for which a draft is worth its risk."""

_FIRST_WAIT, _LONGEST_WAIT, _WAIT_GROWTH = 8.0, 64.0, 1.5
"""Passes without a draft between two trials. The wait grows after each failed trial."""
_TRIAL = 2
"""Draft tokens of a trial."""
_EXPLORED = 16
"""One draft in this many is a token longer or shorter, so that the cost of that length is known."""


class DraftController:
    """Draft length of one request."""

    def __init__(self, costs: PassCosts, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._costs = costs
        self._account = _CREDIT
        self._right, self._seen = _ALPHA * _ALPHA_WEIGHT, _ALPHA_WEIGHT
        self._right_at = [0.0] * max_tokens
        self._seen_at = [0.0] * max_tokens
        self._draft_s: float | None = None  # seconds per draft token
        self._is_warm = False
        self._is_trial = False
        self._waited, self._wait = 0, _FIRST_WAIT
        self._num_drafts = 0

    def length(self, max_tokens: int, *, rows: int = 1, sequences: int = 1) -> int:
        """Number of tokens to draft now, at most `max_tokens`; 0 for a pass without a draft.

        `rows`: rows of the coming pass without a draft of this request. `sequences`: number of
        sequences that get a token from it.
        """
        limit = min(max_tokens, self.max_tokens)
        self._is_trial = False
        if limit < 1 or self._account < 0.0:
            return 0
        best = self._best(limit, rows, sequences)
        if best:
            if self._num_drafts % _EXPLORED == _EXPLORED - 1:
                best += 1 if self._num_drafts // _EXPLORED % 2 else -1
            return max(1, min(limit, best))
        if self._waited < self._wait:
            return 0
        self._is_trial = True
        return min(limit, _TRIAL)

    def record(
        self,
        *,
        drafted: int,
        accepted: int,
        emitted: int,
        draft_s: float = 0.0,
        rows: int = 1,
        sequences: int = 1,
    ) -> None:
        """Record a finished pass, with or without a draft, after `PassCosts.record`.

        `emitted` as in `DraftStats.with_round`. `draft_s`: this request's share of the time spent
        on proposing. `rows`: all rows of the pass. `sequences` as in `length`.
        """
        plain_s = self._costs.seconds(rows - drafted)
        extra_s = max(0.0, self._costs.seconds(rows) - plain_s)
        charged_s = self._charge(draft_s, drafted, plain_s)
        gained = accepted - (extra_s + charged_s) * sequences / plain_s
        account = self._account + gained + _ALLOWANCE
        self._account = max(-_MOST_OWED, min(_MOST_SAVED, account))
        self._learn(accepted, accepted < drafted and emitted > accepted)
        if not drafted:
            self._waited += 1
            return
        self._num_drafts += 1
        if not self._is_trial:
            self._waited, self._wait = 0, _FIRST_WAIT
        elif accepted < drafted:
            self._waited, self._wait = 0, min(_WAIT_GROWTH * self._wait, _LONGEST_WAIT)
        # A successful trial leaves the wait unchanged, so the next trial follows at once.

    def _best(self, limit: int, rows: int, sequences: int) -> int:
        """Draft length with the most tokens per second, over all sequences of the pass."""
        best, best_rate = 0, _LEAST_GAIN * sequences / self._costs.seconds(rows)
        tokens, reached = float(sequences), 1.0
        alpha = self._right / self._seen
        for count in range(1, limit + 1):
            right, seen = self._right_at[count - 1], self._seen_at[count - 1]
            reached *= (right + _POSITION_WEIGHT * alpha) / (seen + _POSITION_WEIGHT)
            tokens += reached
            seconds = self._costs.seconds(rows + count) + (self._draft_s or 0.0) * count
            if tokens / seconds > best_rate:
                best, best_rate = count, tokens / seconds
        return best

    def _charge(self, draft_s: float, drafted: int, plain_s: float) -> float:
        """Drafting time to charge, in seconds.

        The first draft is free: it may include the draft model's prefill of the whole prompt, which
        does not predict the cost of later drafts.
        """
        if not self._is_warm:
            self._is_warm = drafted > 0
            return 0.0
        draft_s = min(draft_s, _MOST_OWED * plain_s)
        if drafted:
            each = draft_s / drafted
            known = each if self._draft_s is None else self._draft_s
            self._draft_s = known + _DRAFT_RATE * (each - known)
        return draft_s

    def _learn(self, accepted: int, is_rejected: bool) -> None:
        for position in range(accepted + is_rejected):
            is_right = position < accepted
            self._right = self._right * _MEMORY + is_right
            self._seen = self._seen * _MEMORY + 1.0
            right, seen = self._right_at[position], self._seen_at[position]
            self._right_at[position] = right * _MEMORY + is_right
            self._seen_at[position] = seen * _MEMORY + 1.0


class SteadyDrafts:
    """Replacement for a controller that always drafts the longest draft, for measurements."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def length(self, max_tokens: int, *, rows: int = 1, sequences: int = 1) -> int:  # noqa: ARG002
        return max(0, min(max_tokens, self.max_tokens))

    def record(self, **counts: float) -> None:
        """Ignored: the length does not depend on measurements."""
