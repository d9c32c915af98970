"""The op table: the protocol of all ops that a model consists of, and the choice of a backend.

Every table computes the same functions: `reference` in plain torch, `cpu` with compiled kernels for
one instruction set, `cuda` with the kernels of one GPU. A table knows tensors, never layers or
models.

Tensors are on the table's device and have a contiguous last dimension. "Strided rows" means that
rows may be farther apart than their length, as in a view of a fused projection's output. Tensors
without a stated type are float32. On a GPU, activations between two fused ops (`activations`) are
float16, and inputs and `out` may be of either type. An operand that violates the contract of an op
is a bug in the caller and raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol

from torch import Tensor, device, dtype, inference_mode, tensor

from exl_core.errors import BackendError, RequestError
from exl_core.ops.quantized import QuantColumns, QuantLayout
from exl_core.settings import MAX_THREADS

GateKind = Literal["silu", "gelu_tanh"]


class PackedLinear(Protocol):
    """Weights of one linear in a table's run-time form; only the table that made it can read it."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class PreparedInputs(Protocol):
    """Buffer for the inputs of one linear in its kernel's own form; opaque outside its table."""


Inputs = Tensor | PreparedInputs
"""Inputs of a linear: a tensor [rows, in_features], or the buffer from `inputs_for`."""


class AttentionBatch(Protocol):
    """Rows of one forward pass, prepared for `attend_`; only the table that made it can read it."""


class Sampled(NamedTuple):
    """Result of `sample`; token_id is -1 if no token can be sampled."""

    token_id: int
    probability: float
    top: list[tuple[int, float]]


NOTHING_SAMPLED = Sampled(-1, 0.0, [])


class NextStep(NamedTuple):
    """Continuation of `sample_rows`: launches the next forward pass with the sampled tokens.

    `sample_rows` writes the tokens to `token_ids` too, int64 [rows] on the table's device, 0 where
    there is none. Then it calls `launch`. On a GPU this happens before the host synchronizes with
    the sampling kernels.
    """

    token_ids: Tensor
    launch: Callable[[], None]

    def launch_after(self, sampled: Sequence[Sampled]) -> None:
        """Copies tokens that are already on the host, then calls `launch`."""
        with inference_mode():
            self.token_ids.copy_(tensor([max(one.token_id, 0) for one in sampled]))
        self.launch()


class RowSettings(NamedTuple):
    """Operands of `sample` for one row of `sample_rows`; mask, ids and values are on the CPU."""

    row: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0
    num_top: int = 0
    mask: Tensor | None = None
    ids: Tensor | None = None
    values: Tensor | None = None

    def draw(self, sample: Callable[..., Sampled], logits: Tensor) -> Sampled:
        """Calls `sample` of a table with these settings on the row's logits."""
        return sample(
            logits,
            self.mask,
            self.ids,
            self.values,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            uniform=self.uniform,
            num_top=self.num_top,
        )


