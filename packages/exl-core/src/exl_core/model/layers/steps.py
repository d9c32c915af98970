"""The steps of each layer, chosen once per model from its `LayerSpec`.

A pass calls them in order. A kind of part is one function in this package and one case here. Passes
with observers or adapters run wrapped steps, so that the functions know neither: `observed` shows
the states before and after each step, `with_ops` replaces the op table of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

from torch import Tensor

from exl_core.arch.layers import (
    MLA,
    Attention,
    Dense,
    GatedDeltaNet,
    KimiDeltaNet,
    LayerSpec,
    Mamba2,
    MoE,
    NoFeedForward,
    NoMixer,
    NormPlacement,
    ShortConv,
    unsupported,
)
from exl_core.model.layers.attention import AttentionStep, add_attended, attention
from exl_core.model.layers.delta_net import DeltaNetStep, KimiDeltaStep, delta_net, kimi_delta
from exl_core.model.layers.latent import LatentStep, add_latent, latent_attention
from exl_core.model.layers.mamba2 import Mamba2Step, mamba2
from exl_core.model.layers.mlp import MlpStep, add_widened, mlp
from exl_core.model.layers.moe import MoeStep, moe
from exl_core.model.layers.parallel import parallel
from exl_core.model.layers.residual import add_mixed
from exl_core.model.layers.short_conv import ShortConvStep, short_conv
from exl_core.model.layers.state import PassState
from exl_core.model.observe import Observer, Part, checked_states
from exl_core.model.weights import BlockWeights, MixerWeights, MlpWeights, RecurrentWeights
from exl_core.ops.linear import Inputs, NextRead
from exl_core.ops.table import LayerOps

Run = Callable[[LayerOps, Tensor, BlockWeights, PassState], Tensor]
"""Maps the states x [R, hidden] to those after the step. The states passed in are overwritten where
the op table works in place."""


class Finish(NamedTuple):
    """End of a step: the product with its last matrix, and what follows.

    role  the matrix, as in the module table
    run   maps the states x [R, hidden] before the step, and the inputs of the matrix, to the states
          after the step
    """

    role: str
    run: Callable[[LayerOps, Tensor, Inputs, BlockWeights], Tensor]


class Step(NamedTuple):
    """One step of a layer. It covers one part, or several that read the same states (`first` to
    `last`).

    `finish` computes the end of `run`, for callers that know the inputs of the last matrix. It is
    None if other products of the step are added to the states as well. `read` finds the product
    that reads the states first, for a layer's weights. Without it, other ops may read them.
    """

    first: Part
    last: Part
    run: Run
    finish: Finish | None = None
    read: Callable[[BlockWeights], NextRead | None] | None = None


WrapOps = Callable[[LayerOps, int, BlockWeights], LayerOps]
"""Takes an op table, a layer and the layer's weights. Returns the op table for that layer."""

Steps = tuple[tuple[Step, ...], ...]
"""Steps of all layers, by layer."""


def steps_of(layers: Sequence[LayerSpec]) -> Steps:
    """Raises UnsupportedModelError for kinds of parts without a function here."""
    return tuple(layer_steps(index, layer) for index, layer in enumerate(layers))


def layer_steps(index: int, layer: LayerSpec) -> tuple[Step, ...]:
    """Steps of the layer with that index."""
    if layer.norms is NormPlacement.PARALLEL:
        return (_parallel_step(index, layer),)
    has_mixer = not isinstance(layer.mixer, NoMixer)
    has_feed_forward = not isinstance(layer.feed_forward, NoFeedForward)
    mixer = (_mixer_step(index, layer),) if has_mixer else ()
    return (*mixer, _feed_forward_step(index, layer)) if has_feed_forward else mixer


def _parallel_step(index: int, layer: LayerSpec) -> Step:
    parts = AttentionStep.of(index, layer.attention), MlpStep.of(index, layer.dense)
    return Step(Part("attention", index), Part("mlp", index), partial(parallel, parts))


def _mixer_step(index: int, layer: LayerSpec) -> Step:
    part = Part("attention", index)
    match layer.mixer:
        case Attention() as spec:
            run = partial(attention, AttentionStep.of(index, spec))
            return Step(part, part, run, Finish("output", add_attended), _mixer_read)
        case ShortConv() as spec:
            run = partial(short_conv, ShortConvStep.of(index, spec))
            return Step(part, part, run, Finish("mixer_out", add_mixed), _mixer_read)
        case GatedDeltaNet() as spec:
            run = partial(delta_net, DeltaNetStep.of(index, spec))
            return Step(part, part, run, Finish("mixer_out", add_mixed), _mixer_read)
        case KimiDeltaNet() as kimi:
            run = partial(kimi_delta, KimiDeltaStep.of(index, kimi))
            return Step(part, part, run, Finish("mixer_out", add_mixed), _mixer_read)
        case Mamba2() as spec:
            run = partial(mamba2, Mamba2Step.of(index, spec))
            return Step(part, part, run, Finish("mixer_out", add_mixed), _mixer_read)
        case MLA() as latent:
            run = partial(latent_attention, LatentStep.of(index, latent))
            return Step(part, part, run, Finish("output", add_latent), _mixer_read)
        case other:
            raise unsupported("mixer", other)


def _feed_forward_step(index: int, layer: LayerSpec) -> Step:
    part = Part("mlp", index)
    match layer.feed_forward:
        case Dense() as spec:
            run = partial(mlp, MlpStep.of(index, spec))
            return Step(part, part, run, Finish("down", add_widened), _mlp_read)
        case MoE() as spec:
            return Step(part, part, partial(moe, MoeStep.of(index, spec)))
        case other:
            raise unsupported("feed-forward part", other)


def _mixer_read(block: BlockWeights) -> NextRead | None:
    mixer = cast(MixerWeights, block.mixer)
    first = mixer.wide if isinstance(mixer, RecurrentWeights) else mixer.qkv
    return None if mixer.norm is None else NextRead(mixer.norm, first)


def _mlp_read(block: BlockWeights) -> NextRead | None:
    weights = cast(MlpWeights, block.mlp)
    return None if weights.norm is None else NextRead(weights.norm, weights.gate_up)


def with_ops(steps: Steps, wrap: WrapOps) -> Steps:
    """The same steps, each with the op table that `wrap` returns for its layer."""

    def wrapped(layer: int, step: Step) -> Step:
        def run(ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState) -> Tensor:
            return step.run(wrap(ops, layer, block), x, block, state)

        return step._replace(run=run, finish=None, read=None)

    return tuple(
        tuple(wrapped(layer, step) for step in of_layer) for layer, of_layer in enumerate(steps)
    )


def observed(steps: Steps, observe: Observer) -> Steps:
    """The same steps, with the observer called before the first and after the last part of each."""

    def shown(step: Step) -> Step:
        def run(ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState) -> Tensor:
            x = checked_states(step.first, observe.before(step.first, x), x)
            x = step.run(ops, x, block, state)
            return checked_states(step.last, observe.after(step.last, x), x)

        return step._replace(run=run, finish=None, read=None)

    return tuple(tuple(shown(step) for step in layer) for layer in steps)
