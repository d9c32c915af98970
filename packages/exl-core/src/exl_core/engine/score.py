"""How likely a model finds a text, token by token: what perplexity is made of.

Goes through the paged cache in chunks, as generation does, so that what is measured is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exl_core.cache.format import KVFormat, pages_for
from exl_core.errors import RequestError
from exl_core.model.runner import Model, Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.sampling.sampler import LogitsError

_LOGIT_BYTES = 256 * 1024 * 1024
"""Most memory for the logits of one chunk; a vocabulary of 262144 gets chunks of 256 rows."""

_ROWS_AT_ONCE = 32
"""Of the reduction over the vocabulary: its copies of the logits stay small."""


def score_tokens(
    model: Model,
    token_ids: Sequence[int],
    *,
    kv_format: KVFormat = KVFormat.FP16,
    chunk_rows: int = 512,
    on_progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Natural logarithms of p(x_i | x_0 .. x_(i-1)) for every token but the first: float64 [n - 1].

    `on_progress(done, total)` is called after each chunk. The result does not depend on
    `chunk_rows`, apart from the rounding of the model's own matrix products.
    """
    ids = tuple(token_ids)
    _check(model, ids, chunk_rows)
    config = model.config
    num_rows = len(ids) - 1  # the last token is predicted, and predicts nothing
    page_ids = tuple(range(pages_for(num_rows)))
    store = store_for(model, kv_format, len(page_ids))
    runner = Runner(model, store)
    scores = torch.empty(num_rows, dtype=torch.float64)
    chunk_rows = max(1, min(chunk_rows, _LOGIT_BYTES // (4 * config.vocab_size)))
    for start in range(0, num_rows, chunk_rows):
        end = min(start + chunk_rows, num_rows)
        chunk = Segment(
            token_ids=ids[start:end],
            past_len=start,
            page_ids=page_ids[: pages_for(end)],
            logit_rows=LogitRows.ALL,
        )
        logits = runner.run((chunk,))  # [rows, vocab_size]
        targets = torch.tensor(ids[start + 1 : end + 1], dtype=torch.int64, device=logits.device)
        scores[start:end] = _log_probabilities(logits, targets)
        if on_progress is not None:
            on_progress(end, num_rows)
    _check_scores(scores)
    return scores


def _log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax at the targets; exponentials in float32, their sums in float64."""
    parts = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE]  # [rows, vocab_size]
        ids = targets[start : start + _ROWS_AT_ONCE]  # [rows]
        largest = rows.amax(1, keepdim=True)  # [rows, 1]
        total = (rows - largest).exp_().sum(1, dtype=torch.float64)  # [rows]
        target = (rows.gather(1, ids[:, None]) - largest).squeeze(1)  # [rows]
        parts.append(target.double() - total.log())
    return torch.cat(parts)


def _check(model: Model, ids: tuple[int, ...], chunk_rows: int) -> None:
    if chunk_rows < 1:
        raise RequestError("chunk_rows is too small", expected="at least 1", got=chunk_rows)
    if len(ids) < 2:
        raise RequestError(
            "too few tokens to score", expected="at least 2, a first and one after it", got=len(ids)
        )
    if len(ids) > model.config.max_seq_len:
        raise RequestError(
            "too many tokens to score at once",
            expected=f"at most the context, {model.config.max_seq_len}",
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


def _check_scores(scores: Tensor) -> None:
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        raise LogitsError(
            f"the probability of token {int(bad[0]) + 1} is not a number above zero",
            where="score",
            expected="finite logits",
            got=f"log p = {float(scores[bad[0]])}",
            next_step="A weight is damaged, or activations overflowed: 'exl doctor' tests the "
            "kernels of this machine.",
        )
