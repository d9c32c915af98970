"""Observers: hidden states equal those of transformers, and changes to them take effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.errors import RequestError
from exl_core.model.context import Context
from exl_core.model.observe import Observer, Part, StateRecorder
from exl_core.model.segment import LogitRows
from exl_core.model.transformer import Transformer
from exl_core.session.load import load_model
from support.tiny_models import VOCAB_SIZE, save, tiny_gemma3, tiny_llama

TOLERANCE = 1e-4  # of the largest value: fp32 on both sides, sums in a different order
IDS = torch.randint(3, VOCAB_SIZE, (2, 30), generator=torch.Generator().manual_seed(7))


FAMILIES: dict[str, Any] = {
    "llama": tiny_llama,
    "gemma3": lambda: tiny_gemma3(final_logit_softcapping=2.0),  # applied after the head
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Transformer]:
    model = FAMILIES[request.param]()
    return model, load_model(str(save(model, tmp_path_factory.mktemp("model")))).model


def context_of(model: Transformer) -> Context:
    return Context(model, 64, batch_size=2, kv_format=KVFormat.FP32)


def assert_close(states: Tensor, expected: Tensor) -> None:
    assert states.shape == expected.shape
    assert (states - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_recorded_states_match_transformers(pair: tuple[Any, Transformer]) -> None:
    model, ours = pair
    with torch.inference_mode():
        out = model(IDS, output_hidden_states=True)
    recorder = StateRecorder(layers=(0, 1))
    context = context_of(ours)
    logits = context.forward(IDS[:, :20], observe=recorder)
    assert_close(logits, out.logits[:, :20])
    assert recorder.layers.keys() == {0, 1}
    assert_close(recorder.embedding.view(2, 20, -1), out.hidden_states[0][:, :20])
    for layer in (0, 1):
        shown = recorder.layers[layer].view(2, 20, -1)
        assert_close(shown, out.hidden_states[layer + 1][:, :20])
    assert_close(recorder.last.view(2, 20, -1), out.hidden_states[-1][:, :20])

    context.forward(IDS[:, 20:], LogitRows.LAST, observe=recorder)
    assert_close(recorder.layers[1].view(2, 10, -1), out.hidden_states[2][:, 20:])
    assert_close(recorder.last, out.hidden_states[-1][:, -1])


def test_a_passive_observer_sees_every_part_and_changes_nothing(
    pair: tuple[Any, Transformer],
) -> None:
    _, ours = pair
    plain = context_of(ours).forward(IDS)
    shown: list[tuple[str, Part]] = []

    class Recorder(Observer):
        def before(self, part: Part, states: Tensor) -> Tensor:
            shown.append(("before", part))
            return states

        def after(self, part: Part, states: Tensor) -> Tensor:
            shown.append(("after", part))
            return states

    logits = context_of(ours).forward(IDS, observe=Recorder())
    assert_close(logits, plain)
    parts = [Part("embedding")]
    for layer in range(ours.config.num_layers):
        parts += [Part("attention", layer), Part("mlp", layer)]
    both = [(when, part) for part in (*parts, Part("head")) for when in ("before", "after")]
    assert shown == both[1:], "no call before the embedding"


class Steering(Observer):
    """Adds a vector before one part."""

    def __init__(self, part: Part, vector: Tensor) -> None:
        self.part, self.vector = part, vector

    def before(self, part: Part, states: Tensor) -> Tensor:
        return (states.double() + self.vector) if part == self.part else states


@pytest.mark.parametrize("part", [Part("attention", 1), Part("mlp", 2), Part("head")])
def test_changed_states_reach_later_parts(pair: tuple[Any, Transformer], part: Part) -> None:
    """Adding a vector has the same effect as in transformers, also if the result is float64."""
    model, ours = pair
    vector = torch.randn(72, generator=torch.Generator().manual_seed(3))

    def steer(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (args[0] + vector, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + vector}

    if (
        part.kind == "mlp"
    ):  # added to the output of the module before the MLP, and so to the residual stream
        layer = model.model.layers[part.layer]
        name = "post_attention_layernorm" if ours.config.arch.name == "gemma3" else "self_attn"
        module = layer.get_submodule(name)

        def add(_: Any, __: Any, output: Any) -> Any:
            return (
                (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector
            )

        handle = module.register_forward_hook(add)
    else:
        module = model.lm_head if part.kind == "head" else model.model.layers[part.layer]
        handle = module.register_forward_pre_hook(steer, with_kwargs=True)
    try:
        with torch.inference_mode():
            expected = model(IDS).logits
    finally:
        handle.remove()
    context = context_of(ours)
    observer = Steering(part, vector)
    logits = [context.forward(IDS[:, :25], observe=observer)]
    logits += [context.forward(IDS[:, i : i + 1], observe=observer) for i in range(25, 30)]
    assert_close(torch.cat(logits, 1), expected)


def test_observers_can_replace_logits_and_abort_a_pass(tmp_path: Path) -> None:
    ours = load_model(str(save(tiny_llama(), tmp_path))).model

    class Constant(Observer):
        def after(self, part: Part, states: Tensor) -> Tensor:
            return torch.zeros_like(states) if part.kind == "head" else states

    class Abort(Observer):
        def before(self, part: Part, states: Tensor) -> Tensor:
            if part.layer == 1:
                raise TimeoutError
            return states

    class WrongShape(Observer):
        def after(self, part: Part, states: Tensor) -> Tensor:
            return states[:, 1:] if part == Part("mlp", 2) else states

    context = context_of(ours)
    assert not context.forward(IDS, observe=Constant()).any()
    context.length = 0
    with pytest.raises(TimeoutError):
        context.forward(IDS, observe=Abort())
    assert context.length == 0, "the next pass overwrites the positions of the aborted one"
    with pytest.raises(RequestError, match=r"layer 2: .*shape of the states at mlp"):
        context.forward(IDS, observe=WrongShape())
