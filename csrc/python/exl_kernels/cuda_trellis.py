"""ctypes structs of `exl/cuda/trellis.h` and `exl/cuda/trellis_experts.h`: trellis codes (EXL3)."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint32, c_void_p

MAX_PARTS = 3  # EXL_TRELLIS_MAX_PARTS


class TrellisMatrix(Structure):
    _fields_ = (
        ("words", c_void_p),
        ("suh", c_void_p),
        ("svh", c_void_p),
        ("bias", c_void_p),
        ("k", c_int32),
        ("n", c_int32),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("first_in", c_int32),
        ("first_out", c_int32),
        ("tile_words", c_int32),
        ("codebook", c_int32),
    )


class TrellisInputs(Structure):
    _fields_ = (
        ("matrix", POINTER(TrellisMatrix)),
        ("out", c_void_p),
        ("form", c_int32),
        ("rows", c_int32),
    )


class TrellisPrepare(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("norm", c_void_p),
        ("eps", c_float),
        ("x_dtype", c_int32),
        ("m", c_int32),
        ("count", c_int32),
        ("to", TrellisInputs * MAX_PARTS),
    )


class TrellisLinear(Structure):
    _fields_ = (
        ("parts", TrellisInputs * MAX_PARTS),
        ("sums", c_void_p * MAX_PARTS),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("count", c_int32),
        ("m", c_int32),
        ("y_dtype", c_int32),
        ("epilogue", c_int32),
        ("gate", c_int32),
        ("reserved", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("next", TrellisInputs),
        ("then", POINTER(TrellisPrepare)),
    )


class NearestRings(Structure):
    _fields_ = (
        ("targets", c_void_p),
        ("target_stride", c_int64),
        ("values", c_void_p),
        ("states", c_void_p),
        ("count", c_int32),
        ("even_bits", c_int32),
        ("odd_bits", c_int32),
        ("reach", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    )


class TrellisExperts(Structure):
    _fields_ = (
        ("wide", c_void_p),
        ("narrow", c_void_p),
        ("of_wide", TrellisMatrix),
        ("of_narrow", TrellisMatrix),
        ("wide_rates", c_uint32),
        ("narrow_rates", c_uint32),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("x_dtype", c_int32),
        ("m", c_int32),
        ("top_k", c_int32),
        ("experts", c_int32),
        ("parts", c_int32),
        ("gate", c_int32),
        ("is_added", c_int32),
        ("kernel", c_int32),
        ("is_split", c_int32),
        ("reserved", c_int32),
    )