class OpTable(Protocol):
    """The functions that a backend provides. Ops ending in `_` work in place."""

    @property
    def name(self) -> str:
        """`reference`, `cpu-` and the instruction set, or `cuda-` and the compute capability."""
        ...

    @property
    def device(self) -> device:
        """Device of the operands; those of `attention_batch` may be on the CPU too."""
        ...

    def bring(self, tensor: Tensor) -> Tensor:
        """Copies the tensor to the table's device by the fastest path; no copy if it is there."""
        ...

    def activations(self, rows: int, columns: int) -> Tensor:
        """Allocates activations between two fused ops: [rows, columns], uninitialized."""
        ...

    @property
    def threads(self) -> int:
        """Number of threads: as requested, or fewer once the system has refused to start them."""
        ...

    def new_linear(
        self, out_features: int, in_features: int, dtype: dtype, has_bias: bool = False
    ) -> PackedLinear:
        """Allocates dense weights of float32, float16 or bfloat16; zero until filled."""
        ...

    def fill_linear(
        self, w: PackedLinear, row_offset: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        """Copies weight [part, k] and bias [part] to rows row_offset .. row_offset + part - 1.

        `weight` is contiguous and has the dtype of `w`. Several threads may fill disjoint ranges of
        rows at the same time.
        """
        ...

    def new_quantized(self, layout: QuantLayout) -> PackedLinear:
        """Allocates a quantized matrix of that layout; it must be filled before it is read."""
        ...

    def fill_quantized(self, w: PackedLinear, first_column: int, columns: QuantColumns) -> None:
        """Repacks columns of a quantized matrix from `first_column` on. Reorders, never rounds.

        `first_column` is a multiple of 16. So is the number of columns, unless they are the last
        ones. Several threads may fill disjoint ranges of columns at the same time.
        """
        ...

    def join(self, parts: Sequence[PackedLinear]) -> PackedLinear:
        """Joins linears with the same k into one whose output concatenates theirs."""
        ...

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        """x [m, k] strided rows -> [m, n], accumulated in float32.

        With quantized w, the CPU kernels round x. For small m they round it to integers, relative
        to the largest value of each span of at most 128 stored rows. The integers have 16 bits, or
        12 where AMX multiplies 5 to 32 rows with codes of at most 4 bits. For large m they round x
        and w to bfloat16 with AMX, and neither without AMX. The reference never rounds x.
        """
        ...

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Inputs:
        """Buffer for m rows of inputs of `w`, written by an op's `out` and read by `linear_add_`.

        Either `plain` [m, k] itself, or a `PreparedInputs` where the table's kernel gains from it.
        """
        ...

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> None:
        """residual [m, n] contiguous += linear(x, w)."""
        ...

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        """linear(rms_norm(x, norm, eps), w), written to `out` if given: [m, n] contiguous."""
        ...

    def norm_gated_linear(  # noqa: PLR0917 - two ops' operands
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        w: PackedLinear,
        kind: GateKind,
        out: Inputs | None = None,
    ) -> Tensor:
        """gated_activation(norm_linear(x, norm, eps, w), kind): [m, n / 2].

        The first half of w's outputs is the gate. The result is written to `out` if given; the
        returned tensor then shares its memory.
        """
        ...

    def embedding(self, token_ids: Tensor, w: PackedLinear) -> Tensor:
        """token_ids int64 [m] -> those rows of w, float32 [m, k]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [m, d] strided rows -> x / sqrt(mean(x^2) + eps) * weight [m, d]."""
        ...

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """RMSNorm of each head by itself, in place; x [rows, heads, d] strided rows."""
        ...

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """RoPE in place; x [rows, heads, d] strided rows.

        cos, sin [rows, r/2] rotate the pairs (i, i + r/2) of each head.
        """
        ...

    def gated_activation(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        """gate_up [m, 2d] strided rows -> act(first half) * second half [m, d]."""
        ...

    def log_sum_exp(self, x: Tensor) -> Tensor:
        """log(sum(exp(x))) of each row of x [m, n] (strided rows) -> float32 [m].

        NaN for a row with a NaN or plus infinity, or of minus infinities only.
        """
        ...

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> None:
        """key, value [rows, kv_heads, d] strided rows -> caches [pages, kv_heads, page_size, row].

        slots int64 [rows] are page_id * page_size + offset. The type of a cache determines how it
        stores a row: float32, float16 and float8_e4m3fn as d values; int8 and uint8 as codes of 8
        and 4 bits with their scales (csrc/include/exl/formats/kv.h). Both caches have the same
        type, except that 8-bit keys may be combined with 4-bit values. Codes are bit-identical in
        every table.
        """
        ...

    def paged_attention(  # noqa: PLR0917 - the op has as many operands as its formula
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        page_table: Tensor,
        row_starts: Tensor,
        past_lens: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """q [rows, q_heads, d] strided rows -> [rows, q_heads * d]; decode and prefill mixed.

        page_table int32 [seqs, pages], row_starts int32 [seqs + 1], past_lens int32 [seqs]. Row r
        of sequence s has position p = past_lens[s] + r - row_starts[s] and attends to keys j <= p;
        if window > 0, only to keys j > p - window. Scores are scaled, then capped to
        softcap * tanh(score / softcap) if softcap > 0, then masked. Query head h reads kv head
        h // (q_heads // kv_heads). The keys and values of this pass are already in the cache, as
        `write_kv` stores them. Codes are dequantized exactly, without the roundings of a decoder.
        """
        ...

    def attention_batch(  # noqa: PLR0917 - the parts of a batch
        self,
        page_table: Tensor,
        row_starts: Tensor,
        past_lens: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        num_pages: int,
        page_size: int,
    ) -> AttentionBatch:
        """Operands of `rope_`, `write_kv` and `paged_attention` that all layers of a pass share.

        They are checked here, once, against caches of num_pages pages. The caller must not change
        them while the batch is in use, because not every table copies them.

        On a GPU, operands that are already on the device are neither copied nor checked. They
        describe sequences of one row each, of any length that fits the page table. A captured CUDA
        graph therefore reads the values that are written to them later.
        """
        ...

    def attend_(  # noqa: PLR0917 - the op has as many operands as its parts
        self,
        qkv: Tensor,
        batch: AttentionBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        head_scale: Tensor | None = None,
        head_shift: Tensor | None = None,
        out: PreparedInputs | None = None,
    ) -> None:
        """All of attention between its two projections.

        The result replaces the queries, or goes to `out` if given (a buffer from `inputs_for`).

        qkv [rows, (q_heads + 2 kv_heads) * d] strided rows: queries, keys, values. Steps, in this
        order: rms_norm_heads_ of queries and of keys, where a norm [d] is given; rope_ of both;
        x * head_scale + head_shift of both, where these are given (float32
        [(q_heads + kv_heads) * d], both or neither); write_kv; paged_attention. Leaves keys and
        values in qkv undefined.
        """
        ...

    def sample(
        self,
        logits: Tensor,
        mask: Tensor | None = None,
        ids: Tensor | None = None,
        values: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        uniform: float = 0.0,
        num_top: int = 0,
    ) -> Sampled:
        """Samples a token from logits [vocab] with the random number `uniform` in [0, 1).

        Steps, in this order:

        1. logits[ids] = values; ids int64, of duplicates the last one counts
        2. drop tokens whose bit in mask is 0 (int32, bit i % 32 of word i // 32)
        3. divide by temperature (> 0)
        4. keep the top_k likeliest tokens (0: all)
        5. keep the longest descending run that sums to at most top_p and has no token below 1e-6
           (1: off)
        6. keep the tokens that are at least min_p times as likely as the likeliest one (0: off)
        7. return the first token at which the running sum by id exceeds uniform

        The likeliest token is always kept; ties are ordered by id. `top` lists the num_top
        likeliest of the kept tokens with their probabilities. A token that is at most e^-87.3 times
        as likely as the likeliest one counts as impossible. Returns NOTHING_SAMPLED if logits hold
        a NaN or plus infinity, or if no finite logit is left.

        All operands are on the CPU, whatever the table's device. `sample_rows` samples there.
        """
        ...

    def sample_rows(
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        """`sample` of the given rows of logits [n, vocab], strided rows on the table's device.

        Rows are independent. On a GPU the host synchronizes once for all of them. Probabilities are
        rounded differently there, so that the same random number may select another token. With
        `next_step`, the next forward pass starts from the sampled tokens; the caller passes it if
        that pass depends on nothing else.
        """
        ...


def device_failures(on: device, doing: str) -> AbstractContextManager[None]:
    """Context that turns a GPU's errors into DeviceError, or OutOfMemoryError with figures."""
    if on.type == "cpu":
        return nullcontext()
    from exl_core.ops.cuda.device import failures

    return failures(doing)


def available_isas() -> tuple[str, ...]:
    """Instruction sets that both the kernels and the processor support, slowest first.

    Raises BackendError if the kernel library cannot be loaded.
    """
    from exl_core.ops.native import native_isas

    return native_isas()


def get_table(name: str, *, isa: str | None = None, threads: int) -> OpTable:
    """Opens the table `reference`, `cpu`, or `cuda` (a device number may follow: `cuda:1`).

    `cpu` uses the best instruction set unless `isa` names one. Raises DeviceError for a GPU that
    does not exist or cannot be used.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise RequestError("not a thread count", expected=f"1 to {MAX_THREADS}", got=threads)
    if name == "reference":
        if isa is not None:
            raise BackendError("the reference backend has no instruction sets", got=isa)
        from exl_core.ops.reference import ReferenceTable

        return ReferenceTable(threads)
    if name == "cpu":
        from exl_core.ops.native import NativeTable

        return NativeTable(isa, threads)
    if name.partition(":")[0] == "cuda":
        from exl_core.ops.cuda.device import open_device

        # Opened before the imports below. Starting the driver releases the GIL, so that other
        # threads run meanwhile.
        gpu = open_device(name)
        from exl_core.ops.cuda.table import CudaTable

        return CudaTable(gpu, threads)
    raise BackendError("no such backend", expected="cpu, cuda or reference", got=name)
