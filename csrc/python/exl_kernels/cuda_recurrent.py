"""Operands of the recurrent ops and of gated heads in the CUDA library.

The C headers are `exl/cuda/recurrent.h` and `exl/cuda/gate_heads.h`.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

MAX_TAPS = 8
MAX_STATE_DEPTH = 256  # elements of a key, or state_size of Mamba-2


class StateRows(Structure):
    _fields_ = (
        ("row_starts", c_void_p),
        ("past_lens", c_void_p),
        ("slots", c_void_p),
        ("seqs", c_int32),
        ("rows", c_int32),
    )


class CausalConv(Structure):
    _fields_ = (
        ("rows", StateRows),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("states", c_void_p),
        ("y", c_void_p),
        ("x_dtype", c_int32),
        ("channels", c_int32),
        ("taps", c_int32),
        ("has_silu", c_int32),
    )


class DeltaRule(Structure):
    _fields_ = (
        ("rows", StateRows),
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("ba", c_void_p),
        ("ba_stride", c_int64),
        ("decay", c_void_p),
        ("dt_bias", c_void_p),
        ("states", c_void_p),
        ("y", c_void_p),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("is_tiled", c_int32),
        ("is_by_row", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("is_invariant", c_int32),
        ("reserved", c_int32),
    )


class StateScan(Structure):
    _fields_ = (
        ("rows", StateRows),
        ("xbc", c_void_p),
        ("xbc_stride", c_int64),
        ("dt", c_void_p),
        ("dt_stride", c_int64),
        ("decay", c_void_p),
        ("dt_bias", c_void_p),
        ("skip", c_void_p),
        ("states", c_void_p),
        ("y", c_void_p),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("state_size", c_int32),
        ("groups", c_int32),
        ("least_step", c_float),
        ("largest_step", c_float),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("is_invariant", c_int32),
        ("reserved", c_int32),
    )


class GateHeads(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("norm", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("inverse_permutation", c_void_p),
        ("x_dtype", c_int32),
        ("gate_dtype", c_int32),
        ("out_dtype", c_int32),
        ("m", c_int32),
        ("k", c_int32),
        ("head_dim", c_int32),
        ("norm_size", c_int32),
        ("eps", c_float),
        ("is_sigmoid", c_int32),
        ("is_gate_first", c_int32),
        ("is_row_gate", c_int32),
    )
