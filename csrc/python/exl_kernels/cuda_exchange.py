"""ctypes structs of `exl/cuda/exchange.h`: sums over the GPUs of one host."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

MAX_PEERS = 7  # EXL_CUDA_MAX_PEERS
STAGES = 3  # EXL_CUDA_STAGES
HANDLE_BYTES = 64  # EXL_CUDA_SHARED_HANDLE_BYTES
REDUCE_BLOCKS = 64  # EXL_CUDA_REDUCE_BLOCKS
PACKET_VALUES = 8  # EXL_CUDA_PACKET_VALUES
PACKET_BYTES = 16


class PartialSums(Structure):
    _fields_ = (
        ("parts", c_void_p),
        ("spent", c_void_p),
        ("sum", c_void_p),
        ("ended", c_void_p),
        ("ranks", c_int32),
        ("timeout_ms", c_int32),
        ("early_rank", c_int32),
    )


class SharedSums(Structure):
    _fields_ = (
        ("parts", PartialSums),
        ("wholes", c_void_p * (MAX_PEERS + 1)),
        ("spent_whole", c_void_p),
        ("own", c_int32),
        ("row_shift", c_int32),
        ("spent_shift", c_int32),
    )


class PartialCopies(Structure):
    _fields_ = (
        ("to", c_void_p * MAX_PEERS),
        ("count", c_int32),
        ("is_divided", c_int32),
        ("row_shift", c_int32),
    )


class AllReduce(Structure):
    _fields_ = (
        ("values", c_void_p),
        ("count", c_int64),
        ("parts", c_void_p * (MAX_PEERS + 1)),
        ("sums", c_void_p * (MAX_PEERS + 1)),
        ("flags", c_void_p * (MAX_PEERS + 1)),
        ("rounds", c_void_p),
        ("own", c_int32),
        ("ranks", c_int32),
        ("ended", c_void_p),
        ("timeout_ms", c_int32),
    )


class Tokens(Structure):
    _fields_ = (
        ("token_ids", c_void_p),
        ("copies", c_void_p * MAX_PEERS),
        ("num_copies", c_int32),
        ("m", c_int32),
        ("slot", c_void_p),
        ("first", c_int64),
        ("last", c_int64),
        ("own_ids", c_void_p),
        ("is_own", c_void_p),
        ("ended", c_void_p),
        ("timeout_ms", c_int32),
    )
