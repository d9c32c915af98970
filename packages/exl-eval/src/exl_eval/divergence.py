"""Kullback-Leibler divergence of a model from a reference, and related figures.

Both models read the same windows. They alternate pass by pass, so neither the logits of a whole
window nor a file is needed. Alternatively, the reference's predictions come from a file
(`reference_file.py`). This module knows models and tokenizers, but no progress bars and no command
options.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.score import TextPasses
from exl_core.errors import ExlError, RequestError
from exl_core.session.load import LoadedModel
from exl_core.tokenizer.base import Tokenizer
from exl_eval.distributions import Positions, compare_logits
from exl_eval.estimates import mean_and_error, percentiles
from exl_eval.perplexity import check_mean_nll, file_header, model_facts
from exl_eval.reference_file import targets_of
from exl_eval.result import ConfidenceBand, DivergenceResult, ModelFacts, ReferenceFacts
from exl_eval.styles import Layout, WindowOptions, lay_out
from exl_eval.texts import Text, as_text
from exl_eval.vocabulary import check_same_vocabulary, check_same_windows, hash_tokenizer
from exl_eval.window_file import each_window, opened

CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)

OnWindow = Callable[[int, int, float], None]
"""Called after each window: windows done, windows in all, the mean divergence so far."""


@dataclass(frozen=True, slots=True)
class DivergenceOptions(WindowOptions):
    """`kv_format` applies to the candidate; the reference uses an fp16 cache. The BOS rule
    `default` follows the reference's tokenizer."""

    kv_format: KVFormat = KVFormat.FP16


class Reference(Protocol):
    """Reference distribution P, over the first `vocab_size` tokens."""

    @property
    def facts(self) -> ReferenceFacts: ...
    @property
    def vocab_size(self) -> int: ...
    def compare(self, number: int, candidate: TextPasses) -> Positions:
        """Compares reference and candidate at each scored position of window `number`."""
        ...


def measure_divergence(
    candidate: LoadedModel,
    reference: LoadedModel,
    text: str | Text,
    options: DivergenceOptions | None = None,
    on_window: OnWindow | None = None,
) -> DivergenceResult:
    """KL(reference || candidate) and the other figures of `DivergenceResult` on `text`.

    RequestError where the two tokenizers differ or the text holds too few windows.
    """
    options = options or DivergenceOptions()
    longest = min(candidate.config.max_seq_len, reference.config.max_seq_len)
    tokenizers = reference.tokenizer, candidate.tokenizer
    layout = lay_out_for_both(*tokenizers, as_text(text), options, longest)
    running = RunningReference(reference, layout, candidate.config.vocab_size)
    return measure_against(running, candidate, layout, options.kv_format, on_window)


def measure_against(
    reference: Reference,
    candidate: LoadedModel,
    layout: Layout,
    kv_format: KVFormat = KVFormat.FP16,
    on_window: OnWindow | None = None,
    *,
    resume: Path | None = None,
) -> DivergenceResult:
    """Divergence of `candidate` from `reference` over the windows of `layout`.

    With `resume`, each finished window is saved to that file. Windows of an earlier run with the
    same text, models and options are read from it.
    """
    comparer = WindowComparer(reference, candidate, layout, kv_format)
    return gather_positions(layout, comparer.facts, comparer.compare, on_window, resume=resume)


class ComparisonFacts(NamedTuple):
    """The two models whose predictions are compared, over the first `vocab_size` tokens."""

    name: str
    model: ModelFacts
    reference: ReferenceFacts
    vocab_size: int


class WindowComparer:
    """A model and its reference, and the windows that they are compared on in any order."""

    def __init__(
        self, reference: Reference, candidate: LoadedModel, layout: Layout, kv_format: KVFormat
    ) -> None:
        """RequestError if the candidate's vocabulary is smaller than the reference's."""
        if reference.vocab_size > candidate.config.vocab_size:
            raise RequestError(
                "the candidate's vocabulary is smaller than the reference's",
                where=candidate.name,
                expected=f"at least {reference.vocab_size}",
                got=candidate.config.vocab_size,
            )
        model = model_facts(candidate, kv_format)
        self.facts = ComparisonFacts(candidate.name, model, reference.facts, reference.vocab_size)
        self._reference = reference
        self._passes = TextPasses(candidate.model, longest_of(layout), kv_format=kv_format)

    def compare(self, number: int) -> Mapping[str, Tensor]:
        """The fields of `Positions` of a window, by name."""
        return self._reference.compare(number, self._passes)._asdict()


def gather_positions(
    layout: Layout,
    compared: ComparisonFacts,
    find: Callable[[int], Mapping[str, Tensor]],
    on_window: OnWindow | None = None,
    *,
    resume: Path | None = None,
) -> DivergenceResult:
    """The result of all windows, in their order. `find` returns the positions of a window; it is
    not called for windows that the file `resume` has."""
    name, model, reference, vocab_size = compared
    header = {**file_header("divergence", layout, model), **asdict(reference)}
    parts: list[Positions] = []
    kept_windows, total, count = 0, 0.0, 0
    started = time.perf_counter()
    with opened(resume, header) as file:
        for number, (found, was_kept) in enumerate(
            each_window(layout.facts.windows, find, file), start=1
        ):
            parts.append(Positions(**found))
            _check_finite(parts[-1], name, number)
            kept_windows += was_kept
            total, count = total + float(parts[-1].kld.sum()), count + len(parts[-1].kld)
            if on_window is not None:
                on_window(number, layout.facts.windows, total / count)
    facts = replace(reference, cache_stderr=_cache_stderr(parts))
    seconds = time.perf_counter() - started
    return _result(
        parts,
        layout,
        model,
        facts,
        vocab_size=vocab_size,
        kept_windows=kept_windows,
        seconds=seconds,
    )


