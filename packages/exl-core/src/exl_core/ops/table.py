"""The ops that a model is made of, as one protocol; which tables there are, and picking one.

Every table computes the same functions: `reference` in plain torch, `cpu` in compiled kernels for
one instruction set, `cuda` in those for one GPU. A table knows tensors, never layers or models.

Tensors lie on the table's device, with a contiguous last dimension; "strided rows" means that the
rows may lie further apart than their length, as in a view into a fused projection's output. What
has no type below is float32; on a GPU, activations between two fused ops (`activations`) are
float16, and an `out` or an input of either type is taken.
An operand that breaks an op's contract is the caller's bug and raises ValueError.
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
    """Weights of one linear in the table's own layout; only the table that made it can read it."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class PreparedInputs(Protocol):
    """Room for the inputs of one linear, as its kernel reads them; the business of its table."""


Inputs = Tensor | PreparedInputs
"""[rows, in_features], or what `inputs_for` made of that."""


class AttentionBatch(Protocol):
    """The rows of one pass as `attend_` wants them; only the table that made it can read it."""


class Drawn(NamedTuple):
    """What `sample` drew: token_id -1 if there was nothing to draw."""

    token_id: int
    probability: float
    top: list[tuple[int, float]]


NOTHING_DRAWN = Drawn(-1, 0.0, [])


class Onward(NamedTuple):
    """`token_ids`, int64 [rows] on the table's device, gets the tokens as well, 0 where there is
    none; then `begin` is called, on a GPU before anybody has waited for them."""

    token_ids: Tensor
    begin: Callable[[], None]

    def take(self, drawn: Sequence[Drawn]) -> None:
        """Of tokens that the host has."""
        with inference_mode():
            self.token_ids.copy_(tensor([max(one.token_id, 0) for one in drawn]))
        self.begin()


