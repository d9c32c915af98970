"""Log probability of each token of a text, from which perplexity is computed.

Texts go through the paged cache in chunks, as in generation, so that the measurement covers the
code that serves requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from exl_core.cache.format import KVFormat, pages_for
from exl_core.errors import RequestError
from exl_core.model.protocol import Model
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.table import OpTable
from exl_core.sampling.sampler import LogitsError

CHUNK_ROWS = 512
_LOGIT_BYTES = 256 * 1024 * 1024
"""Most memory for the logits of one chunk; a vocabulary of 262144 gets chunks of 256 rows."""

_BLOCK_BYTES = {"cpu": 2 * 1024 * 1024, "cuda": 64 * 1024 * 1024}
"""Size of the logits reduced at once, by device type. On a CPU the block stays in its cache."""


class TextPasses:
    """Predictions of a model along texts, one text after another, in one cache."""

    def __init__(
        self,
        model: Model,
        longest: int,
        *,
        kv_format: KVFormat = KVFormat.FP16,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        """Allocate a cache for texts of at most `longest` tokens; passes have `chunk_rows` rows at
        most."""
        if chunk_rows < 1:
            raise RequestError("chunk_rows is too small", expected="at least 1", got=chunk_rows)
        config = model.config
        self.model = model
        self._chunk_rows = max(1, min(chunk_rows, _LOGIT_BYTES // (4 * config.vocab_size)))
        num_pages = pages_for(min(max(1, longest - 1), config.max_seq_len))
        self._runner = Runner(model, store_for(model, kv_format, num_pages))
        self._out: Tensor | None = None  # logits buffer, reused by every pass
        if model.ops.device.type == "cpu":  # on a GPU, torch's allocator reuses memory
            self._out = torch.empty(self._chunk_rows, config.vocab_size)

    def logits(self, token_ids: Sequence[int], first: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield `start` and logits float32 [n, vocab_size]: row i predicts token start + i.

        Covers the tokens from `first` on, each predicted from all tokens before it. The next pass
        may overwrite the logits. The text starts with an empty cache.
        """
        ids = tuple(token_ids)
        _check(self.model, ids, first)
        rows = len(ids) - 1  # the last token is only predicted
        start = 0
        while start < rows:
            is_scored = start >= first - 1
            end = min(start + self._chunk_rows, rows if is_scored else first - 1)
            chunk = Segment(
                token_ids=ids[start:end],
                past_len=start,
                page_ids=tuple(range(pages_for(end))),
                logit_rows=LogitRows.ALL if is_scored else LogitRows.NONE,
                state_slot=None if self._runner.store.states is None else 0,
            )
            logits = self._runner.run((chunk,), out=self._out)  # [rows, vocab_size]
            if is_scored:
                yield start + 1, logits
            start = end

    def score(
        self,
        token_ids: Sequence[int],
        first: int = 1,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Natural logarithms of p(x_i | x_0 .. x_(i-1)) for i from `first` on: float64 [n - first].

        `on_progress(done, total)` is called after each scoring pass.
        """
        scores = []
        for start, logits in self.logits(token_ids, first):
            targets = torch.tensor(token_ids[start : start + len(logits)], dtype=torch.int64)
            scores.append(log_probabilities(self.model.ops, logits, targets).cpu())
            if on_progress is not None:
                on_progress(start + len(logits) - 1, len(token_ids) - 1)
        found = torch.cat(scores)
        _check_scores(found, first)
        return found


def score_tokens(
    model: Model,
    token_ids: Sequence[int],
    *,
    kv_format: KVFormat = KVFormat.FP16,
    chunk_rows: int = CHUNK_ROWS,
    on_progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Natural logarithms of p(x_i | x_0 .. x_(i-1)) for every token but the first: float64 [n - 1].

    `on_progress(done, total)` is called after each chunk. The result depends on `chunk_rows` only
    through the rounding of the model's matrix products.
    """
    ids = tuple(token_ids)
    _check(model, ids, 1)
    passes = TextPasses(model, len(ids), kv_format=kv_format, chunk_rows=chunk_rows)
    return passes.score(ids, on_progress=on_progress)


def blocks_of_rows(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows of logits [rows, vocab_size], each small enough to reduce at once."""
    rows = max(1, _BLOCK_BYTES[logits.device.type] // (4 * logits.shape[1]))
    for start in range(0, len(logits), rows):
        yield slice(start, min(start + rows, len(logits)))


def log_probabilities(ops: OpTable, logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax of logits float32 [rows, vocab_size] at targets int64 [rows]: float64 [rows]."""
    chosen = logits.gather(1, targets[:, None].to(logits.device)).squeeze(1)
    return chosen.double() - ops.log_sum_exp(logits).double()


def _check(model: Model, ids: tuple[int, ...], first: int) -> None:
    if not 1 <= first < max(2, len(ids)):
        raise ValueError(f"scoring cannot start at token {first} of {len(ids)}")
    if len(ids) < 2:
        raise RequestError(
            "too few tokens to score", expected="at least 2, a first and one after it", got=len(ids)
        )
    if len(ids) - 1 > model.config.max_seq_len:
        raise RequestError(
            "too many tokens to score at once",
            expected=f"at most the context, {model.config.max_seq_len}, and one after it",
            got=len(ids),
            next_step="Cut the text into windows.",
        )
    if min(ids) < 0 or max(ids) >= model.config.vocab_size:
        raise RequestError(
            "a token to score is not in the vocabulary",
            expected=f"0 to {model.config.vocab_size - 1}",
            got=min(ids) if min(ids) < 0 else max(ids),
            next_step="Does this tokenizer belong to this model?",
        )


def _check_scores(scores: Tensor, first: int) -> None:
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        raise LogitsError(
            f"the probability of token {int(bad[0]) + first} is not a number above zero",
            where="score",
            expected="finite logits",
            got=f"log p = {float(scores[bad[0]])}",
            next_step="A weight is damaged, or activations overflowed: 'exl doctor' tests the "
            "kernels of this machine.",
        )
