"""Whether a converted model is close enough to its source to be given away.

The limits do not say what is good. They stand well past what a sound conversion costs at its rate,
even of a small model, which suffers most, so that what they catch is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exl_core.load import LoadedModel
from exl_eval.divergence import DivergenceOptions, measure_divergence
from exl_eval.held_out import HELD_OUT_TEXT
from exl_eval.result import DivergenceResult

CTX = 512
"""Tokens in a window: a few of them, so that the models are read a few times only."""

NOISE_NATS = 0.005
"""What rounding in the kernels may add, with room."""

MOST_NATS = 3.0
"""At any rate: beyond it little of the source is left."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """`limit` is of the mean divergence and of the perplexity's logarithm, in nats a token; `fault`
    says what exceeds it, None where nothing does."""

    divergence: DivergenceResult
    limit: float
    fault: str | None


def limit_nats(bits: float, head_bits: int) -> float:
    """The most that a conversion may cost, in nats a token.

    A bit less quadruples the squared error of a weight. A converter of 2023 costs a model of 135M
    parameters 0.045, 0.24 and 0.81 nats at 5, 4 and 3 bits, larger models far less: the limit is
    twice that, and a quarter of it for the head, which is one matrix of many.
    """
    body, head = 1.6 * 4.0 ** (3.0 - bits), 0.4 * 4.0 ** (3.0 - head_bits)
    return float(min(MOST_NATS, body + head)) + NOISE_NATS


def measure_gate(
    candidate: LoadedModel,
    reference: LoadedModel,
    *,
    bits: float,
    head_bits: int,
    on_window: Callable[[int, int, float], None] | None = None,
) -> GateResult:
    """The divergence on HELD_OUT_TEXT, in windows that begin with BOS where the model wants it.

    An ExlError where a model predicts what is not a number.
    """
    limit = limit_nats(bits, head_bits)
    options = DivergenceOptions(
        ctx=min(CTX, reference.config.max_seq_len),
        bos="each" if reference.tokenizer.adds_bos else "none",
    )
    found = measure_divergence(candidate, reference, HELD_OUT_TEXT, options, on_window)
    for what, nats in (
        ("the divergence", found.kld["mean"]),
        ("the logarithm of the perplexity", found.ln_ppl_ratio),
    ):
        if not nats <= limit:
            return GateResult(found, limit, f"{what} is {nats:.3g} nats, the limit {limit:.3g}")
    return GateResult(found, limit, None)


def figures_of(result: GateResult) -> dict[str, object]:
    """For the record: all that the figures depend on, nothing of where and when."""
    found = result.divergence
    return {
        "limit_nats": result.limit,
        "kld": dict(found.kld),
        "same_top": found.same_top,
        "same_top_stderr": found.same_top_stderr,
        "ln_ppl_ratio": found.ln_ppl_ratio,
        "ln_ppl_ratio_stderr": found.ln_ppl_ratio_stderr,
        "perplexity": found.perplexity,
        "reference_perplexity": found.reference_perplexity,
        "tokens": found.tokens,
        "windows": found.text.windows,
        "ctx": found.text.ctx,
        "bos": found.text.bos,
        "text_sha256": found.text.text_sha256,
        "tokenizer_sha256": found.text.tokenizer_sha256,
    }
