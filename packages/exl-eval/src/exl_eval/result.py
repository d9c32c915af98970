"""Records of measurements: the figures and every setting that they depend on.

Plain data without torch. Two perplexities are comparable if everything except `ModelFacts` agrees.
Two speeds are comparable only if measured on one machine within minutes.

A figure that does not exist is None, and null in JSON: the standard error of a single scored token,
and the bits per byte of tokens without bytes. No figure is infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Properties of a text and its layout that define a figure. `text_tokens` and `text_bytes` are
    sizes of the whole text. `bos_id` is the token that the rule `bos` inserts, None if it inserts
    none."""

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
    """A model and how it ran. `token_by_token`: one pass per token, as in decoding."""

    model: str
    weights_bytes: int
    kv_format: str
    exact: bool
    device: str
    token_by_token: bool = False


@dataclass(frozen=True, slots=True)
class PositionBucket:
    """Tokens predicted from `first` to `last` tokens before them in their window: their number, and
    the mean of their negative log-likelihoods with its standard error, None for a single token."""

    first: int
    last: int
    tokens: int
    nll: float
    nll_stderr: float | None


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """Perplexity of a model on one text.

    perplexity, stderr     exp(nll) and its standard error
    nll, nll_stderr        mean negative log-likelihood per scored token, in nats
    word_perplexity        None if no words are scored
    tokens, words, bytes   size of the scored text
    kept_windows           windows taken from an earlier run that was stopped
    seconds, tokens_per_s  time and rate of the other windows
    window_nll             sum of each window; allows a paired comparison of two records
    window_tokens          scored tokens of each window
    by_position            the same figures by position within the window
    """

    perplexity: float
    stderr: float | None
    nll: float
    nll_stderr: float | None
    word_perplexity: float | None
    bits_per_byte: float | None
    bits_per_byte_stderr: float | None
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
    by_position: tuple[PositionBucket, ...] = ()

    def as_dict(self) -> dict[str, object]:
        return _record("perplexity", self)


@dataclass(frozen=True, slots=True)
class PerplexityPair:
    """Two models on the same tokens. `ln_ppl_ratio` is ln(first perplexity / second), which is the
    mean of the differences per token. Its standard error is that of these paired differences,
    sd / sqrt(tokens)."""

    first: PerplexityResult
    second: PerplexityResult
    ln_ppl_ratio: float
    ln_ppl_ratio_stderr: float | None

    def as_dict(self) -> dict[str, object]:
        return {
            **self.first.as_dict(),
            "compared_to": self.second.as_dict(),
            "ln_ppl_ratio": self.ln_ppl_ratio,
            "ln_ppl_ratio_stderr": self.ln_ppl_ratio_stderr,
        }


@dataclass(frozen=True, slots=True)
class ConfidenceBand:
    """Positions at which the reference's likeliest token has a probability greater than `above`
    and at most `up_to`. `kld` and `same_top` are None if there are no such positions."""

    above: float
    up_to: float
    tokens: int
    kld: float | None
    same_top: float | None


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """The reference of a divergence. `cache_stderr` is the standard error of the mean divergence
    that is due to the compact form of a reference file; None if the reference model itself ran."""

    reference: str
    reference_exact: bool
    cache_stderr: float | None = None


