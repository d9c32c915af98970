"""ctypes bindings of the CUDA library: its structs, functions and errors.

The C headers are `exl/cuda.h` and `exl/cuda/<family>.h`.

Importing this module loads nothing. `load` loads the library once. Pointers are integers
(`Tensor.data_ptr()`). A struct keeps no tensor alive: the code that fills it must do so. All calls
release the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from functools import cache
from pathlib import Path

from exl_kernels.cuda_exchange import AllReduce, PartialCopies, PartialSums, SharedSums, Tokens
from exl_kernels.cuda_latent import HeadProducts
from exl_kernels.cuda_recurrent import CausalConv, DeltaRule, GateHeads, StateScan
from exl_kernels.cuda_trellis import (
    NearestRings,
    TrellisExperts,
    TrellisLinear,
    TrellisMatrix,
    TrellisPrepare,
)

ABI = 22
LIBRARY = Path(__file__).with_name("libexl_cuda.so")

OFFSETS = {"middle": 0, "zeros": 1, "minimums": 2, "small_middle": 3, "small_minimums": 4}
VALUES = {"integers": 0, "e4m3": 1, "iq4_nl": 2, "mxfp4": 3}
PACKINGS = {"words": 0, "bytes": 1, "q4_0": 2, "q4_1": 3, "q5_0": 4, "q5_1": 5, "q8_0": 6}
GATES = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 3}
STORE, ADD, GATED, ACTIVATED = 0, 1, 2, 3
K_TILE_BYTES = 12  # of ExlQuantKTile
RUN_BYTES = 16  # of ExlQuantRun
PANEL_HEAD = 32  # bytes of a column panel before its k-tiles
MAX_PARTS = 3
CHUNK_ROWS = 64  # of prepared inputs
PAD_BLOCKS = 3  # after prepared inputs
MAX_TOP = 512  # most top tokens that a sample can return
SCORES = {"softmax": 0, "sigmoid": 1}
MAX_EXPERTS = 768
EXPERT_SOURCES = {"codes": 0, "small_groups": 1, "dense": 2}
MAX_ROW_EXPERTS = 32  # EXL_CUDA_MAX_ROW_EXPERTS
# Counters of expert_row for the largest number of experts: EXL_CUDA_ROW_COUNTER_BYTES each.
ROW_COUNTERS_BYTES = (MAX_ROW_EXPERTS + 1) * 256
EXPERT_ITEM_ROWS = 128  # EXL_CUDA_EXPERT_ITEM_ROWS
LOAD_BYTES = 16  # of ExlQuantLoad
EXPERT_MATRIX_BYTES = 64  # of ExlExpertMatrix
EXPERT_ITEM_BYTES = 16  # of ExlExpertItem


class CudaError(RuntimeError):
    """Failed call of the CUDA library; `code` is a cudaError_t."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({text})")
        self.call, self.code, self.name, self.text = call, code, name, text


class QuantMatrix(Structure):
    _fields_ = (
        ("tiles", c_void_p),
        ("k_tiles", c_void_p),
        ("runs", c_void_p),
        ("device_runs", c_void_p),
        ("permutation", c_void_p),
        ("bias", c_void_p),
        ("panel_bytes", c_int64),
        ("n", c_int32),
        ("k", c_int32),
        ("num_k_tiles", c_int32),
        ("num_blocks", c_int32),
        ("num_runs", c_int32),
        ("scale_dtype", c_int32),
        ("offset_kind", c_int32),
        ("values", c_int32),
    )


