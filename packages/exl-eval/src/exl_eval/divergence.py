"""How far a model is from a reference: Kullback-Leibler divergence and what belongs to it.

Both models read the same windows, one chunk of a window after the other, so that neither a window's
logits nor anything on a disk is needed. Knows models and tokenizers; neither progress bars nor
options of a command.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.score import TextPasses
from exl_core.errors import ExlError
from exl_core.load import LoadedModel
from exl_eval.distributions import Positions, compare_logits
from exl_eval.estimates import mean_and_error, percentiles
from exl_eval.result import ConfidenceBand, DivergenceResult
from exl_eval.vocabulary import check_same_tokens, hash_tokenizer
from exl_eval.windows import Window, check_ctx, cut_windows, first_windows, settle_bos

STYLE = "paper"
CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)

OnWindow = Callable[[int, int, float], None]
"""Called after each window: windows done, windows in all, the mean divergence so far."""


@dataclass(frozen=True, slots=True)
class DivergenceOptions:
    """`windows` None: all that the text holds. `bos` is one of BOS_CHOICES; `default` follows the
    reference's tokenizer. `kv_format` is the candidate's; the reference has an fp16 cache."""

    ctx: int = 2048
    windows: int | None = None
    bos: str = "default"
    kv_format: KVFormat = KVFormat.FP16


def measure_divergence(
    candidate: LoadedModel,
    reference: LoadedModel,
    text: str,
    options: DivergenceOptions | None = None,
    on_window: OnWindow | None = None,
) -> DivergenceResult:
    """KL(reference || candidate) and the other figures of `DivergenceResult` on `text`.

    RequestError where the two tokenizers differ on the text or the text holds too few windows.
    """
    options = options or DivergenceOptions()
    check_ctx(options.ctx, min(candidate.config.max_seq_len, reference.config.max_seq_len))
    text_ids = check_same_tokens(reference.tokenizer, candidate.tokenizer, text)
    rule = settle_bos(options.bos, reference.tokenizer)
    cut = cut_windows(text_ids, options.ctx, rule, reference.tokenizer.bos_id)
    windows = first_windows(cut, options.windows, ctx=options.ctx, text_tokens=len(text_ids))

    started = time.perf_counter()
    passes = (
        TextPasses(reference.model, options.ctx),
        TextPasses(candidate.model, options.ctx, kv_format=options.kv_format),
    )
    parts: list[Positions] = []
    for number, window in enumerate(windows, start=1):
        parts.append(compare_window(*passes, window))
        _check_finite(parts[-1], candidate.name, number)
        if on_window is not None:
            so_far = sum(float(part.kld.sum()) for part in parts)
            on_window(number, len(windows), so_far / sum(len(part.kld) for part in parts))
    seconds = time.perf_counter() - started

    data = text.encode("utf-8")
    positions = Positions.join(parts)
    log_ratio, log_ratio_error = mean_and_error(positions.nll - positions.reference_nll)
    same_top = float(positions.same_top.mean())
    return DivergenceResult(
        kld=summarize_kld(positions.kld),
        same_top=same_top,
        same_top_stderr=math.sqrt(same_top * (1 - same_top) / len(positions.kld)),
        delta_p=summarize_delta_p((-positions.nll).exp() - (-positions.reference_nll).exp()),
        ln_ppl_ratio=log_ratio,
        ln_ppl_ratio_stderr=log_ratio_error,
        perplexity=math.exp(float(positions.nll.mean())),
        reference_perplexity=math.exp(float(positions.reference_nll.mean())),
        by_confidence=split_by_confidence(positions),
        tokens=len(positions.kld),
        windows=len(windows),
        ctx=options.ctx,
        style=STYLE,
        bos=rule.value,
        text_sha256=hashlib.sha256(data).hexdigest(),
        text_bytes=len(data),
        text_tokens=len(text_ids),
        tokenizer_sha256=hash_tokenizer(reference.tokenizer),
        vocab_size=min(candidate.config.vocab_size, reference.config.vocab_size),
        model=candidate.name,
        weights_bytes=candidate.weights_bytes,
        reference=reference.name,
        reference_weights_bytes=reference.weights_bytes,
        kv_format=options.kv_format.value,
        exact=candidate.exact,
        reference_exact=reference.exact,
        seconds=seconds,
    )


def compare_window(reference: TextPasses, candidate: TextPasses, window: Window) -> Positions:
    """Both models along one window, a pass of each in turn."""
    ids = torch.tensor(window.token_ids, dtype=torch.int64)
    parts = []
    theirs = _Rows(reference.logits(window.token_ids, window.first))
    for start, logits in candidate.logits(window.token_ids, window.first):
        done = 0
        while done < len(logits):  # vocabularies of other sizes have passes of other lengths
            expected = theirs.take(len(logits) - done)
            at = start + done
            got = logits[done : done + len(expected)]
            parts.append(compare_logits(expected, got, ids[at : at + len(expected)]))
            done += len(expected)
    return Positions.join(parts)


class _Rows:
    """Rows of consecutive passes, taken as many at a time as one of them holds."""

    def __init__(self, passes: Iterator[tuple[int, Tensor]]) -> None:
        self._passes = passes
        self._left: Tensor | None = None

    def take(self, most: int) -> Tensor:
        """The next rows, at most so many: [n, vocab_size]."""
        if self._left is None or not len(self._left):
            _, self._left = next(self._passes)
        taken, self._left = self._left[:most], self._left[most:]
        return taken


def summarize_kld(kld: Tensor) -> dict[str, float]:
    mean, stderr = mean_and_error(kld)
    median, p90, p95, p99, p999 = percentiles(kld, 50, 90, 95, 99, 99.9)
    figures = {"mean": mean, "stderr": stderr, "median": median, "p90": p90, "p95": p95}
    return {**figures, "p99": p99, "p99.9": p999, "max": float(kld.max())}


def summarize_delta_p(delta_p: Tensor) -> dict[str, float]:
    """Symmetric tails are noise; a heavy negative one is damage."""
    mean, stderr = mean_and_error(delta_p)
    percents = (0.1, 1, 5, 25, 50, 75, 95, 99, 99.9)
    names = ("p0.1", "p1", "p5", "p25", "median", "p75", "p95", "p99", "p99.9")
    found = dict(zip(names, percentiles(delta_p, *percents), strict=True))
    rms = math.sqrt(float(delta_p.square().mean()))
    ends = {"min": float(delta_p.min()), "max": float(delta_p.max())}
    return {"mean": mean, "stderr": stderr, "rms": rms, **found, **ends}


def split_by_confidence(
    positions: Positions, edges: Sequence[float] = CONFIDENCE_EDGES
) -> tuple[ConfidenceBand, ...]:
    """By the probability of the reference's likeliest token."""
    bands = []
    for above, up_to in pairwise(edges):
        is_in = (positions.confidence > above) & (positions.confidence <= up_to)
        count = int(is_in.sum())
        kld = float(positions.kld[is_in].mean()) if count else None
        same_top = float(positions.same_top[is_in].mean()) if count else None
        bands.append(ConfidenceBand(above, up_to, count, kld, same_top))
    return tuple(bands)


def _check_finite(positions: Positions, name: str, number: int) -> None:
    for column, values in zip(Positions._fields, positions, strict=True):
        if not bool(values.isfinite().all()):
            raise ExlError(
                "a prediction is not a number",
                where=f"{name}, window {number}",
                expected="finite logits of both models",
                got=f"a {column} that is not finite",
                next_step="The weights may be damaged; 'exl doctor' tests the kernels.",
            )