def lay_out_for_both(
    reference: Tokenizer,
    candidate: Tokenizer,
    text: Text,
    options: WindowOptions,
    model_max: int,
) -> Layout:
    """Windows that both models read; RequestError if their tokenizers differ."""
    layout = lay_out(text, reference, options, model_max)
    if hash_tokenizer(candidate) != layout.facts.tokenizer_sha256:
        check_same_vocabulary(reference, candidate)
    same = replace(options, bos=layout.facts.bos)
    theirs = lay_out(text, candidate, same, model_max)
    check_same_windows(layout.windows, theirs.windows, candidate.where)
    return layout


def longest_of(layout: Layout) -> int:
    return max(len(window.token_ids) for window in layout.windows)


class RunningReference:
    """A loaded model as the reference. It runs its passes alternately with the candidate's."""

    def __init__(self, loaded: LoadedModel, layout: Layout, candidate_vocab_size: int) -> None:
        self.facts = ReferenceFacts(loaded.label, loaded.exact)
        self.vocab_size = min(loaded.tokenizer.vocab_size, candidate_vocab_size)
        self._windows = layout.windows
        self._passes = TextPasses(loaded.model, longest_of(layout))

    def compare(self, number: int, candidate: TextPasses) -> Positions:
        window = self._windows[number]
        rows = _Rows(self._passes.logits(window.token_ids, window.first))
        parts = []
        for start, logits in candidate.logits(window.token_ids, window.first):
            done = 0
            while done < len(logits):  # rows per pass depend on the size of the vocabulary
                p = rows.take(len(logits) - done)
                targets = targets_of(window, start + done, len(p))
                q = logits[done : done + len(p)]
                parts.append(compare_logits(p, q, targets, self.vocab_size))
                done += len(p)
        return Positions.join(parts)


class _Rows:
    """Rows of consecutive passes. One `take` never crosses a pass."""

    def __init__(self, passes: Iterator[tuple[int, Tensor]]) -> None:
        self._passes = passes
        self._left: Tensor | None = None

    def take(self, most: int) -> Tensor:
        """Returns the next rows [n, vocab_size], n <= most."""
        if self._left is None or not len(self._left):
            _, self._left = next(self._passes)
        taken, self._left = self._left[:most], self._left[most:]
        return taken


def _result(
    parts: list[Positions],
    layout: Layout,
    model: ModelFacts,
    reference: ReferenceFacts,
    **run: Any,
) -> DivergenceResult:
    positions = Positions.join(parts)
    count = len(positions.kld)
    log_ratio, log_ratio_error = mean_and_error(positions.nll - positions.reference_nll)
    same_top = float(positions.same_top.mean())
    return DivergenceResult(
        kld=summarize_kld(positions.kld),
        same_top=same_top,
        same_top_stderr=math.sqrt(same_top * (1 - same_top) / count),
        delta_p=summarize_delta_p((-positions.nll).exp() - (-positions.reference_nll).exp()),
        ln_ppl_ratio=log_ratio,
        ln_ppl_ratio_stderr=log_ratio_error,
        perplexity=_perplexity(positions.nll, model.model),
        reference_perplexity=_perplexity(positions.reference_nll, reference.reference),
        by_confidence=split_by_confidence(positions),
        tokens=count,
        text=layout.facts,
        model=model,
        reference=reference,
        window_kld=tuple(float(part.kld.sum()) for part in parts),
        window_tokens=tuple(len(part.kld) for part in parts),
        **run,
    )


def _cache_stderr(parts: list[Positions]) -> float | None:
    """Standard error of the mean divergence due to sampled tails; None if no tail was sampled."""
    variance = sum(float(part.kld_variance.sum()) for part in parts)
    return math.sqrt(variance) / sum(len(part.kld) for part in parts) if variance else None


def summarize_kld(kld: Tensor) -> dict[str, float | None]:
    mean, stderr = mean_and_error(kld)
    median, p90, p95, p99, p999 = percentiles(kld, 50, 90, 95, 99, 99.9)
    ranks = {"median": median, "p90": p90, "p95": p95, "p99": p99, "p99.9": p999}
    return {"mean": mean, "stderr": stderr, **ranks, "max": float(kld.max())}


def summarize_delta_p(delta_p: Tensor) -> dict[str, float | None]:
    """Statistics of the change in the true token's probability. Symmetric tails are noise. A heavy
    negative tail means that the candidate lost quality."""
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
    """Figures by the probability of the reference's likeliest token."""
    bands = []
    for above, up_to in pairwise(edges):
        is_in = (positions.confidence > above) & (positions.confidence <= up_to)
        count = int(is_in.sum())
        kld = float(positions.kld[is_in].mean()) if count else None
        same_top = float(positions.same_top[is_in].mean()) if count else None
        bands.append(ConfidenceBand(above, up_to, count, kld, same_top))
    return tuple(bands)


def _perplexity(nll: Tensor, where: str) -> float:
    mean = float(nll.mean())
    check_mean_nll(mean, where)
    return math.exp(mean)


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
