"""Perplexity of a text under a model, in the style of the papers.

The text is tokenized once, with no special tokens added, and cut into disjoint windows of `ctx`
tokens; what is left at the end is dropped. Of each window all tokens but the first are scored, each
given the ones before it in its window. Where BOS goes is a choice of its own (`BosRule`). Knows the
scorer and the tokenizer; neither progress bars nor options.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from exl_core.cache.format import KVFormat
from exl_core.engine.score import CHUNK_ROWS, TextPasses
from exl_core.errors import ExlError
from exl_core.load import LoadedModel
from exl_eval.result import PerplexityResult
from exl_eval.vocabulary import hash_tokenizer
from exl_eval.windows import check_ctx, cut_windows, first_windows, settle_bos

STYLE = "paper"
MEAN_NLL_MAX = 700.0  # e to the power of it is close to the largest double

OnWindow = Callable[[int, int, float], None]
"""Called after each window: windows done, windows in all, the perplexity so far."""


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    """`windows` None: all that the text holds. `bos` is one of BOS_CHOICES; `default` is ONCE for a
    tokenizer that adds BOS by itself and NONE for one that does not. With `token_by_token` the
    model runs as when it decodes, a pass for every token."""

    ctx: int = 2048
    windows: int | None = None
    bos: str = "default"
    kv_format: KVFormat = KVFormat.FP16
    token_by_token: bool = False


class RunningNll:
    """Sums of the negative log-likelihood and its square, in double precision."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._sum_of_squares = 0.0

    def add(self, log_probs: torch.Tensor) -> None:
        nll = -log_probs.double()
        self.count += nll.numel()
        self._sum += float(nll.sum())
        self._sum_of_squares += float(nll.square().sum())

    @property
    def mean(self) -> float:
        return self._sum / self.count

    @property
    def stderr(self) -> float:
        """Of the mean: sqrt((mean of squares - square of mean) / (T - 1))."""
        if self.count < 2:
            return math.inf
        variance = self._sum_of_squares / self.count - self.mean**2
        return math.sqrt(max(variance, 0.0) / (self.count - 1))

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)


def measure_perplexity(
    loaded: LoadedModel,
    text: str,
    options: PerplexityOptions,
    on_window: OnWindow | None = None,
) -> PerplexityResult:
    tokenizer = loaded.tokenizer
    rule = settle_bos(options.bos, tokenizer)
    check_ctx(options.ctx, loaded.config.max_seq_len)
    # Special tokens that the text spells out count as themselves, as in every published figure:
    # WikiText's "<unk>" is one token of Gemma's, and 30 becomes 12 when it is three.
    text_ids = tokenizer.encode(text, allow_special=True, add_bos=False)
    cut = cut_windows(text_ids, options.ctx, rule, tokenizer.bos_id)
    windows = first_windows(cut, options.windows, ctx=options.ctx, text_tokens=len(text_ids))

    started = time.perf_counter()
    nll = RunningNll()
    passes = TextPasses(
        loaded.model,
        options.ctx,
        kv_format=options.kv_format,
        chunk_rows=1 if options.token_by_token else CHUNK_ROWS,
    )
    for number, window in enumerate(windows, start=1):
        nll.add(passes.score(window.token_ids, window.first))
        _check_figure(nll.mean, f"{loaded.name}, window {number}")
        if on_window is not None:
            on_window(number, len(windows), nll.perplexity)
    seconds = time.perf_counter() - started

    data = text.encode("utf-8")
    return PerplexityResult(
        perplexity=nll.perplexity,
        stderr=nll.perplexity * nll.stderr,
        nll=nll.mean,
        nll_stderr=nll.stderr,
        tokens=nll.count,
        windows=len(windows),
        ctx=options.ctx,
        style=STYLE,
        bos=rule.value,
        text_sha256=hashlib.sha256(data).hexdigest(),
        text_bytes=len(data),
        text_tokens=len(text_ids),
        tokenizer_sha256=hash_tokenizer(tokenizer),
        model=loaded.name,
        weights_bytes=loaded.weights_bytes,
        kv_format=options.kv_format.value,
        exact=loaded.exact,
        seconds=seconds,
        tokens_per_s=nll.count / seconds,
    )


def _check_figure(mean_nll: float, where: str) -> None:
    if not mean_nll < MEAN_NLL_MAX:  # NaN fails too
        raise ExlError(
            "the model gives the text no probability at all",
            where=where,
            expected="a finite perplexity",
            got=f"a mean negative log-likelihood of {mean_nll}",
            next_step="The weights may be damaged; 'exl doctor' tests the kernels.",
        )
