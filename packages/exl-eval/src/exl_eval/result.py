"""The records of measurements: the figures, and every choice that they depend on.

Plain data without torch. Two perplexities can be compared when everything but the model agrees
here; two speeds only on one machine, minutes apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Everything of a text and its layout that defines a figure. `text_tokens` and `text_bytes` are
    the whole text's; `bos_id` is the token that `bos` puts in front, None where it puts none."""

    style: str
    ctx: int
    stride: int | None
    bos: str
    bos_id: int | None
    special_text: bool
    windows: int
    text: str
    text_sha256: str
    text_bytes: int
    text_tokens: int
    documents: int
    tokenizer_sha256: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model and how it ran. `token_by_token`: a pass for every token, as in decoding."""

    model: str
    weights_bytes: int
    kv_format: str
    exact: bool
    device: str
    token_by_token: bool = False


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """`nll` is the mean negative log-likelihood of a scored token, in nats; `stderr` belongs to
    `perplexity`, `nll_stderr` to `nll`, `bits_per_byte_stderr` to `bits_per_byte`. `tokens`,
    `words` and `bytes` count what is scored; without words there is no `word_perplexity`.
    `window_nll` has each window's sum and `window_tokens` its count, so that two records can be
    compared window by window. `kept_windows` came from an earlier run that was stopped; `seconds`
    and `tokens_per_s` are of the others."""

    perplexity: float
    stderr: float
    nll: float
    nll_stderr: float
    word_perplexity: float | None
    bits_per_byte: float
    bits_per_byte_stderr: float
    tokens: int
    words: int
    bytes: int
    text: TextFacts
    model: ModelFacts
    kept_windows: int
    seconds: float
    tokens_per_s: float | None
    window_nll: tuple[float, ...]
    window_tokens: tuple[int, ...]

    def as_dict(self) -> dict[str, object]:
        return _record("perplexity", self)


@dataclass(frozen=True, slots=True)
class PerplexityPair:
    """Two models on the same tokens: `ln_ppl_ratio` is ln(first perplexity / second), the mean of
    the differences token by token; its error, sd / sqrt(tokens), is that of the differences."""

    first: PerplexityResult
    second: PerplexityResult
    ln_ppl_ratio: float
    ln_ppl_ratio_stderr: float

    def as_dict(self) -> dict[str, object]:
        return {
            **self.first.as_dict(),
            "compared_to": self.second.as_dict(),
            "ln_ppl_ratio": self.ln_ppl_ratio,
            "ln_ppl_ratio_stderr": self.ln_ppl_ratio_stderr,
        }


@dataclass(frozen=True, slots=True)
class ConfidenceBand:
    """The positions where the reference's likeliest token has a probability of more than `above`
    and at most `up_to`; no figures where there are none."""

    above: float
    up_to: float
    tokens: int
    kld: float | None
    same_top: float | None


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """What a candidate was compared with. `cache_stderr` is the error of the mean divergence that
    comes from the compact form in which a file has the reference; None where the model itself
    ran."""

    reference: str
    reference_exact: bool
    cache_stderr: float | None = None


@dataclass(frozen=True, slots=True)
class DivergenceResult:
    """How far a candidate is from its reference on one text, by position.

    `kld` is KL(reference || candidate) in nats: mean, stderr, median, percentiles (`p99`), max.
    `same_top` is the share of positions with the same likeliest token. `delta_p` is the candidate's
    probability of the true token less the reference's: mean, stderr, rms, percentiles.
    `ln_ppl_ratio` is ln(candidate's perplexity / reference's), its error that of paired
    differences. `vocab_size` counts the tokens that are compared: those of the reference's
    tokenizer. `window_kld` has each window's sum, `window_tokens` its count."""

    kld: Mapping[str, float]
    same_top: float
    same_top_stderr: float
    delta_p: Mapping[str, float]
    ln_ppl_ratio: float
    ln_ppl_ratio_stderr: float
    perplexity: float
    reference_perplexity: float
    by_confidence: tuple[ConfidenceBand, ...]
    tokens: int
    vocab_size: int
    text: TextFacts
    model: ModelFacts
    reference: ReferenceFacts
    kept_windows: int
    seconds: float
    window_kld: tuple[float, ...]
    window_tokens: tuple[int, ...]

    def as_dict(self) -> dict[str, object]:
        return {"direction": "KL(reference || candidate)", **_record("divergence", self)}


