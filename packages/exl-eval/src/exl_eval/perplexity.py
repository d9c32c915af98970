"""Perplexity of a text under a model, in any of the styles.

Knows the scorer and the layout of a text (`styles.py`); neither progress bars nor command options.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.score import CHUNK_ROWS, TextPasses
from exl_core.errors import ExlError
from exl_core.session.load import LoadedModel
from exl_eval.estimates import mean_and_error
from exl_eval.positions import nll_by_position
from exl_eval.result import ModelFacts, PerplexityPair, PerplexityResult
from exl_eval.styles import Layout, WindowOptions, lay_out
from exl_eval.texts import Text, as_text
from exl_eval.vocabulary import check_same_windows
from exl_eval.window_file import each_window, opened

MEAN_NLL_MAX = 700.0  # exp(700) is close to the largest double

OnWindow = Callable[[int, int, float], None]
"""Called after each window with: windows done, windows in total, perplexity so far."""


@dataclass(frozen=True, slots=True)
class PerplexityOptions(WindowOptions):
    """Options of a perplexity. With `token_by_token` the model runs one pass per token, as in
    decoding."""

    kv_format: KVFormat = KVFormat.FP16
    token_by_token: bool = False


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The result and its terms: `nll` float64 [tokens], in the order of the windows."""

    result: PerplexityResult
    layout: Layout
    nll: Tensor


def measure_perplexity(
    loaded: LoadedModel,
    text: str | Text,
    options: PerplexityOptions | None = None,
    on_window: OnWindow | None = None,
) -> PerplexityResult:
    """Measures the perplexity of `text`.

    RequestError if the text has too few windows or an option does not fit the style."""
    return score_text(loaded, text, options, on_window).result


def score_text(
    loaded: LoadedModel,
    text: str | Text,
    options: PerplexityOptions | None = None,
    on_window: OnWindow | None = None,
    *,
    resume: Path | None = None,
) -> ScoredText:
    """As `measure_perplexity`, with the terms.

    With `resume`, each finished window is appended to that file. Windows of an earlier run with the
    same text, model and options are read from it instead of being computed."""
    scorer = WindowScorer(loaded, text, options or PerplexityOptions())
    return gather(scorer.facts, scorer.score, on_window, resume=resume)


class ScoringFacts(NamedTuple):
    """Windows of a text, and the model and settings that they are scored with."""

    name: str
    layout: Layout
    model: ModelFacts


class WindowScorer:
    """A model, and the windows of a text that it scores in any order."""

    def __init__(self, loaded: LoadedModel, text: str | Text, options: PerplexityOptions) -> None:
        """RequestError if the text has too few windows or an option does not fit the style."""
        layout = lay_out(as_text(text), loaded.tokenizer, options, loaded.config.max_seq_len)
        model = model_facts(loaded, options.kv_format, token_by_token=options.token_by_token)
        self.facts = ScoringFacts(loaded.name, layout, model)
        self._passes = TextPasses(
            loaded.model,
            max(len(window.token_ids) for window in layout.windows),
            kv_format=options.kv_format,
            chunk_rows=1 if options.token_by_token else CHUNK_ROWS,
        )

    def score(self, number: int) -> Tensor:
        """Negative log-likelihoods of the scored tokens of a window, float64 [tokens]."""
        window = self.facts.layout.windows[number]
        return -self._passes.score(window.token_ids, window.first)


def gather(
    facts: ScoringFacts,
    score: Callable[[int], Tensor],
    on_window: OnWindow | None = None,
    *,
    resume: Path | None = None,
) -> ScoredText:
    """The result of all windows, in their order. `score` returns the terms of a window; it is not
    called for windows that the file `resume` has."""
    name, layout, model = facts
    num_windows = len(layout.windows)

    def find(number: int) -> dict[str, Tensor]:
        return {"nll": score(number)}

    parts: list[Tensor] = []
    kept_windows, total, count = 0, 0.0, 0
    started = time.perf_counter()
    with opened(resume, file_header("perplexity", layout, model)) as file:
        for number, (found, was_kept) in enumerate(each_window(num_windows, find, file), start=1):
            parts.append(found["nll"])
            kept_windows += was_kept
            total, count = total + float(parts[-1].sum()), count + len(parts[-1])
            check_mean_nll(total / count, f"{name}, window {number}")
            if on_window is not None:
                on_window(number, num_windows, math.exp(total / count))
    seconds = time.perf_counter() - started
    result = _result(layout, model, parts, kept_windows, seconds)
    return ScoredText(result, layout, torch.cat(parts))


def compare_scored(first: ScoredText, second: ScoredText) -> PerplexityPair:
    """Compares two models on the same tokens of one text; RequestError if the windows differ."""
    where = f"{second.result.model.model} beside {first.result.model.model}"
    check_same_windows(first.layout.windows, second.layout.windows, where)
    difference, stderr = mean_and_error(first.nll - second.nll)
    return PerplexityPair(first.result, second.result, difference, stderr)


def model_facts(
    loaded: LoadedModel, kv_format: KVFormat, *, token_by_token: bool = False
) -> ModelFacts:
    return ModelFacts(
        model=loaded.label,
        weights_bytes=loaded.weights_bytes,
        kv_format=kv_format.value,
        exact=loaded.exact,
        device=str(loaded.model.ops.device),
        token_by_token=token_by_token,
    )


def file_header(measurement: str, layout: Layout, *facts: ModelFacts) -> dict[str, object]:
    """Header of a window file: everything that defines the values of its windows.

    The number of windows is left out, because a longer run begins with the same windows."""
    header: dict[str, object] = {"measurement": measurement, **asdict(layout.facts)}
    for one in facts:
        header.update(asdict(one))
    return {name: value for name, value in header.items() if name not in ("windows", "text")}


def check_mean_nll(mean_nll: float, where: str) -> None:
    if not mean_nll < MEAN_NLL_MAX:  # NaN fails too
        raise ExlError(
            "the model gives the text no probability at all",
            where=where,
            expected="a finite perplexity",
            got=f"a mean negative log-likelihood of {mean_nll}",
            next_step="The weights may be damaged; 'exl doctor' tests the kernels.",
        )


def _result(
    layout: Layout, model: ModelFacts, parts: list[Tensor], kept_windows: int, seconds: float
) -> PerplexityResult:
    nll = torch.cat(parts)
    mean, stderr = mean_and_error(nll)
    words = sum(window.words for window in layout.windows)
    size_bytes = sum(window.size_bytes for window in layout.windows)
    total = mean * len(nll)
    word_nll = total / words if words else math.inf
    bits = len(nll) / (size_bytes * math.log(2)) if size_bytes else None
    scored_now = sum(len(part) for part in parts[kept_windows:])
    return PerplexityResult(
        perplexity=math.exp(mean),
        stderr=None if stderr is None else math.exp(mean) * stderr,
        nll=mean,
        nll_stderr=stderr,
        word_perplexity=math.exp(word_nll) if word_nll < MEAN_NLL_MAX else None,
        bits_per_byte=None if bits is None else mean * bits,
        bits_per_byte_stderr=None if bits is None or stderr is None else stderr * bits,
        tokens=len(nll),
        words=words,
        bytes=size_bytes,
        text=layout.facts,
        model=model,
        kept_windows=kept_windows,
        seconds=seconds,
        tokens_per_s=scored_now / seconds if scored_now else None,
        window_nll=tuple(float(part.sum()) for part in parts),
        window_tokens=tuple(len(part) for part in parts),
        by_position=nll_by_position([window.first for window in layout.windows], parts),
    )
