"""ExLlamaV2Lora: a LoRA adapter, and the adapters of a request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl_core.lora.adapter import LoraAdapter, load_adapter
from exl_core.model.adapters import AdapterUse
from exl_exllamav2 import environment
from exl_exllamav2.errors import OldValueError, old_types

if TYPE_CHECKING:
    from exl_exllamav2.model import ExLlamaV2


class ExLlamaV2Lora:
    """An adapter of one model. `lora_scaling` multiplies the adapter's own scale."""

    def __init__(
        self,
        model: ExLlamaV2,
        lora_config_path: str | Path,
        lora_path: str | Path,
        lora_scaling: float = 1.0,
    ) -> None:
        folder = Path(lora_config_path).parent
        if Path(lora_path).suffix == ".bin":
            raise OldValueError(
                "adapters in pickle files are not read",
                where=lora_path,
                expected="adapter_model.safetensors",
                next_step="Convert it: PeftModel.save_pretrained(..., safe_serialization=True).",
            )
        with old_types():
            self.exl: LoraAdapter | None = load_adapter(folder, model.weights)
        self.model = model
        config = self.exl.config
        self.lora_r = config.rank
        self.lora_alpha = config.alpha
        self.scale = lora_scaling
        self.lora_scaling = lora_scaling * config.scale_of("")
        self.target_modules = dict.fromkeys(self.exl.modules, True)
        self.bias_ignored = False
        self.tensors: dict[str, Any] = {}
        self.embed_tokens = self.lm_head = None

    @classmethod
    def from_directory(
        cls, model: ExLlamaV2, directory: str | Path, lora_scaling: float = 1.0
    ) -> ExLlamaV2Lora:
        """The adapter in a PEFT directory. ValueError if there is none."""
        known = environment.model_paths()
        folder = Path(known.get(str(directory).rstrip("/"), known.get(str(directory), directory)))
        weights = folder / "adapter_model.safetensors"
        if not weights.is_file() and (folder / "adapter_model.bin").is_file():
            weights = folder / "adapter_model.bin"
        if not (folder / "adapter_config.json").is_file() or not weights.is_file():
            raise OldValueError(
                "no LoRA adapter",
                where=folder,
                expected="adapter_config.json and adapter_model.safetensors",
            )
        return cls(model, folder / "adapter_config.json", weights, lora_scaling)

    def unload(self) -> None:
        """Free the adapter's memory once no request uses it."""
        self.exl = None


def adapters_of(loras: Any) -> tuple[AdapterUse, ...]:
    """Adapters for a request, from one object, a sequence or None; entries of None are skipped."""
    if loras is None:
        return ()
    listed: Sequence[Any] = loras if isinstance(loras, Sequence) else (loras,)
    uses = []
    for one in listed:
        if one is None:
            continue
        if not isinstance(one, ExLlamaV2Lora) or one.exl is None:
            raise OldValueError("not a loaded LoRA adapter", got=repr(one)[:100])
        uses.append(AdapterUse(one.exl, one.scale))
    return tuple(uses)