def _record(measurement: str, result: PerplexityResult | DivergenceResult) -> dict[str, object]:
    """Flat: the facts stand beside the figures."""
    record: dict[str, object] = {"schema_version": SCHEMA_VERSION, "measurement": measurement}
    for name, value in asdict(result).items():
        if name in ("text", "model", "reference"):
            record.update(value)
        else:
            record[name] = value
    return record


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a few repetitions."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """One prompt length with one batch size. Rates are tokens a second of all `batch` sequences
    together; `bytes_per_token` is what a decode step reads, divided by its tokens. `launches`
    counts what a GPU is given to do for one decode step; None on a CPU."""

    prompt_tokens: int
    decode_tokens: int
    batch: int
    prefill: Spread
    decode: Spread
    bytes_per_token: float
    floor_tok_s: float
    floor_share: float
    launches: int | None = None

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "decode_tokens": self.decode_tokens,
            "batch": self.batch,
            "prefill_tok_s": self.prefill.median,
            "prefill_tok_s_min": self.prefill.lowest,
            "prefill_tok_s_max": self.prefill.highest,
            "decode_tok_s": self.decode.median,
            "decode_tok_s_min": self.decode.lowest,
            "decode_tok_s_max": self.decode.highest,
            "decode_tok_s_per_sequence": self.decode.median / self.batch,
            "bytes_per_token": round(self.bytes_per_token),
            "floor_tok_s": self.floor_tok_s,
            "floor_share": self.floor_share,
            "launches": self.launches,
        }


@dataclass(frozen=True, slots=True)
class SpeedResult:
    """`decode_weight_bytes` are the weights that one decode step reads, `weights_bytes` all that
    are in memory; `peak_memory_bytes` is the process's, `start_memory_bytes` what that was before
    the model was loaded: the interpreter and its libraries. Of a GPU: `device_peak_bytes` is the
    most that torch took, `device_working_bytes` the most in use beside weights and cache."""

    model: str
    device: str
    instruction_set: str
    threads: int
    kv_format: str
    depth: int
    exact: bool
    repeat: int
    weights_bytes: int
    decode_weight_bytes: int
    read_bytes_per_s: float
    load_s: float
    start_memory_bytes: int
    peak_memory_bytes: int
    device_peak_bytes: int | None
    device_working_bytes: int | None
    runs: tuple[SpeedRun, ...]

    def as_dict(self) -> dict[str, object]:
        """The figures of a single run stand beside the facts; `runs` has them in any case."""
        runs = [run.as_dict() for run in self.runs]
        facts = {key: value for key, value in asdict(self).items() if key != "runs"}
        single = runs[0] if len(runs) == 1 else {}
        return {"schema_version": SCHEMA_VERSION, **facts, **single, "runs": runs}


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One op at one shape: `calls` of it in a pass. `bytes`, `operations` and `seconds` are of one
    call: weights and cache that it reads, its inputs and outputs; multiplications and additions;
    the median. `share` is of the time that the bytes take at the measured bandwidth."""

    op: str
    shape: str
    calls: int
    bytes: int
    operations: int
    seconds: float
    share: float
    launches: float | None


@dataclass(frozen=True, slots=True)
class KernelPass:
    """A pass of `rows` tokens, of `batch` sequences alike, each with `past_len` in the cache.

    `seconds` is the whole pass by the wall clock, from tokens to the likeliest next ones."""

    rows: int
    batch: int
    past_len: int
    seconds: float
    launches: int | None
    kernels: tuple[KernelRun, ...]

    @property
    def calls(self) -> int:
        return sum(kernel.calls for kernel in self.kernels)

    @property
    def kernel_seconds(self) -> float:
        return sum(kernel.calls * kernel.seconds for kernel in self.kernels)

    def as_dict(self) -> dict[str, object]:
        sums = {"calls": self.calls, "kernel_seconds": self.kernel_seconds}
        return {**asdict(self), **sums}


@dataclass(frozen=True, slots=True)
class KernelResult:
    """`bytes_per_s`: what this many threads read, or what a copy on the GPU reads and writes."""

    model: str
    device: str
    instruction_set: str
    threads: int
    kv_format: str
    exact: bool
    repeat: int
    bytes_per_s: float
    passes: tuple[KernelPass, ...]

    def as_dict(self) -> dict[str, object]:
        passes = [one.as_dict() for one in self.passes]
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "passes": passes}
