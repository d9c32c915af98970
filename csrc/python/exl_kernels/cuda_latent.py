"""Operands of the products of latent attention in the CUDA library.

The C header is `exl/cuda/latent.h`.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

HEAD_COPIES = 3
MAX_HEAD_K = 1024
MAX_NORMED = 512  # numbers of a row that is copied after a norm


class HeadCopy(Structure):
    _fields_ = (
        ("source", c_void_p),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("to", c_void_p),
        ("to_row_stride", c_int64),
        ("to_head_stride", c_int64),
        ("norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("slots", c_void_p),
        ("dtype", c_int32),
        ("heads", c_int32),
        ("width", c_int32),
        ("eps", c_float),
    )


class HeadProducts(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("weight", c_void_p),
        ("y", c_void_p),
        ("y_row_stride", c_int64),
        ("y_head_stride", c_int64),
        ("inverse_permutation", c_void_p),
        ("dtype", c_int32),
        ("m", c_int32),
        ("heads", c_int32),
        ("k", c_int32),
        ("n", c_int32),
        ("reserved", c_int32),
        ("copies", HeadCopy * HEAD_COPIES),
    )
