"""Memory of the devices that a load leaves free, for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.session.placement import DeviceMemory
from exl_core.session.split import GB, parse_reserve

NO_RESERVE = "0"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes that stay free on the GPUs; without a GPU, in the machine's memory.

    sizes     one for all devices, or one for each GPU
    is_on_gpus  the model runs on GPUs: then the machine's memory has no reserve
    """

    sizes: tuple[int, ...] = (0,)
    is_on_gpus: bool = True

    @classmethod
    def of(cls, text: str, device: str, num_gpus: int | None = None) -> Self:
        """The reserve that `text` asks for (`parse_reserve`), of a model on `device`, the resolved
        one. `num_gpus`: GPUs of the machine; None asks torch. RequestError if `text` has several
        numbers, but not one for each GPU."""
        gigabytes, is_on_gpus = parse_reserve(text), device.startswith("cuda")
        count = 1
        if is_on_gpus and len(gigabytes) > 1:
            count = torch.cuda.device_count() if num_gpus is None else num_gpus
        if len(gigabytes) not in (1, count):
            devices = f"{count} GPUs" if count != 1 else "1 GPU"
            raise RequestError(
                "a reserve of other devices than there are",
                expected=f"1 number, or {count} for {devices}" if count > 1 else "1 number",
                got=f"--reserve {text}, {len(gigabytes)} numbers",
            )
        return cls(tuple(int(size * GB) for size in gigabytes), is_on_gpus)

    @property
    def is_given(self) -> bool:
        return any(self.sizes)

    def bytes_on(self, device: str) -> int:
        """Bytes that stay free on a device: `cpu`, or `cuda:` and its number."""
        kind, _, index = device.partition(":")
        if (kind == "cuda") is not self.is_on_gpus:
            return 0
        return self.sizes[0 if len(self.sizes) == 1 else int(index or 0)]

    def kept_from(self, memory: DeviceMemory) -> DeviceMemory:
        """The device without its reserve."""
        return memory.without(self.bytes_on(memory.device))

    def check(self, memory: DeviceMemory, needed_bytes: int, *, buffer_bytes: int = 0) -> None:
        """Raises OutOfMemoryError if a device with `needed_bytes` of weights and cache, and all
        else that a model takes there, does not leave its reserve free. `buffer_bytes`: memory
        beside its overhead. Checks nothing on a device without a reserve."""
        kept = self.bytes_on(memory.device)
        total = needed_bytes + memory.overhead_bytes + buffer_bytes
        if not kept or memory.free_bytes is None or total + kept <= memory.free_bytes:
            return
        raise OutOfMemoryError(
            f"the model does not leave the reserve free on {memory.device}",
            expected=f"{total / GB:.2f} GB for weights, cache and buffers, and {kept / GB:.2f} GB "
            "that stay free",
            got=f"{memory.free_bytes / GB:.2f} GB free",
            next_step="Take a smaller --reserve, a smaller --ctx-size or a cheaper --cache-type.",
        )
