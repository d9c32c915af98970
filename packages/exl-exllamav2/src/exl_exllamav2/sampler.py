"""ExLlamaV2Sampler: sampling by hand from a tensor of logits, and the settings class."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from exl_core.ops.masks import pack
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import Sample, Sampler, guide
from exl_core.sampling.steps import draw
from exl_core.settings import read_settings
from exl_exllamav2.errors import OldAssertionError, old_types
from exl_exllamav2.settings import Settings as _Settings
from exl_exllamav2.settings import dry_breakers, sampler_params, xtc_ignored
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

_NEXT_ROW = 0.6180339887498949
"""Step between the random numbers of a batch's rows: their numbers spread evenly over [0, 1)."""


class ExLlamaV2Sampler:
    """Sampling of old programs. Generators do not use it: they sample in exl's engine."""

    Settings = _Settings

    @staticmethod
    def get_dry_default_sequence_breaker_tokens(tokenizer: ExLlamaV2Tokenizer) -> set[int]:
        return dry_breakers(tokenizer)

    @staticmethod
    def get_default_xtc_mask_tokens(tokenizer: ExLlamaV2Tokenizer) -> frozenset[int]:
        return xtc_ignored(tokenizer)

    @staticmethod
    def sample(
        logits: Tensor,
        settings: _Settings,
        sequence_ids: Tensor,
        random: float,
        tokenizer: ExLlamaV2Tokenizer,
        prefix_token: Tensor | None = None,
        return_top_tokens: int = 0,
        blocked_tokens: Sequence[int] | None = None,
        filters: Sequence[Any] | None = None,
        filter_prefer_eos: bool = False,
        sync: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        """Tokens [b, 1], top tokens and their probabilities [b, 1, k] (on the meta device without
        `return_top_tokens`), probabilities [b, 1], and whether a filter ended the reply.

        `random` in [0, 1) selects the token of row 0: see `_sampled`. `logits` may be on a GPU.
        """
        rows = logits.view(logits.shape[0], -1).float().cpu()
        size = min(tokenizer.actual_vocab_size, rows.shape[1])
        rows = rows[:, :size]
        histories = sequence_ids.view(-1, sequence_ids.shape[-1]).tolist()
        if settings.cfg_scale is not None:
            if len(rows) != 2:
                raise OldAssertionError("cfg_scale needs two rows of logits", got=len(rows))
            rows = guide(rows[0], rows[1], settings.cfg_scale)[None]
        if filters and len(rows) > 1:
            raise OldAssertionError("filters need a batch of one", got=len(rows))
        permitted, ends = _filtered(filters or (), tokenizer, prefers_eos=filter_prefer_eos)
        ids: list[int] = []
        probabilities: list[float] = []
        tops: list[tuple[tuple[int, float], ...]] = []
        with old_types():
            params = sampler_params(settings, tokenizer, seed=None)
            cuts = settings.mirostat_mu if isinstance(settings.mirostat_mu, list) else []
            left: list[float] = []
            for row, values in enumerate(rows):
                allowed = _healing(permitted, prefix_token, row, tokenizer)
                sampler = Sampler(params, _table())
                if row < len(cuts):
                    sampler.start_mirostat(cuts[row])
                sampled = _sampled(
                    sampler,
                    values.contiguous(),
                    histories[min(row, len(histories) - 1)],
                    banned=list(blocked_tokens or ()),
                    mask=None if allowed is None else pack(allowed, size),
                    num_top=return_top_tokens,
                    uniform=(random + row * _NEXT_ROW) % 1.0,
                )
                sampler.accept(sampled)
                left += [] if sampler.mirostat_cut is None else [sampler.mirostat_cut]
                ids.append(sampled.token_id)
                probabilities.append(sampled.probability or 0.0)
                tops.append(sampled.top)
            if left:
                settings.mirostat_mu = left
        top_ids, top_probs = _top_tensors(tops, return_top_tokens)
        tokens = torch.tensor(ids, dtype=torch.long).view(-1, 1)
        return tokens, top_ids, top_probs, torch.tensor(probabilities).view(-1, 1), ids[0] in ends


def _sampled(
    sampler: Sampler,
    logits: Tensor,
    history: Sequence[int],
    *,
    banned: Collection[int],
    mask: Tensor | None,
    num_top: int,
    uniform: float,
) -> Sample:
    """The token that `uniform` selects, with its probability and the likeliest tokens.

    The number runs through the tokens in the order of exllamav2. That is from the likeliest token
    down where a setting sorts the tokens, and the order of ids elsewhere.
    """
    is_sorted = _sorts(sampler.params, len(logits)) or num_top > 0
    found = sampler.sample(
        logits,
        history,
        banned=banned,
        mask=mask,
        num_top=len(logits) if is_sorted else 0,
        want_probability=True,
        uniform=uniform,
    )
    if not is_sorted:
        return found
    top = found.top[:num_top]
    if sampler.params.skew != 0.0 or sampler.params.is_greedy:
        return replace(found, top=top)  # drawn in this order already
    index = draw(torch.tensor([p for _, p in found.top], dtype=torch.float64), uniform)
    return Sample(*found.top[index], top)


def _sorts(params: SamplerParams, vocab_size: int) -> bool:
    """Whether exllamav2 sorts the tokens by probability before it draws one."""
    return (
        1 < params.top_k < vocab_size
        or params.top_p < 1.0
        or params.tfs < 1.0
        or params.mirostat_tau is not None
    )


def _filtered(
    filters: Sequence[Any], tokenizer: ExLlamaV2Tokenizer, *, prefers_eos: bool
) -> tuple[frozenset[int] | None, Collection[int]]:
    """Tokens that all filters allow (None: all), and the tokens that end the reply."""
    allowed: frozenset[int] | None = None
    ends: set[int] = set()
    for one in filters:
        passed, ended = one.next()
        ends.update(ended or ())
        if passed is not None:
            allowed = frozenset(passed) if allowed is None else allowed & frozenset(passed)
    if allowed is not None and not allowed:
        raise OldAssertionError("the filters allow no token")
    eos = tokenizer.eos_token_id
    if prefers_eos and allowed is not None and eos in allowed:
        allowed = frozenset((eos,))
    return allowed, ends


def _healing(
    allowed: frozenset[int] | None,
    prefix_token: Tensor | None,
    row: int,
    tokenizer: ExLlamaV2Tokenizer,
) -> frozenset[int] | None:
    """`allowed` limited to the tokens that begin with the text of the prefix token."""
    if prefix_token is None:
        return allowed
    ids = frozenset(tokenizer.pieces.replacements(int(prefix_token.view(-1)[row])))
    return ids if allowed is None else allowed & ids


@cache
def _table() -> OpTable:
    settings = read_settings()
    return get_table("cpu", isa=settings.isa, threads=settings.threads)


def _top_tensors(tops: Sequence[Sequence[tuple[int, float]]], count: int) -> tuple[Tensor, Tensor]:
    """Ids and probabilities [b, 1, count]; missing ones are unused ids of probability 0."""
    if count == 0:
        return torch.empty((1, 0, 1), device="meta"), torch.empty((1, 0, 1), device="meta")
    filled = [fill_top(top, count) for top in tops]
    ids = torch.tensor([[[i for i, _ in top]] for top in filled], dtype=torch.long)
    return ids, torch.tensor([[[p for _, p in top]] for top in filled])


def fill_top(top: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """The list of likeliest tokens with `count` entries."""
    used = {token_id for token_id, _ in top}
    unused = (token_id for token_id in range(count + len(used)) if token_id not in used)
    return [*top, *((next(unused), 0.0) for _ in range(count - len(top)))][:count]
