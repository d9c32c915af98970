"""Operand checks of the reference ops. The compiled ops make the same checks in C++."""

from __future__ import annotations

from torch import Tensor, dtype, float32

F32 = (float32,)


class OpInputError(ValueError):
    """An operand violates the contract of its op, which is a bug in the caller."""


def check(op: str, name: str, x: Tensor, dtypes: tuple[dtype, ...], *shape: int | None) -> None:
    """Checks device (CPU), type, rank and shape; None matches every size."""
    if not isinstance(x, Tensor) or x.device.type != "cpu":
        raise OpInputError(f"{op}: {name} (expected a tensor on the CPU)")
    fits = len(shape) == x.ndim and x.dtype in dtypes
    if not fits or any(
        want is not None and want != got for want, got in zip(shape, x.shape, strict=True)
    ):
        wanted = " or ".join(str(choice) for choice in dtypes)
        sizes = ["any" if size is None else size for size in shape]
        raise OpInputError(
            f"{op}: {name} (expected {wanted} {sizes}, got {x.dtype} {list(x.shape)})"
        )


def check_contiguous(op: str, name: str, x: Tensor, first_dim: int = 0) -> None:
    """Checks that x is contiguous from dimension first_dim on.

    With first_dim=1, rows may be farther apart than their length but must not overlap.
    """
    if x.numel() == 0:
        return
    wanted = 1
    for dim in range(x.ndim - 1, first_dim - 1, -1):
        if x.shape[dim] > 1 and x.stride(dim) != wanted:
            raise OpInputError(
                f"{op}: {name} (expected contiguous dimensions from {first_dim} on,"
                f" got shape {list(x.shape)} with strides {list(x.stride())})"
            )
        wanted *= x.shape[dim]
    if first_dim == 1 and x.shape[0] > 1 and x.stride(0) < wanted:
        raise OpInputError(f"{op}: {name} (expected rows that do not overlap)")


def check_range(op: str, name: str, ids: Tensor, end: int) -> None:
    """Checks that every id is within [0, end)."""
    if ids.numel() > 0 and (int(ids.min()) < 0 or int(ids.max()) >= end):
        raise OpInputError(
            f"{op}: {name} (expected ids within [0, {end}), got {int(ids.min())} to"
            f" {int(ids.max())})"
        )
