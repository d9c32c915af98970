"""Compares two records of perplexity or divergence, and says which figures are comparable.

Works on records as printed by `--json`, by the fields that define their figures. The types of the
figures are checked first (`record_check.py`). Plain data without torch; needs neither the models
nor the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from exl_core.errors import RequestError
from exl_eval.record_check import Record, check_record
from exl_eval.result import SCHEMA_VERSION

TEXT_FIELDS: Mapping[str, str] = {
    "text_sha256": "another text",
    "style": "another way of cutting and scoring",
    "ctx": "predictions from more or fewer tokens",
    "stride": "windows that overlap by another amount",
    "bos": "another rule for BOS",
    "bos_id": "another token in front",
    "special_text": "special tokens in the text are read in another way",
    "documents": "another number of documents",
    "tokens": "other tokens are scored",
    "windows": "other tokens are scored",
    "tokenizer_sha256": "another vocabulary: a token is not the same amount of text",
}
"""Fields that must agree, each with the meaning of a difference."""

REFERENCE_FIELDS: Mapping[str, str] = {
    "reference": "a distance from another model",
    "reference_exact": "a distance from another computation",
    "vocab_size": "distributions over another vocabulary",
}
MODEL_FIELDS = ("model", "weights_bytes", "kv_format", "exact", "device", "token_by_token")
"""Fields that may differ: the model and how it ran are the subject of a comparison."""

SAME_BYTES = 0.01
"""Largest relative difference in size, in bytes, at which two scored parts of one text count as
the same part."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A field that differs and so makes figures incomparable."""

    field: str
    a: object
    b: object
    why: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of A minus that of B, and the standard error of the difference. `is_paired`: the
    error comes from differences per window. It is much smaller than one that combines the two
    separate errors. `stderr` is None if a record has no error, because it scored a single token."""

    figure: str
    a: float
    b: float
    difference: float
    stderr: float | None
    is_paired: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare_records`. `is_comparable`: the main figures of both measure the same
    quantity. `differing` has the values of each of `MODEL_FIELDS` that differs."""

    measurement: str
    is_comparable: bool
    obstacles: tuple[Obstacle, ...]
    differing: Mapping[str, tuple[object, object]]
    differences: tuple[Difference, ...]

    def as_dict(self) -> dict[str, object]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def compare_records(
    a: Record, b: Record, names: tuple[str, str] = ("record A", "record B")
) -> Comparison:
    """Compares two records; RequestError unless both are perplexities or both divergences.

    `names`: where the records come from, for error messages.
    """
    measurement = _measurement(a, names[0])
    if _measurement(b, names[1]) != measurement:
        raise RequestError(
            "the two records are of different measurements",
            expected=measurement,
            got=b["measurement"],
        )
    for record, name in zip((a, b), names, strict=True):
        check_record(record, name)
    fields = dict(TEXT_FIELDS)
    if measurement == "divergence":
        fields.update(REFERENCE_FIELDS)
    obstacles = tuple(
        Obstacle(name, a.get(name), b.get(name), why)
        for name, why in fields.items()
        if a.get(name) != b.get(name)
    )
    return Comparison(
        measurement=measurement,
        is_comparable=not obstacles,
        obstacles=obstacles,
        differing={
            name: (a.get(name), b.get(name)) for name in MODEL_FIELDS if a.get(name) != b.get(name)
        },
        differences=tuple(_differences(measurement, a, b, obstacles)),
    )


def _measurement(record: Record, name: str) -> str:
    measurement = record.get("measurement")
    if measurement not in ("perplexity", "divergence"):
        raise RequestError(
            "no record that can be compared",
            where=name,
            expected="what 'exl eval perplexity --json' or 'exl eval divergence --json' printed",
            got=measurement or f"an object with {', '.join(list(record)[:4])}",
            next_step="Speeds are compared on one machine, minutes apart, by running both again.",
        )
    if record.get("schema_version") != SCHEMA_VERSION:
        raise RequestError(
            "the record is of another version",
            where=name,
            expected=SCHEMA_VERSION,
            got=record.get("schema_version"),
        )
    return str(measurement)


def _differences(
    measurement: str, a: Record, b: Record, obstacles: Sequence[Obstacle]
) -> list[Difference]:
    if measurement == "divergence":
        if obstacles:
            return []
        kld = _paired("kld", a, b, "window_kld", (a["kld"]["mean"], b["kld"]["mean"]))
        top = _separate("same_top", a, b)
        return [kld, top, _separate("ln_ppl_ratio", a, b)]
    if not obstacles:
        nll = _paired("nll", a, b, "window_nll", (a["nll"], b["nll"]))
        return [nll, _separate("perplexity", a, b, stderr="stderr"), *_bits_per_byte(a, b)]
    return _bits_per_byte(a, b) if _is_same_part(a, b) else []


def _bits_per_byte(a: Record, b: Record) -> list[Difference]:
    """Empty if the scored tokens of a record have no bytes."""
    if a["bits_per_byte"] is None or b["bits_per_byte"] is None:
        return []
    return [_separate("bits_per_byte", a, b)]


def _is_same_part(a: Record, b: Record) -> bool:
    """True if two perplexities cover about the same part of one text. Their bits per byte are then
    comparable even if the tokenizers differ."""
    if a.get("text_sha256") != b.get("text_sha256"):
        return False
    sizes = int(a["bytes"]), int(b["bytes"])
    return abs(sizes[0] - sizes[1]) <= SAME_BYTES * max(sizes)


def _separate(figure: str, a: Record, b: Record, *, stderr: str = "") -> Difference:
    """Difference of two figures; the standard errors are combined as independent ones."""
    error = stderr or f"{figure}_stderr"
    return Difference(
        figure,
        float(a[figure]),
        float(b[figure]),
        float(a[figure] - b[figure]),
        _combined(a[error], b[error]),
        is_paired=False,
    )


def _combined(a: float | None, b: float | None) -> float | None:
    """Error of the difference of two independent figures; None if one has no error."""
    return None if a is None or b is None else math.hypot(a, b)


def _paired(figure: str, a: Record, b: Record, sums: str, means: tuple[float, float]) -> Difference:
    """Difference of two means over the same tokens, with the error from W paired windows.

    D_w is the difference of the sums of window w, T_w its number of tokens, and
    d = sum(D) / sum(T). The error is sqrt(W / (W - 1) sum((D_w - d T_w)^2)) / sum(T)."""
    tokens = a["window_tokens"]
    if tokens != b["window_tokens"]:
        raise RequestError(
            "the two records have other windows",
            expected="equal window_tokens, because all settings agree",
            next_step="Measure both again.",
        )
    by_window = [x - y for x, y in zip(a[sums], b[sums], strict=True)]
    total, count = sum(tokens), len(tokens)
    mean = math.fsum(by_window) / total
    if count < 2:  # the variance between windows needs at least two
        own = (
            (a["kld"]["stderr"], b["kld"]["stderr"])
            if figure == "kld"
            else (a["nll_stderr"], b["nll_stderr"])
        )
        return Difference(figure, *means, mean, _combined(*own), is_paired=False)
    squares = math.fsum((d - mean * t) ** 2 for d, t in zip(by_window, tokens, strict=True))
    stderr = math.sqrt(count / (count - 1) * squares) / total
    return Difference(figure, *means, mean, stderr, is_paired=True)
