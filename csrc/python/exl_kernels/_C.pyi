# ruff: noqa: N999 - the usual name of a compiled module
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

__version__: str

class _Tensor(Protocol):
    """Tensor attributes that the bindings read; torch.Tensor has all of them."""

    @property
    def is_cpu(self) -> bool: ...
    def data_ptr(self) -> int: ...

class InputError(ValueError): ...

def available_isas() -> tuple[str, ...]: ...

class Linear:
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class PackedLinear(Linear):
    def __init__(
        self, out_features: int, in_features: int, dtype: object, has_bias: bool = False
    ) -> None: ...
    @property
    def dtype(self) -> object: ...
    @property
    def has_bias(self) -> bool: ...
    def fill(self, row_offset: int, weight: _Tensor, bias: _Tensor | None) -> None: ...

class QuantLinear(Linear):
    def __init__(
        self,
        out_features: int,
        in_features: int,
        runs: Iterable[tuple[int, int, int]],
        features: _Tensor | None,
        scale_dtype: object,
        offset: str,
        has_bias: bool = False,
        values: str = "integers",
    ) -> None: ...
    def fill(
        self,
        first_column: int,
        packing: str,
        codes: _Tensor,
        source_rows: _Tensor | None,
        scales: _Tensor | None,
        offsets: _Tensor | None,
        bias: _Tensor | None,
    ) -> None: ...

class TrellisLinear(Linear):
    def __init__(
        self,
        out_features: int,
        in_features: int,
        tile_words: int,
        codebook: str,
        first_out: int = 0,
        first_in: int = 0,
        has_bias: bool = False,
    ) -> None: ...
    def fill(
        self, words: _Tensor, in_scales: _Tensor, out_scales: _Tensor, bias: _Tensor | None
    ) -> None: ...

class JoinedLinear(Linear):
    def __init__(self, parts: list[Linear]) -> None: ...

class Experts:
    def __init__(self, experts: list[Linear]) -> None: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts(self) -> list[Linear]: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class ExpertCall:
    function: ClassVar[int]
    def __init__(
        self,
        table: Table,
        x: _Tensor,
        ids: _Tensor,
        weights: _Tensor,
        gate_up: Experts,
        down: Experts,
        kind: str,
        is_gated: bool,
        out: _Tensor,
    ) -> None: ...
    @property
    def data(self) -> int: ...
    def run(self) -> None: ...

class Table:
    class AttentionBatch:
        def __init__(
            self,
            page_table: _Tensor,
            row_starts: _Tensor,
            past_lens: _Tensor,
            slots: _Tensor,
            cos: _Tensor,
            sin: _Tensor,
            num_pages: int,
            page_size: int,
        ) -> None: ...

    def __init__(self, isa: str, threads: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    is_batch_invariant: bool
    def route(
        self,
        logits: _Tensor,
        bias: _Tensor | None,
        scores: str,
        groups: int,
        kept_groups: int,
        group_scores: int,
        normalizes: bool,
        eps: float,
        factor: float,
        ids: _Tensor,
        weights: _Tensor,
    ) -> None: ...
    def expert_mlp(
        self,
        x: _Tensor,
        ids: _Tensor,
        weights: _Tensor,
        gate_up: Experts,
        down: Experts,
        kind: str,
        is_gated: bool,
        out: _Tensor,
    ) -> None: ...
    def linear(self, x: _Tensor, w: Linear, out: _Tensor) -> None: ...
    def linear_add_(self, x: _Tensor, w: Linear, residual: _Tensor) -> None: ...
    def norm_linear(
        self, x: _Tensor, norm: _Tensor, eps: float, w: Linear, out: _Tensor
    ) -> None: ...
    def norm_gated_linear(
        self, x: _Tensor, norm: _Tensor, eps: float, w: Linear, kind: str, out: _Tensor
    ) -> None: ...
    def head_linear(self, x: _Tensor, w: Sequence[Linear], out: _Tensor) -> None: ...
    def embedding(self, token_ids: _Tensor, w: Linear, out: _Tensor) -> None: ...
    def rms_norm(self, x: _Tensor, weight: _Tensor, eps: float, out: _Tensor) -> None: ...
    def rms_norm_heads_(self, x: _Tensor, weight: _Tensor, eps: float) -> None: ...
    def layer_norm(
        self, x: _Tensor, weight: _Tensor, bias: _Tensor | None, eps: float, out: _Tensor
    ) -> None: ...
    def rope_(self, x: _Tensor, cos: _Tensor, sin: _Tensor) -> None: ...
    def gated_activation(self, gate_up: _Tensor, kind: str, out: _Tensor) -> None: ...
    def activation(self, x: _Tensor, kind: str, out: _Tensor) -> None: ...
    def causal_conv(
        self,
        x: _Tensor,
        weight: _Tensor,
        bias: _Tensor | None,
        has_silu: bool,
        states: _Tensor,
        row_starts: _Tensor,
        past_lens: _Tensor,
        slots: _Tensor,
        out: _Tensor,
    ) -> None: ...
    def delta_rule(
        self,
        qkv: _Tensor,
        b: _Tensor,
        a: _Tensor,
        key_heads: int,
        is_tiled: bool,
        is_by_row: bool,
        decay: _Tensor,
        dt_bias: _Tensor,
        states: _Tensor,
        row_starts: _Tensor,
        past_lens: _Tensor,
        slots: _Tensor,
        out: _Tensor,
    ) -> None: ...
    def state_scan(
        self,
        xbc: _Tensor,
        dt: _Tensor,
        groups: int,
        decay: _Tensor,
        dt_bias: _Tensor,
        skip: _Tensor,
        least_step: float,
        largest_step: float,
        states: _Tensor,
        row_starts: _Tensor,
        past_lens: _Tensor,
        slots: _Tensor,
        out: _Tensor,
    ) -> None: ...
    def log_sum_exp(self, x: _Tensor, out: _Tensor) -> None: ...
    def write_kv(
        self,
        key: _Tensor,
        value: _Tensor,
        key_cache: _Tensor,
        value_cache: _Tensor,
        slots: _Tensor,
    ) -> None: ...
    def paged_attention(
        self,
        q: _Tensor,
        key_cache: _Tensor,
        value_cache: _Tensor,
        page_table: _Tensor,
        row_starts: _Tensor,
        past_lens: _Tensor,
        scale: float,
        window: int,
        softcap: float,
        out: _Tensor,
        sinks: _Tensor | None = None,
    ) -> None: ...
    def attend_(
        self,
        qkv: _Tensor,
        batch: AttentionBatch,
        key_cache: _Tensor,
        value_cache: _Tensor,
        q_norm: _Tensor | None,
        k_norm: _Tensor | None,
        eps: float,
        scale: float,
        window: int,
        softcap: float,
        head_scale: _Tensor | None,
        head_shift: _Tensor | None,
        sinks: _Tensor | None = None,
    ) -> None: ...
    def nearest_rings(
        self,
        targets: _Tensor,
        values: _Tensor,
        even_bits: int,
        odd_bits: int,
        reach: int,
        states: _Tensor,
    ) -> None: ...
    def sample(
        self,
        logits: _Tensor,
        mask: _Tensor | None,
        ids: _Tensor | None,
        factors: _Tensor | None,
        offsets: _Tensor | None,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        uniform: float,
        num_top: int,
    ) -> tuple[int, float, list[tuple[int, float]]]: ...