class RowSettings(NamedTuple):
    """Operands of `sample` for one row of `sample_rows`; mask, ids and values lie on the CPU."""

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

    def draw(self, sample: Callable[..., Drawn], logits: Tensor) -> Drawn:
        """By a table's `sample`, from that row's logits."""
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
    """What a backend has to offer. Ops ending in `_` work in place."""

    @property
    def name(self) -> str:
        """`reference`, or `cpu-` and the instruction set."""
        ...

    @property
    def device(self) -> device:
        """Where operands lie; those of `attention_batch` may lie on the CPU as well."""
        ...

    def bring(self, tensor: Tensor) -> Tensor:
        """The tensor on the table's device, by the fastest way there; itself if it is there."""
        ...

    def activations(self, rows: int, columns: int) -> Tensor:
        """Room for what one fused op leaves to the next: [rows, columns], not cleared."""
        ...

    @property
    def threads(self) -> int:
        """As asked for, until the system refuses to start that many: then those it did start."""
        ...

    def new_linear(
        self, out_features: int, in_features: int, dtype: dtype, has_bias: bool = False
    ) -> PackedLinear:
        """Room for weights of float32, float16 or bfloat16; zero until filled."""
        ...

    def fill_linear(
        self, w: PackedLinear, row_offset: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        """Copies weight [part, k] (contiguous, of w's dtype) and bias [part] to rows row_offset ..

        Disjoint ranges of rows may be filled by several threads at once.
        """
        ...

    def new_quantized(self, layout: QuantLayout) -> PackedLinear:
        """Room for a quantized matrix of that layout; nothing may read it until it is filled."""
        ...

    def fill_quantized(self, w: PackedLinear, first_column: int, columns: QuantColumns) -> None:
        """Repacks columns first_column .. of a quantized matrix: reorders, never rounds.

        `first_column` is a multiple of 16, and so is their number unless they are the last ones.
        Disjoint ranges of columns may be filled by several threads at once.
        """
        ...

    def join(self, parts: Sequence[PackedLinear]) -> PackedLinear:
        """One linear whose outputs are those of `parts`, one after the other; they share k."""
        ...

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        """x [m, k] strided rows -> [m, n], accumulated in float32.

        Of a quantized w, x is rounded: by the CPU's kernels to integers relative to the largest
        value of each 128 stored rows or fewer, of 16 bits (12 where AMX takes 5 to 32 rows and
        codes have at most 4 bits), or where m is large not at all, or with AMX to bfloat16 (and w
        with it); by the reference not at all.
        """
        ...

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Inputs:
        """Room for m rows of inputs of `w`, for ops with an `out` to write and `linear_add_` to
        read: `plain` [m, k], or where it pays something of the table's own."""
        ...

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> None:
        """residual [m, n] contiguous += linear(x, w)."""
        ...

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        """linear(rms_norm(x, norm, eps), w), in `out` if there is one: [m, n] contiguous."""
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
        """gated_activation(norm_linear(x, norm, eps, w), kind): [m, n / 2], w gate first.

        In `out` if there is one; what is returned then is its memory.
        """
        ...

    def embedding(self, token_ids: Tensor, w: PackedLinear) -> Tensor:
        """token_ids int64 [m] -> those rows of w, float32 [m, k]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [m, d] strided rows -> x / sqrt(mean(x^2) + eps) * weight [m, d]."""
        ...

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """x [rows, heads, d] strided rows, each head normed by itself."""
        ...

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """x [rows, heads, d] strided rows; cos, sin [rows, r/2] turn the pairs (i, i + r/2)."""
        ...

    def gated_activation(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        """gate_up [m, 2d] strided rows -> act(first half) * second half [m, d]."""
        ...

    def log_sum_exp(self, x: Tensor) -> Tensor:
        """log(sum(exp(x))) of each of x [m, n] strided rows, float32: [m]. NaN where a value is
        NaN or plus infinity, or all are minus infinity."""
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

        slots int64 [rows] are page_id * page_size + offset. A cache's type says how it stores a
        row: float32, float16 and float8_e4m3fn its d values; int8 and uint8 codes
        of 8 and 4 bits and their scales, as csrc/include/exl/formats/kv.h has them. Keys and
        values are stored alike, but that 8-bit keys may come with 4-bit values. Codes are the same
        to the bit in every table.
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
        of sequence s has position p = past_lens[s] + r - row_starts[s] and sees keys j <= p, of
        these only j > p - window if window > 0. Scores are scaled, then capped to
        softcap * tanh(score / softcap) if softcap > 0, then masked. Query head h reads kv head
        h // (q_heads // kv_heads). The keys of this pass are already in the cache, as `write_kv`
        stores them; codes count as what they stand for, without a decoder's roundings.
        """
        ...

    def attention_batch(  # noqa: PLR0917 - what a batch is made of
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

        Checked here, once, against caches of num_pages pages. Leave the operands as they are while
        the batch lives: not every table copies them. On a GPU, operands that lie there already are
        taken as they are, unchecked, for sequences of one row each and of any length that the page
        table has room for: so a captured graph reads what is written there later.
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
        """All of attention between its two projections; the result replaces the queries, or goes
        to `out` where this table has made one.

        qkv [rows, (q_heads + 2 kv_heads) * d] strided rows: queries, keys, values. In this order:
        rms_norm_heads_ of queries and keys where there are norms [d], rope_ of both, x * head_scale
        + head_shift of both where these are given (float32 [(q_heads + kv_heads) * d], both or
        neither), write_kv, paged_attention. Leaves keys and values in qkv undefined.
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
    ) -> Drawn:
        """The token that `uniform`, in [0, 1), draws from logits [vocab].

        In this order: logits[ids] = values (ids int64 in order, the last one counts), drop tokens
        whose bit is 0 in mask (int32, bit i % 32 of word i // 32), divide by temperature (> 0),
        keep the top_k likeliest (0: all), of these the longest descending run that sums to at most
        top_p and has no token below 1e-6 (1: off), and of these the ones at least min_p times as
        likely as the likeliest (0: off). The likeliest always stays; equals go by id. The token is
        the first at which the running sum by id exceeds uniform. `top` are the num_top likeliest
        of those that are left, with their probabilities. A token e^-87.3 times as likely as the
        likeliest or less counts as impossible. Nothing can be drawn if logits hold a NaN or an
        infinity above zero, or if no finite one is left.

        All operands lie on the CPU, whatever the table's device: `sample_rows` is what draws there.
        """
        ...

    def sample_rows(
        self, logits: Tensor, rows: Sequence[RowSettings], onward: Onward | None = None
    ) -> list[Drawn]:
        """`sample` of those rows of logits [n, vocab], strided rows on the table's device.

        Rows do not depend on one another. On a GPU all of them cost one wait; probabilities, and
        with them which token a number falls to, are rounded differently there. Where nothing but
        its tokens keeps the next pass from beginning, `onward` gets them to it.
        """
        ...


def device_failures(on: device, doing: str) -> AbstractContextManager[None]:
    """What a GPU's failures raise inside becomes DeviceError, or OutOfMemoryError with numbers."""
    if on.type == "cpu":
        return nullcontext()
    from exl_core.ops.cuda.device import failures

    return failures(doing)


def available_isas() -> tuple[str, ...]:
    """Instruction sets that kernels and processor share, slowest first. BackendError without
    kernels."""
    from exl_core.ops.native import native_isas

    return native_isas()


def get_table(name: str, *, isa: str | None = None, threads: int) -> OpTable:
    """`reference`, `cpu` with the best instruction set unless one is named, or `cuda` or `cuda:1`.

    DeviceError for a GPU that is not there or cannot be used.
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

        gpu = open_device(name)  # before more is imported: beside it others have the interpreter
        from exl_core.ops.cuda.table import CudaTable

        return CudaTable(gpu, threads)
    raise BackendError("no such backend", expected="cpu, cuda or reference", got=name)