@dataclass(frozen=True, slots=True)
class DivergenceResult:
    """Divergence of a candidate from its reference on one text, over positions.

    kld            KL(reference || candidate) in nats: mean, stderr, median, percentiles (`p99`),
                   max
    same_top       share of positions with the same likeliest token
    delta_p        candidate's probability of the true token minus the reference's: mean, stderr,
                   rms, percentiles
    ln_ppl_ratio   ln(candidate's perplexity / reference's); its error is that of paired differences
    vocab_size     number of tokens that are compared: those of the reference's tokenizer
    window_kld     sum of each window
    window_tokens  scored tokens of each window
    """

    kld: Mapping[str, float | None]
    same_top: float
    same_top_stderr: float
    delta_p: Mapping[str, float | None]
    ln_ppl_ratio: float
    ln_ppl_ratio_stderr: float | None
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

    @property
    def mean_kld(self) -> float:
        mean = self.kld["mean"]
        assert mean is not None
        return mean

    def as_dict(self) -> dict[str, object]:
        return {"direction": "KL(reference || candidate)", **_record("divergence", self)}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean and its standard error, None for a single token."""

    mean: float
    stderr: float | None


@dataclass(frozen=True, slots=True)
class StateDifference:
    """Means over tokens. `relative_error` is |b - a| / |a| for the states a of the reference and b
    of the other model. `cosine` is that of the angle between them."""

    relative_error: Estimate
    cosine: Estimate


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """States after one layer. `propagated`: each model read its own states. `local`: the layer of
    the other model read the reference's states."""

    layer: int
    propagated: StateDifference
    local: StateDifference


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """Result of `compare_layers`. `embedding` compares the states before layer 0."""

    embedding: StateDifference
    layers: tuple[LayerDifference, ...]
    tokens: int
    text: TextFacts
    model: ModelFacts
    reference: str
    seconds: float

    def as_dict(self) -> dict[str, object]:
        return _record("layers", self)


def _record(
    measurement: str, result: PerplexityResult | DivergenceResult | LayerComparison
) -> dict[str, object]:
    """Flat record: the fields of the facts are on one level with the figures."""
    record: dict[str, object] = {"schema_version": SCHEMA_VERSION, "measurement": measurement}
    for name, value in asdict(result).items():
        if isinstance(value, dict) and name in ("text", "model", "reference"):
            record.update(value)
        else:
            record[name] = value
    return record


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes over a few repetitions."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """Speed at one prompt length and batch size.

    prefill, decode  tokens per second of all `batch` sequences together
    bytes_per_token  bytes of weights and cache that a decode step reads, over its tokens
    floor_tok_s      decode rate at which these bytes saturate the memory bandwidth
    floor_share      decode rate over `floor_tok_s`
    launches         kernels, copies and fills of one decode step on a GPU; None on a CPU
    """

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
    """Result of `measure_speed`.

    weights_bytes         all weights in memory
    decode_weight_bytes   weights that one decode step reads
    peak_memory_bytes     peak of the process
    start_memory_bytes    peak before the model was loaded: the interpreter and its libraries
    device_peak_bytes     peak of the GPU memory that torch reserved; None on a CPU
    device_working_bytes  peak of the GPU memory in use besides weights and cache; None on a CPU
    parameters            of the model, and those that one token uses
    host_bytes            experts in the host's memory, of layers on a GPU, and the bytes per second
                          at which the threads that compute them read
    """

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
    parameters: int = 0
    active_parameters: int = 0
    host_bytes: int = 0
    host_bytes_per_s: float | None = None

    def as_dict(self) -> dict[str, object]:
        """Record with all runs in `runs`. The figures of a single run are repeated on top level."""
        runs = [run.as_dict() for run in self.runs]
        facts = {key: value for key, value in asdict(self).items() if key != "runs"}
        single = runs[0] if len(runs) == 1 else {}
        return {"schema_version": SCHEMA_VERSION, **facts, **single, "runs": runs}


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One op at one shape.

    calls       number of calls in a pass
    bytes       bytes that one call must move: weights and cache, inputs and outputs
    operations  multiplications and additions of one call
    seconds     median time of one call
    share       minimum time for the bytes at the measured bandwidth, over `seconds`
    launches    kernels, copies and fills of one call on a GPU; None on a CPU
    """

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
    """A pass of `rows` tokens of `batch` equal sequences, each with `past_len` tokens in the cache.

    `seconds` is the wall-clock time of the whole pass, from token ids to the next token ids."""

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
    """Result of `measure_kernels`. `bytes_per_s` is the measured memory bandwidth: reads by
    `threads` threads, or bytes read and written by a copy on the GPU."""

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
