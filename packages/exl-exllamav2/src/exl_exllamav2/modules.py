"""Entries of `model.modules`: descriptions of the model's parts, and hooks around them.

exl runs a model as a whole, so an entry computes nothing by itself. `Intervention` in place of an
entry reads and changes hidden states through an observer of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from exl_core.model.observe import Observer, Part
from exl_core.session.load import LoadedModel
from exl_exllamav2.errors import refuse


class Module:
    """One part of the model. `layer_idx` is None for embedding, norm and head."""

    name = "Module"
    kind = ""

    def __init__(self, model: Any, key: str, layer_idx: int | None = None) -> None:
        self.model = model
        self.key = key
        self.layer_idx = layer_idx
        self.device_idx = 0

    def device(self) -> str:
        loaded: LoadedModel | None = self.model.exl
        if loaded is None:
            return "cpu"
        last = str(loaded.model.ops.device)
        return last if self.layer_idx is None else self.model.cache_map.get(self.layer_idx, last)

    def is_quant(self) -> bool:
        return any(name.startswith(self.key + ".") for name in self.model.quantized_names)

    def numel(self) -> int:
        """Weights of this part, as its files declare them."""
        tensors = self.model.config.opened().source.tensors
        return sum(
            tensor.num_values for name, tensor in tensors.items() if name.startswith(self.key + ".")
        )

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("forward")

    def load(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("load")

    def unload(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("unload")

    def reload(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("reload")

    def rank_reduce(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("rank_reduce")

    def _refuse(self, method: str) -> NoReturn:
        refuse(
            f"module.{method}",
            f"{self.key} is a description, and exl runs the model as a whole",
            "'exl eval compare-layers' compares models by layer; Intervention reads and changes "
            "hidden states.",
        )


class ExLlamaV2Embedding(Module):
    name, kind = "Embedding", "embedding"


class ExLlamaV2Attention(Module):
    name, kind = "Attention", "attention"

    class Params:
        """Arguments of a pass in exllamav2. Accepted as a name only."""


class ExLlamaV2MLP(Module):
    name, kind = "MLP", "mlp"


class ExLlamaV2MoEMLP(Module):
    name, kind = "MoE MLP", "mlp"


class ExLlamaV2ParallelDecoder(Module):
    name = "Parallel decoder"


class ExLlamaV2RMSNorm(Module):
    name = "RMSNorm"


class ExLlamaV2LayerNorm(Module):
    name = "LayerNorm"


class ExLlamaV2HeadNorm(Module):
    name = "HeadNorm"


class ExLlamaV2PosEmbedding(Module):
    name = "PosEmbedding"


class ExLlamaV2Linear(Module):
    name, kind = "Linear", "head"


Change = Callable[..., Any]


class Intervention:
    """Wraps an entry of `model.modules`: the callables get the states [1, rows, hidden_size] in
    half precision, and return the states to continue with."""

    def __init__(
        self, inner: Module, pre_forward: Change | None = None, post_forward: Change | None = None
    ) -> None:
        self.inner = inner
        self.pre_forward = pre_forward
        self.post_forward = post_forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def list_modules(model: Any, num_layers: int, head_key: str) -> list[Any]:
    """Entries in the order of exllamav2: embedding, two per layer, norm, head."""
    found: list[Any] = [ExLlamaV2Embedding(model, "model.embed_tokens")]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        found.append(ExLlamaV2Attention(model, f"{prefix}.self_attn", layer))
        found.append(ExLlamaV2MLP(model, f"{prefix}.mlp", layer))
    return [*found, ExLlamaV2RMSNorm(model, "model.norm"), ExLlamaV2Linear(model, head_key)]


class InterventionObserver(Observer):
    """Calls the interventions of a model, then passes on to `inner`, which may record states."""

    def __init__(self, modules: Sequence[Any], inner: Observer | None) -> None:
        self._found = {
            (one.kind, one.layer_idx): one for one in modules if isinstance(one, Intervention)
        }
        self._inner = inner

    @property
    def is_needed(self) -> bool:
        return bool(self._found) or self._inner is not None

    def before(self, part: Part, states: Tensor) -> Tensor:
        one = self._found.get((part.kind, part.layer))
        if one is not None and one.pre_forward is not None:
            states = _changed(one.pre_forward, states)
        return states if self._inner is None else self._inner.before(part, states)

    def after(self, part: Part, states: Tensor) -> Tensor:
        one = self._found.get((part.kind, part.layer))
        if one is not None and one.post_forward is not None:
            states = _changed(one.post_forward, states)
        return states if self._inner is None else self._inner.after(part, states)


def _changed(call: Change, states: Tensor) -> Tensor:
    result = call(states[None].half())
    changed: Tensor = result[0] if isinstance(result, tuple) else result
    return changed.view(states.shape).to(states.device, states.dtype)
