"""Log-probabilities of tokens as the model gives them, before any step of sampling.

Of sampled tokens and of a prompt's own tokens. A token's figure and the same token's figure among
the likeliest are the same number, so that whoever compares the two finds them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from exl_core.engine.events import SampledToken, ScoreEvent
from exl_core.engine.score import blocks_of_rows
from exl_core.engine.sequence import SequenceState
from exl_core.model.segment import Segment
from exl_core.sampling.sampler import LogitsError

_LOGIT_BYTES = 256 * 1024 * 1024
"""Most memory for the logits of prompts in one pass."""


def rows_of_logits(vocab_size: int) -> int:
    """Rows of a pass that may give logits beside what is decoded."""
    return max(1, _LOGIT_BYTES // (4 * vocab_size))


def with_log_probs(
    tokens: Sequence[SampledToken], logits: Tensor, num_top: int
) -> tuple[SampledToken, ...]:
    """The tokens with their log-probabilities and the `num_top` likeliest instead of each;
    `logits` float32 [len(tokens), vocab_size] predict them."""
    told: list[SampledToken] = []
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
            told.append(replace(token, log_prob=value, top_log_probs=top))
    return tuple(told)


def score_prompt(sequence: SequenceState, segment: Segment, logits: Tensor) -> list[ScoreEvent]:
    """What is told of the prompt after a pass with this segment of it, if there is any news.

    `logits` [tokens of the segment, vocab_size]. What was told before (pages were lost since) is
    not told again.
    """
    prompt_ids, num_top = sequence.request.prompt_ids, sequence.request.report.log_probs
    assert num_top is not None, "the request was checked"
    end = min(segment.past_len + len(segment.token_ids) + 1, len(prompt_ids))
    wanted = range(sequence.scored_len, end)
    if not wanted:
        return []
    first = wanted.start - segment.past_len - 1  # the row that predicts the first of them
    tokens = [SampledToken(prompt_ids[i]) for i in wanted]
    scored = with_log_probs(tokens, logits[first : first + len(tokens)], num_top)
    sequence.scored_len = end
    return [ScoreEvent(sequence.request_id, scored)]
