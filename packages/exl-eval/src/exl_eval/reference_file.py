"""File with a reference model's predictions, so that two large models can run one after the other.

Content for each position: the 256 likeliest tokens with their log probabilities (float32), the
total probability t of all other tokens (the tail), and 64 tokens sampled from the tail. This takes
2.6 kB. All logits of a vocabulary of 128k tokens take 256 kB at 16 bits.

Accuracy: the divergence over the likeliest tokens and the tail as a whole is exact except for
rounding (at most 1e-6 nats). The divergence within the tail is estimated from the sample, without
bias, and its standard error is reported. The sample depends only on the window's number.
`window_file.py` has the layout of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from exl_core.engine.score import TextPasses
from exl_core.session.load import LoadedModel
from exl_eval.distributions import CompactRows, Positions, compact_rows, compare_compact
from exl_eval.result import ReferenceFacts
from exl_eval.styles import Layout
from exl_eval.window_file import WindowFile, each_window
from exl_eval.windows import Window

TOP = 256
SAMPLES = 64

OnKept = Callable[[int, int, float], None]
"""Called after each window: windows done, windows in all, the reference's perplexity so far."""


def reference_header(
    layout: Layout, facts: ReferenceFacts, vocab_size: int, size_bytes: int
) -> dict[str, object]:
    """Header of a reference file. `size_bytes` is the size of all tensors of the reference."""
    form: dict[str, object] = {"measurement": "reference", "top": TOP, "samples": SAMPLES}
    form.update(vocab_size=vocab_size, reference_bytes=size_bytes)
    header = {**form, **asdict(facts), **asdict(layout.facts)}
    return {name: value for name, value in header.items() if name not in ("windows", "text")}


def keep_reference(
    reference: LoadedModel,
    layout: Layout,
    vocab_size: int,
    file: WindowFile,
    on_window: OnKept | None = None,
) -> None:
    """Computes and adds the windows that `file` does not have yet."""
    windows = layout.windows
    passes = TextPasses(reference.model, max(len(window.token_ids) for window in windows))

    def find(number: int) -> Mapping[str, Tensor]:
        window = windows[number]
        generator = torch.Generator().manual_seed(number)
        parts = [
            compact_rows(
                logits,
                targets_of(window, start, len(logits)),
                vocab_size,
                generator,
                top=TOP,
                samples=SAMPLES,
            )
            for start, logits in passes.logits(window.token_ids, window.first)
        ]
        return CompactRows.join(parts)._asdict()

    total, count = 0.0, 0
    for done, (found, _) in enumerate(each_window(len(windows), find, file), start=1):
        total, count = total - float(found["true_log_probs"].sum()), count + len(found["tail"])
        if on_window is not None:
            on_window(done, len(windows), math.exp(total / count))


class KeptReference:
    """Predictions of a file, as the reference of a divergence."""

    def __init__(
        self, file: WindowFile, layout: Layout, facts: ReferenceFacts, vocab_size: int
    ) -> None:
        self.facts = facts
        self.vocab_size = vocab_size
        self._file = file
        self._windows = layout.windows

    def compare(self, number: int, candidate: TextPasses) -> Positions:
        window = self._windows[number]
        rows = CompactRows(**self._file.read(number))
        parts = []
        for start, logits in candidate.logits(window.token_ids, window.first):
            at = start - window.first
            these = rows.rows(at, at + len(logits))
            targets = targets_of(window, start, len(logits))
            parts.append(compare_compact(these, logits, targets, self.vocab_size))
        return Positions.join(parts)


def targets_of(window: Window, start: int, count: int) -> Tensor:
    """True tokens start .. start + count - 1 of a window: int64 [count]."""
    return torch.tensor(window.token_ids[start : start + count], dtype=torch.int64)
