"""Log probabilities from the model, before any sampling step, of sampled and of prompt tokens.

The log probability of a token and its entry among the likeliest tokens are the same number, bit for
bit, so that callers can compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from exl_core.engine.events import SampledToken, ScoreEvent
from exl_core.engine.score import blocks_of_rows
from exl_core.engine.sequence import RequestSequence
from exl_core.model.segment import Segment
from exl_core.sampling.sampler import LogitsError

_LOGIT_BYTES = 256 * 1024 * 1024
"""Most memory for the logits of prompt tokens in one pass."""


def rows_of_logits(vocab_size: int) -> int:
    """Most prompt rows of one pass that may produce logits."""
    return max(1, _LOGIT_BYTES // (4 * vocab_size))


def with_log_probs(
    tokens: Sequence[SampledToken], logits: Tensor, num_top: int
) -> tuple[SampledToken, ...]:
    """Add to each token its log probability and the `num_top` likeliest alternatives.

    `logits` [len(tokens), vocab_size], float32: row i predicts token i.
    """
    reported: list[SampledToken] = []
    for block in blocks_of_rows(logits):
        log_probs = logits[block].log_softmax(1)  # [rows, vocab_size]
        ids = torch.tensor([token.token_id for token in tokens[block]], device=logits.device)
        chosen = log_probs.gather(1, ids[:, None]).squeeze(1).tolist()
        values, top_ids = log_probs.topk(min(num_top, log_probs.shape[1]), dim=1)
        tops = zip(top_ids.tolist(), values.tolist(), strict=True)
        for token, value, (of_ids, of_values) in zip(tokens[block], chosen, tops, strict=True):
            if not value > -float("inf"):  # NaN too
                raise LogitsError(
                    "a token has no probability above zero",
                    where=f"token {token.token_id}",
                    expected="finite logits",
                    got=f"log p = {value}",
                    next_step="A weight may be damaged: 'exl doctor' tests the kernels of this "
                    "machine.",
                )
            top = tuple(zip(of_ids, of_values, strict=True))
            reported.append(replace(token, log_prob=value, top_log_probs=top))
    return tuple(reported)


def score_prompt(sequence: RequestSequence, segment: Segment, logits: Tensor) -> list[ScoreEvent]:
    """Events for the prompt tokens that this segment predicts and that are not scored yet.

    `logits` [tokens of the segment, vocab_size]. Tokens that are recomputed after preemption are
    not scored twice.
    """
    prompt_ids, num_top = sequence.request.prompt_ids, sequence.request.report.log_probs
    assert num_top is not None, "the request was checked"
    end = min(segment.past_len + len(segment.token_ids) + 1, len(prompt_ids))
    positions = range(sequence.scored_len, end)
    if not positions:
        return []
    first = positions.start - segment.past_len - 1  # row that predicts the first position
    tokens = [SampledToken(prompt_ids[i]) for i in positions]
    scored = with_log_probs(tokens, logits[first : first + len(tokens)], num_top)
    sequence.scored_len = end
    return [ScoreEvent(sequence.request_id, scored)]
