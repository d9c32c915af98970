"""Quality gate of a conversion: is the converted model close enough to its source to be published?

The limits do not define good quality. They are well above the loss of a sound conversion at the
same rate, even for small models, which lose most. A model that exceeds them is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exl_core.session.load import LoadedModel
from exl_eval.divergence import DivergenceOptions, measure_divergence
from exl_eval.held_out import HELD_OUT_TEXT
from exl_eval.result import DivergenceResult

CTX = 512
"""Tokens per window. The text has few windows of this size, so weights are read few times."""

NOISE_NATS = 0.005
"""Allowance for rounding in the kernels, with a margin."""

MOST_NATS = 3.0
"""Limit at any bit rate: beyond it the model has little in common with its source."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """`limit` applies to the mean divergence and to the logarithm of the perplexity ratio, in nats
    per token. `fault` describes the figure that exceeds it, or is None."""

    divergence: DivergenceResult
    limit: float
    fault: str | None


def limit_nats(bits: float, head_bits: float) -> float:
    """Largest divergence that a conversion may cause, in nats per token.

    Each bit less quadruples the squared error of a weight. A converter of 2023 costs a model of
    135M parameters 0.045, 0.24 and 0.81 nats at 5, 4 and 3 bits. Larger models lose far less. The
    limit is twice that. The head adds a quarter as much, because it is one matrix of many.
    """
    body, head = 1.6 * 4.0 ** (3.0 - bits), 0.4 * 4.0 ** (3.0 - head_bits)
    return float(min(MOST_NATS, body + head)) + NOISE_NATS


def measure_gate(
    candidate: LoadedModel,
    reference: LoadedModel,
    *,
    bits: float,
    head_bits: float,
    on_window: Callable[[int, int, float], None] | None = None,
) -> GateResult:
    """Divergence on HELD_OUT_TEXT. Windows begin with BOS if the reference's tokenizer adds it.

    Raises ExlError if a prediction is not a finite number.
    """
    limit = limit_nats(bits, head_bits)
    options = DivergenceOptions(
        ctx=min(CTX, reference.config.max_seq_len),
        bos="each" if reference.tokenizer.adds_bos else "none",
    )
    found = measure_divergence(candidate, reference, HELD_OUT_TEXT, options, on_window)
    for what, nats in (
        ("the divergence", found.mean_kld),
        ("the logarithm of the perplexity", found.ln_ppl_ratio),
    ):
        if not nats <= limit:
            return GateResult(found, limit, f"{what} is {nats:.3g} nats, the limit {limit:.3g}")
    return GateResult(found, limit, None)


def figures_of(result: GateResult) -> dict[str, object]:
    """Fields for the conversion's record: the figures and their inputs, no machine and no date."""
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
