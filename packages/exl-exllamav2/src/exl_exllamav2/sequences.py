"""SeqTensor: a tensor that grows along one dimension, as job sequences expose their ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl_exllamav2.errors import OldAssertionError

_PAGE = 256


class SeqTensor:
    """Tensor that grows along `seq_dim`. Its memory grows in steps of 256 positions."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        seq_dim: int,
        device: Any = "cpu",
        init_cap: int = -1,
    ) -> None:
        self.seq_dim = seq_dim + len(shape) if seq_dim < 0 else seq_dim
        capacity = _PAGE if init_cap == -1 else max(1, init_cap)
        self.shape = tuple(shape)
        size = [capacity if i == self.seq_dim else n for i, n in enumerate(shape)]
        self.tensor = torch.empty(size, dtype=dtype, device=device)
        self.seq_len = 0
        self.seq_cap = capacity

    @staticmethod
    def from_tensor(tensor: Tensor, seq_dim: int) -> SeqTensor:
        found = SeqTensor(tuple(tensor.shape), tensor.dtype, seq_dim, tensor.device)
        found.append(tensor)
        return found

    def __len__(self) -> int:
        return self.seq_len

    def __bool__(self) -> bool:
        return self.seq_len > 0

    def append(self, new_data: SeqTensor | Tensor | None) -> None:
        if new_data is None:
            return
        new = new_data.torch() if isinstance(new_data, SeqTensor) else new_data
        end = self.seq_len + new.shape[self.seq_dim]
        if end > self.seq_cap:
            self.seq_cap = -(-end // _PAGE) * _PAGE
            size = list(self.tensor.shape)
            size[self.seq_dim] = self.seq_cap
            grown = self.tensor.new_empty(size)
            grown.narrow(self.seq_dim, 0, self.seq_len).copy_(self.torch())
            self.tensor = grown
        self.tensor.narrow(self.seq_dim, self.seq_len, end - self.seq_len).copy_(new)
        self.seq_len = end

    def set(self, new_data: SeqTensor | Tensor | None = None) -> None:
        self.clear()
        self.append(new_data)

    def clear(self) -> None:
        self.seq_len = 0

    def truncate(self, new_len: int) -> None:
        if not 0 <= new_len <= self.seq_len:
            raise OldAssertionError(
                "cannot truncate to more than there is", expected=self.seq_len, got=new_len
            )
        self.seq_len = new_len

    def torch(self) -> Tensor:
        return self.tensor.narrow(self.seq_dim, 0, self.seq_len)

    def slice(self, a: int, b: int | None) -> SeqTensor:
        return SeqTensor.from_tensor(self.torch_slice(a, b), self.seq_dim)

    def torch_slice(self, a: int | None, b: int | None) -> Tensor:
        start, end, _ = slice(a, b).indices(self.seq_len)
        return self.tensor.narrow(self.seq_dim, start, end - start)

    def clone(self, drop: int | None = None) -> SeqTensor:
        kept = self.seq_len if drop is None else self.seq_len - drop
        return SeqTensor.from_tensor(self.torch_slice(0, kept), self.seq_dim)
