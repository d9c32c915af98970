"""N-gram drafter: proposes the tokens that followed an earlier occurrence of the last few tokens.

It needs no second model and takes microseconds. It helps with edited code, quotations from the
prompt, lists and tables. The length of a draft depends on the length of the match, and on how often
matches of that length were right in this request. The drafter learns this from the tokens that the
sequence received, whether or not its guess was proposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from exl_core.errors import RequestError
from exl_core.speculate.drafter import NO_DRAFT, Draft, DraftJob
from exl_core.speculate.ngram_index import Match, NgramIndex

_PRIOR = (0.5, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Prior probability that the token after a match is right, by `_level`. The first entry applies to
a match that is resumed after a replaced token."""
_PRIOR_WEIGHT = 4.0
_MEMORY = 0.97
"""Decay of the counts per token: about the last 30 tokens count."""

_LONG, _SURE = 8, 4
"""A match of `_LONG` tokens that ends is resumed after the token that ended it, unless another
match of at least `_SURE` tokens is found."""

_CHECKED = 64
"""Newest tokens that are compared to detect that a sequence was rewound and has grown since."""


class NgramDrafter:
    """N-gram drafter of one engine, with an index per request.

    max_tokens      most tokens of a draft
    min_match       shortest context, in tokens, that counts as a match
    max_match       longest context in the index; longer matches are found by comparing further back
    min_confidence  a draft ends before the first token with a lower probability of acceptance
    preload         ids of a text that every request may repeat
    """

    def __init__(
        self,
        *,
        max_tokens: int = 8,
        min_match: int = 2,
        max_match: int = 4,
        min_confidence: float = 0.3,
        preload: Sequence[int] = (),
    ) -> None:
        if max_tokens < 1 or not 1 <= min_match <= max_match:
            raise RequestError(
                "n-gram drafting cannot work with these settings",
                where="drafter",
                expected="max_tokens of at least 1, 1 <= min_match <= max_match",
                got=f"max_tokens {max_tokens}, min_match {min_match}, max_match {max_match}",
            )
        if not 0.0 <= min_confidence <= 1.0:
            raise RequestError(
                "min_confidence is out of range",
                where="drafter",
                expected="0 to 1",
                got=min_confidence,
            )
        self.max_tokens = max_tokens
        self.min_match = min_match
        self.max_match = max_match
        self.min_confidence = min_confidence
        self._preloaded = NgramIndex(min_match, max_match)
        self._preloaded.extend(preload)
        self._known: dict[str, _Known] = {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        return [self._propose(job) for job in jobs]

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        """Ignored: this drafter has no cache."""

    def _propose(self, job: DraftJob) -> Draft:
        known = self._known.get(job.request_id)
        if known is None:
            known = _Known(NgramIndex(self.min_match, self.max_match))
            self._known[job.request_id] = known
        known.catch_up(job.token_ids)
        match = self._find(known.index)
        if known.interrupted is not None and (match is None or match.length < _SURE):
            match = known.interrupted
        known.look_at(match, self.max_tokens)
        count = known.confident(self.min_confidence, min(job.max_tokens, self.max_tokens))
        return Draft(tuple(known.guess[:count])) if count else NO_DRAFT

    def _find(self, index: NgramIndex) -> Match | None:
        own = index.find(index.tokens)
        if not self._preloaded.tokens:
            return own
        other = self._preloaded.find(index.tokens)
        if own is None or (other is not None and other.length > own.length):
            return other
        return own


class _Known:
    """State of one request: indexed tokens, last guess, and acceptance by match length."""

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.guess: list[int] = []
        self.interrupted: Match | None = None
        """A long match, one token after its end, because that token may have been replaced."""
        self._match: Match | None = None
        self._right = [rate * _PRIOR_WEIGHT for rate in _PRIOR]
        self._seen = [_PRIOR_WEIGHT] * len(_PRIOR)

    def catch_up(self, token_ids: Sequence[int]) -> None:
        index = self.index
        common = _common_length(index.tokens, token_ids)
        self.interrupted = None
        if common < len(index.tokens):
            self.guess = []
            index.rewind(common)
        new = token_ids[common:]
        self._learn(new)
        index.extend(new)

    def look_at(self, match: Match | None, count: int) -> None:
        """Take the tokens after the match as the guess."""
        self._match = match
        self.guess = [] if match is None else match.follow(count)

    def confident(self, min_confidence: float, count: int) -> int:
        """Number of the first `count` guessed tokens that are worth proposing."""
        confidence = 1.0
        for offset in range(min(count, len(self.guess))):
            level = self._level(offset)
            confidence *= self._right[level] / self._seen[level]
            if confidence < min_confidence:
                return offset
        return min(count, len(self.guess))

    def _learn(self, new: Sequence[int]) -> None:
        for offset, (guessed, token_id) in enumerate(zip(self.guess, new, strict=False)):
            level = self._level(offset)
            is_right = guessed == token_id
            self._right[level] = self._right[level] * _MEMORY + is_right
            self._seen[level] = self._seen[level] * _MEMORY + 1.0
            if not is_right:
                if offset == len(new) - 1:
                    self._interrupt(offset)
                return

    def _interrupt(self, offset: int) -> None:
        match = self._match
        if match is None or match.length + offset < _LONG:
            return
        position = match.position + offset + 1
        if position < len(match.tokens):
            self.interrupted = Match(match.tokens, position, 0)

    def _level(self, offset: int) -> int:
        length = 0 if self._match is None else self._match.length
        if length == 0 and offset > 0:  # after a replaced token: the old match is resumed
            length = _SURE
        return _level(length + offset)


def _level(length: int) -> int:
    """Class of a match length; lengths in one class have similar acceptance."""
    if length < 5:
        return length
    for level, limit in enumerate((7, 10, 16, 32), start=5):
        if length < limit:
            return level
    return 9


def _common_length(tokens: list[int], token_ids: Sequence[int]) -> int:
    """Number of indexed tokens that are still a prefix of the sequence.

    Only the newest tokens are compared. If they are equal, the older ones are assumed equal; stale
    tokens could only cause a bad guess, which verification rejects.
    """
    count = min(len(tokens), len(token_ids))
    start = max(0, count - _CHECKED)
    if tokens[start:count] == list(token_ids[start:count]):
        return count
    for position, (token, token_id) in enumerate(zip(tokens, token_ids, strict=False)):
        if token != token_id:
            return position
    return count