class QuantColumns(Structure):
    _fields_ = (
        ("packing", c_int32),
        ("first_column", c_int32),
        ("columns", c_int32),
        ("scale_dtype", c_int32),
        ("codes", c_void_p),
        ("row_stride", c_int64),
        ("stored_rows", c_void_p),
        ("source_rows", c_void_p),
        ("bit_offsets", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("multipliers", c_void_p),
    )


class Prepared(Structure):
    _fields_ = (
        ("permutation", c_void_p),
        ("out", c_void_p),
        ("num_blocks", c_int32),
        ("plain", c_int32),
    )


class Prepare(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("norm", c_void_p),
        ("norm_bias", c_void_p),
        ("is_layer_norm", c_int32),
        ("eps", c_float),
        ("x_dtype", c_int32),
        ("m", c_int32),
        ("k", c_int32),
        ("count", c_int32),
        ("to", Prepared * MAX_PARTS),
        ("least_rows", c_int32),
    )


TILE_ROWS = 8


class QuantLinear(Structure):
    _fields_ = (
        ("parts", POINTER(QuantMatrix) * MAX_PARTS),
        ("inputs", c_void_p * MAX_PARTS),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("count", c_int32),
        ("m", c_int32),
        ("y_dtype", c_int32),
        ("epilogue", c_int32),
        ("gate", c_int32),
        ("is_by_rows", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("inverse_permutation", c_void_p),
        ("is_invariant", c_int32),
    )


class Cache(Structure):
    _fields_ = (
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("key_dtype", c_int32),
        ("value_dtype", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_size", c_int32),
        ("num_pages", c_int32),
    )


class RopeWrite(Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("qkv_dtype", c_int32),
        ("rows", c_int32),
        ("q_heads", c_int32),
        ("rotary_half", c_int32),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("head_scale", c_void_p),
        ("head_shift", c_void_p),
        ("eps", c_float),
        ("reserved", c_float),
        ("slots", c_void_p),
    )


class Attention(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("dtype", c_int32),
        ("rows", c_int32),
        ("q_heads", c_int32),
        ("seqs", c_int32),
        ("page_table", c_void_p),
        ("row_starts", c_void_p),
        ("past_lens", c_void_p),
        ("table_stride", c_int32),
        ("max_rows", c_int32),
        ("max_keys", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("inverse_permutation", c_void_p),
        ("is_invariant", c_int32),
    )


class SampleRow(Structure):
    _fields_ = (
        ("top_p", c_double),
        ("min_p", c_double),
        ("uniform", c_double),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("num_top", c_int32),
        ("first_edit", c_int32),
        ("last_edit", c_int32),
        ("row", c_int32),
        ("mask", c_int64),
    )


class Sample(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("rows", c_int32),
        ("vocab", c_int32),
        ("settings", c_void_p),
        ("edit_ids", c_void_p),
        ("edit_factors", c_void_p),
        ("edit_offsets", c_void_p),
        ("masks", c_void_p),
        ("max_top", c_int32),
        ("reserved", c_int32),
        ("token_ids", c_void_p),
        ("next_ids", c_void_p),
        ("probabilities", c_void_p),
        ("top_ids", c_void_p),
        ("top_probabilities", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    )


class Route(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("logit_bias", c_void_p),
        ("shared_weight", c_void_p),
        ("logits", c_void_p),
        ("counters", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("normed", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("x_dtype", c_int32),
        ("m", c_int32),
        ("d", c_int32),
        ("experts", c_int32),
        ("top_k", c_int32),
        ("scores", c_int32),
        ("groups", c_int32),
        ("kept_groups", c_int32),
        ("group_scores", c_int32),
        ("normalizes", c_int32),
        ("eps", c_float),
        ("factor", c_float),
        ("norm_eps", c_float),
        ("shared", c_int32),
        ("logits_stride", c_int32),
    )


class ExpertInputs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("ids", c_void_p),
        ("matrices", c_void_p),
        ("matrix_stride", c_int32),
        ("num_blocks", c_int32),
        ("permutation", c_void_p),
        ("out", c_void_p * 2),
        ("count", c_int32),
        ("x_dtype", c_int32),
        ("m", c_int32),
        ("k", c_int32),
        ("top_k", c_int32),
        ("experts", c_int32),
        ("tile_rows", c_int32),
        ("reserved", c_int32),
        ("num_items", c_void_p),
        ("items", c_void_p),
        ("pairs", c_void_p),
    )


class ExpertPlaces(Structure):
    _fields_ = (
        ("tiles", c_void_p),
        ("expert_bytes", c_int64),
        ("part_bytes", c_int64),
        ("panel_bytes", c_int64),
    )


class ExpertLinear(Structure):
    _fields_ = (
        ("matrices", c_void_p),
        ("loads", c_void_p),
        ("num_items", c_void_p),
        ("items", c_void_p),
        ("pairs", c_void_p),
        ("x", c_void_p * 2),
        ("y", c_void_p),
        ("next", c_void_p),
        ("max_items", c_int64),
        ("num_loads", c_int32),
        ("x_stride", c_int32),
        ("y_stride", c_int32),
        ("n", c_int32),
        ("parts", c_int32),
        ("epilogue", c_int32),
        ("gate", c_int32),
        ("pairs_per_row", c_int32),
        ("load_bytes", c_int32),
        ("tile_rows", c_int32),
        ("k", c_int32),
        ("x_dtype", c_int32),
        ("source", c_int32),
        ("is_early", c_int32),
        ("only", c_uint32),
        ("has_bias", c_int32),
        ("places", ExpertPlaces * 2),
        ("shared_from", c_int32),
        ("reserved", c_int32),
    )


_P, _I, _L, _F = c_void_p, c_int32, c_int64, c_float

# Operand types of the functions that return a cudaError_t. The stream comes last.
_CALLS: dict[str, tuple[object, ...]] = {
    "open_device": (c_int,),
    "prepare_device": (),
    "host_call": (_P, _P, _P),
    "quant_pack": (POINTER(QuantMatrix), POINTER(QuantColumns), _P),
    "quant_unpack": (POINTER(QuantMatrix), _I, _I, _P, _L, _P),
    "quant_embedding": (POINTER(QuantMatrix), _P, _I, _P, _P),
    "prepare": (POINTER(Prepare), _P),
    "quant_linear": (POINTER(QuantLinear), _P),
    "trellis_pack": (POINTER(TrellisMatrix), _P, _L, _P),
    "trellis_unpack": (POINTER(TrellisMatrix), _I, _I, _P, _P),
    "trellis_prepare": (POINTER(TrellisPrepare), _P),
    "trellis_linear": (POINTER(TrellisLinear), _P),
    "trellis_experts": (POINTER(TrellisExperts), _P),
    "nearest_rings": (POINTER(NearestRings), _P),
    "rms_norm": (_P, _I, _L, _P, _F, _I, _I, _P, _I, _L, _P),
    "rms_norm_heads": (_P, _I, _L, _P, _F, _I, _I, _I, _P),
    "rope": (_P, _I, _L, _P, _P, _I, _I, _I, _I, _P),
    "gated_activation": (_P, _I, _L, _I, _I, _I, _P, _I, _L, _P),
    "activation": (_P, _I, _L, _I, _I, _I, _P, _I, _L, _P),
    "embedding": (_P, _I, _P, _I, _I, _P, _P),
    "write_kv": (POINTER(Cache), _P, _P, _I, _L, _P, _I, _P),
    "rope_write": (POINTER(RopeWrite), POINTER(Cache), _P),
    "read_keys": (POINTER(Cache), _P, _I, _P, _P),
    "attention": (POINTER(Attention), POINTER(Cache), _P),
    "sample": (POINTER(Sample), _P),
    "route": (POINTER(Route), _P),
    "expert_inputs": (POINTER(ExpertInputs), _P),
    "expert_linear": (POINTER(ExpertLinear), _P),
    "expert_row": (*2 * (POINTER(ExpertLinear),), POINTER(Route), _P, _P, _I, _P, _P),
    "expert_many_rows": (POINTER(ExpertLinear), _P, _I, _P),
    "expert_gather": (POINTER(ExpertInputs), _L, _P),
    "expert_sum": (_P, _P, _I, _I, _I, _I, _P, _L, _P),
    "causal_conv": (POINTER(CausalConv), _P),
    "delta_rule": (POINTER(DeltaRule), _P),
    "state_scan": (POINTER(StateScan), _P),
    "prepare_sums": (POINTER(Prepare), POINTER(PartialSums), _P),
    "prepare_shared_sums": (POINTER(Prepare), POINTER(SharedSums), _P),
    "quant_linear_sent": (POINTER(QuantLinear), POINTER(PartialCopies), _P),
    "trellis_prepare_sums": (POINTER(TrellisPrepare), POINTER(PartialSums), _P),
    "trellis_linear_sent": (POINTER(TrellisLinear), POINTER(PartialCopies), _P),
    "exchange_empty": (_P, _L, _P),
    "exchange_tokens": (POINTER(Tokens), _P),
    "exchange_send": (_P, _L, _P, _I, _I, _P, POINTER(PartialCopies), _L, _P),
    "exchange_gather": (_P, _L, _I, _I, _I, _P, _L, POINTER(PartialSums), _P),
    "exchange_all_reduce": (POINTER(AllReduce), _P),
    "exchange_settle": (POINTER(PartialSums), _P, _L, _I, _I, _P),
    "shared_new": (_L, POINTER(_P), _P),
    "shared_free": (_P,),
    "shared_open": (_P, POINTER(_P)),
    "shared_close": (_P,),
    "gate_heads": (POINTER(GateHeads), _P),
    "head_products": (POINTER(HeadProducts), _P),
}
# Operand types of the functions that return a size in bytes.
_SIZES: dict[str, tuple[object, ...]] = {
    "quant_linear_workspace": (_I, _I),
    "trellis_inputs_bytes": (_I, _I, _I),
    "trellis_linear_workspace": (_I, _I),
    "trellis_experts_workspace": (POINTER(TrellisExperts),),
    "nearest_rings_workspace": (_I, _I),
    "attention_workspace": (_I, _I),
    "recurrence_workspace": (_I, _I, _I, _I, _I),
    "sample_workspace": (_I, _I),
}


class CudaLibrary:
    """The loaded library. Raises OSError if it is missing or cannot be loaded."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name, operands in _CALLS.items():
            self._declare(name, c_int, operands)
        for name, operands in _SIZES.items():
            self._declare(name, c_int64, operands)
        self._declare("abi", c_int, ())
        self._declare("error_name", c_char_p, (c_int,))
        self._declare("error_text", c_char_p, (c_int,))
        self._declare("versions", c_int, (POINTER(c_int), POINTER(c_int)))
        self._declare("max_prepared_rows", c_int, (POINTER(c_int),))
        self._declare("trellis_max_rows", c_int, (POINTER(c_int),))
        self._declare("least_rows", c_int, (c_int32, POINTER(c_int)))
        self._declare("architectures", c_char_p, ())
        if self.abi != ABI:
            raise OSError(f"{path}: interface {self.abi} of the CUDA library, expected {ABI}")

    @property
    def abi(self) -> int:
        return int(self._library.exl_cuda_abi())

    @property
    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that the library has machine code for, times ten: 90 for 9.0."""
        return tuple(int(name) for name in self._library.exl_cuda_architectures().split())

    def versions(self) -> tuple[int, int]:
        """CUDA versions of the driver (0 without a driver) and of the library: 13000 for 13.0."""
        driver, runtime = c_int(0), c_int(0)
        self._check("versions", self._library.exl_cuda_versions(byref(driver), byref(runtime)))
        return driver.value, runtime.value

    def max_prepared_rows(self) -> int:
        """Most rows that a gated linear can store as prepared inputs on the current device."""
        rows = c_int(0)
        self._check("max_prepared_rows", self._library.exl_cuda_max_prepared_rows(byref(rows)))
        return rows.value

    def trellis_max_rows(self) -> int:
        """Most rows for which kernels read trellis codes on the current device."""
        rows = c_int(0)
        self._check("trellis_max_rows", self._library.exl_cuda_trellis_max_rows(byref(rows)))
        return rows.value

    def least_rows(self, *, has_integers: bool) -> int:
        """`Prepare.least_rows` of inputs for the batch-invariant mode on the current device."""
        rows = c_int(0)
        self._check("least_rows", self._library.exl_cuda_least_rows(has_integers, byref(rows)))
        return rows.value

    def call(self, name: str, *operands: object) -> None:
        """Calls `exl_cuda_<name>`. Structs are passed by reference. Raises CudaError on failure."""
        function = getattr(self._library, f"exl_cuda_{name}")
        self._check(name, function(*_by_reference(operands)))

    def size(self, name: str, *operands: object) -> int:
        """Calls `exl_cuda_<name>`, which returns a size in bytes. Structs are passed by
        reference."""
        return int(getattr(self._library, f"exl_cuda_{name}")(*_by_reference(operands)))

    def _declare(self, name: str, result: object, operands: tuple[object, ...]) -> None:
        function = getattr(self._library, f"exl_cuda_{name}")
        function.restype, function.argtypes = result, operands

    def _check(self, name: str, code: int) -> None:
        if code != 0:
            library = self._library
            raise CudaError(
                f"exl_cuda_{name}",
                code,
                library.exl_cuda_error_name(code).decode(),
                library.exl_cuda_error_text(code).decode(),
            )


def _by_reference(operands: Iterable[object]) -> list[object]:
    return [byref(one) if isinstance(one, Structure) else one for one in operands]


def prepared_halves(rows: int, num_blocks: int, least_rows: int = 1) -> int:
    """Size of `rows` rows of prepared inputs in float16 numbers (`exl_cuda_prepared_halves`).

    A chunk that is not full has the layout of at least `least_rows` rows.
    """

    def chunk(count: int, blocks: int) -> int:
        needed = max(count, least_rows)
        fitting = (rows for rows in (1, 8, 16, 32, CHUNK_ROWS) if rows >= needed)
        return blocks * 32 * next(fitting)

    whole, rest = divmod(rows, CHUNK_ROWS)
    own = whole * chunk(CHUNK_ROWS, num_blocks) + (chunk(rest, num_blocks) if rest else 0)
    return own + chunk(rest or CHUNK_ROWS, PAD_BLOCKS)


def max_items(pairs: int, experts: int, tile_rows: int) -> int:
    """Most items of a list of pairs (`exl_cuda_max_items`)."""
    return min(pairs, experts) + pairs // tile_rows


@cache
def load() -> CudaLibrary:
    """Loads the library that was built with this package."""
    return CudaLibrary()
