"""The record of a perplexity run: the figure, and every choice that it depends on.

Plain data without torch. Two figures can be compared when everything but the model agrees here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """`nll` is the mean negative log-likelihood of a scored token, in nats; `stderr` belongs to
    `perplexity`, `nll_stderr` to `nll`. `tokens` counts the scored ones."""

    perplexity: float
    stderr: float
    nll: float
    nll_stderr: float
    tokens: int
    windows: int
    ctx: int
    style: str
    bos: str
    text_sha256: str
    text_bytes: int
    text_tokens: int
    tokenizer_sha256: str
    model: str
    weights_bytes: int
    kv_format: str
    seconds: float
    tokens_per_s: float

    def as_dict(self) -> dict[str, object]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}
