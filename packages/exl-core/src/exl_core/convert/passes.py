"""Passes of calibration rows through one layer, by the functions of the model's layers.

The autograd backend runs them. `LayerFunction` computes a whole layer, and gradients flow through
it. `CapturingPass` stops at each group of matrices that read the same inputs, so that the caller
can use these inputs to quantize the matrices before the pass goes on with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import cast

import torch
from torch import Tensor

from exl_core.arch.layers import (
    MLA,
    KVShape,
    MoE,
    NormPlacement,
    QueryTemperature,
)
from exl_core.arch.modules import ModuleRow, Packed, module_table
from exl_core.arch.spec import ModelConfig, RopeConfig
from exl_core.cache.state_store import LayerState
from exl_core.convert.layers import Vectors, bias_role, compute_type
from exl_core.convert.parallel import Workers
from exl_core.errors import UnsupportedModelError
from exl_core.model.build import block_weights, final_norm
from exl_core.model.layers.moe import routing_of
from exl_core.model.layers.residual import normed
from exl_core.model.layers.state import PassState, RowsKey, make_buffers
from exl_core.model.layers.steps import layer_steps
from exl_core.model.rotation import RotationTable, query_factors
from exl_core.model.weights import MoeWeights
from exl_core.ops.attention import CacheLayer
from exl_core.ops.backends.autograd.attention import WholeSequences, no_pages
from exl_core.ops.backends.autograd.latent import RoleUp
from exl_core.ops.backends.autograd.linear import Product, RoleMatrices
from exl_core.ops.backends.autograd.moe import expert_inner
from exl_core.ops.backends.autograd.table import AUTOGRAD
from exl_core.ops.backends.routing import StackedExperts, scores_of
from exl_core.ops.elementwise import Norm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import PackedExperts, Routed, Routing
from exl_core.ops.recurrent import StateRows

ROUTER = "router"
LATENT_DOWN: Packed = "latent_down"
_PARALLEL_ORDER = ("qkv", "gate_up", "output", "down")
"""Order in which a parallel layer multiplies (`model/layers/parallel.py`)."""


class LayerFunction:
    """One layer as a function of its states x [R, T, hidden]."""

    def __init__(self, config: ModelConfig, layer: int, vectors: Vectors, product: Product) -> None:
        self.product = product
        self.groups = matrix_groups(config, layer)
        self.with_product = partial(LayerFunction, config, layer, vectors)
        """Returns the same layer with another product."""
        self._layer, self._spec = layer, config.layers[layer]
        self._ropes = config.ropes
        self._weights = block_weights(config, layer, _Source(vectors, product))
        self._steps = layer_steps(layer, self._spec)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def __call__(self, x: Tensor) -> Tensor:
        for step in range(self.num_steps):
            x = self.run_step(step, x)
        return x

    def run_step(self, step: int, x: Tensor) -> Tensor:
        """States after one step of the layer, from those before it."""
        return self._steps[step].run(AUTOGRAD, x, self._weights, self._state(x))

    def can_finish(self, step: int, roles: tuple[str, ...]) -> bool:
        """Whether `finish_step` can go on from the inputs of these matrices."""
        finish = self._steps[step].finish if step < self.num_steps else None
        return finish is not None and roles == (finish.role,)

    def finish_step(self, step: int, x: Tensor, inputs: Tensor) -> Tensor:
        """`run_step` for known inputs of the step's last matrix, without what precedes them."""
        finish = self._steps[step].finish
        assert finish is not None, "`can_finish` says so"
        return finish.run(AUTOGRAD, x, inputs, self._weights)

    def scores(self, h: Tensor) -> Tensor:
        """The router's scores of all experts, float32 [m, E], for inputs h [m, hidden]."""
        return scores_of(self.product(ROUTER, h).float(), self._routing)

    def choices(self, h: Tensor) -> Routed:
        """Experts of each row, and their weights, for the same inputs."""
        return AUTOGRAD.route(h, self._moe.router, self._routing, self._moe.router_bias)

    @property
    def weighs_inputs(self) -> bool:
        """Whether these weights are factors of the experts' inputs."""
        return cast(MoE, self._spec.feed_forward).weighs_inputs

    @property
    def expert_norm(self) -> Norm | None:
        """Norm of the experts' inputs; None if these are the router's."""
        own = self._moe.expert_norm
        return self._moe.norm if own is None and self._moe.router_norm is not None else own

    @property
    def latent_down(self) -> PackedLinear | None:
        """Matrix before the experts, whose outputs they read; None if they read normed states."""
        return self._moe.latent_down

    def expert_inner(self, expert: int, h: Tensor) -> Tensor:
        """Inputs of the expert's last matrix, for those of its first ones."""
        return expert_inner(h, self._moe.experts, expert)

    @property
    def _moe(self) -> MoeWeights:
        return cast(MoeWeights, self._weights.mlp)

    @property
    def _routing(self) -> Routing:
        return routing_of(cast(MoE, self._spec.feed_forward).router)

    def _state(self, x: Tensor) -> PassState:
        count = self._layer + 1  # entries are by layer
        attention, buffers = (
            self._spec.attending,
            make_buffers(AUTOGRAD, {self._layer: self._spec}, 0),
        )
        caches, smoothing = _NoCache(self._spec.kv_shape or KVShape(0, 0)), (None,) * count
        if attention is None:
            return PassState(
                caches, {}, smoothing, buffers, held_states=_NoStates(), held_rows=_NO_ROWS
            )
        if 0 < attention.chunk < x.shape[1]:
            raise UnsupportedModelError(
                "calibration rows are longer than a chunk of the model's attention",
                expected=f"at most {attention.chunk} tokens",
                got=x.shape[1],
            )
        rows = {
            index: _sequences(None if index is None else self._ropes[index], x.shape[1], x.device)
            for index in {attention.rope, attention.attend_rope}
        }
        return PassState(
            caches=caches,
            rows={RowsKey(index, attention.chunk): one for index, one in rows.items()},
            smoothing=smoothing,
            buffers=buffers,
            temperatures=_factors(attention.temperature, x.shape[1], x.device),
            angles={index: (one.cos, one.sin) for index, one in rows.items()},
        )


def final_states(config: ModelConfig, vectors: Vectors, x: Tensor) -> Tensor:
    """Inputs of the head for states x [..., hidden] after the last layer. `vectors` are those of
    the final norm."""
    return normed(AUTOGRAD, x, final_norm(config, _Source(vectors)))


def _no_product(role: str, x: Tensor) -> Tensor:  # noqa: ARG001 - the type is Product
    raise AssertionError(f"{role}: there are no matrices")


class _Source:
    """WeightSource of vectors and of a product."""

    def __init__(self, vectors: Vectors, product: Product = _no_product) -> None:
        self.device = next(iter(vectors.values())).device
        self._vectors = vectors
        self._product = product

    def norm(self, row: ModuleRow) -> Tensor:
        return self._vectors[row.role]

    def norm_bias(self, row: ModuleRow) -> Tensor | None:
        return None if row.bias is None else self._vectors[bias_role(row.role)]

    def packed(self, rows: Sequence[ModuleRow]) -> RoleMatrices:
        keys, sizes = tuple(row.key for row in rows), tuple(row.shape[0] for row in rows)
        return RoleMatrices(keys, sizes, rows[0].shape[1], self._product)

    def latent_up(self, spec: MLA, rows: Sequence[ModuleRow]) -> RoleUp:
        if len(rows) != 1:
            raise UnsupportedModelError(
                "keys and values are projected by separate matrices",
                next_step="Start from the model's safetensors files, which have one matrix.",
            )
        return RoleUp(self.packed(rows), spec.nope_dim, spec.value_dim)

    @staticmethod
    def stack(experts: Sequence[PackedLinear]) -> PackedExperts:
        return StackedExperts.of(experts)

    @staticmethod
    def join_experts(*_: object, **__: object) -> None:
        return None


class _NoCache:
    """LayerCaches of one layer, with no pages."""

    def __init__(self, shape: KVShape) -> None:
        self._layer = no_pages(shape.num_kv_heads, shape.head_dim)

    def layer(self, layer: int) -> CacheLayer:  # noqa: ARG002 - there is one layer
        return self._layer


class _NoStates:
    """LayerStates of one layer, which keeps none."""

    @staticmethod
    def layer(layer: int) -> LayerState:  # noqa: ARG004 - there is one layer
        return LayerState(torch.empty(0), torch.empty(0))


_NO_ROWS = StateRows(*(torch.empty(0, dtype=torch.int32) for _ in range(3)))


def _factors(
    setting: QueryTemperature | None, length: int, device: torch.device
) -> dict[QueryTemperature | None, Tensor]:
    """Factors on the queries of sequences of this length, as `PassState.temperatures`."""
    factors = None if setting is None else query_factors(setting, torch.arange(length))
    return {} if factors is None else {setting: factors.to(device)}


@lru_cache(maxsize=4)  # local and global layers, two sequence lengths
def _sequences(rope: RopeConfig | None, length: int, device: torch.device) -> WholeSequences:
    if rope is None:
        none = torch.empty(length, 0, device=device)
        return WholeSequences(none, none)
    table = RotationTable(rope.fitted(length), torch.device("cpu"))
    cos, sin = table.at(torch.arange(length))
    return WholeSequences(cos.to(device), sin.to(device))


def matrix_groups(config: ModelConfig, layer: int) -> tuple[tuple[str, ...], ...]:
    """Keys of a layer's matrices, grouped by the inputs that they read, in the order in which these
    are computed. Experts, of which each reads its own rows, are not among them: the router, which
    comes just before them, stands for all of them."""
    table = module_table(config)
    groups = {
        name: tuple(row.key for row in rows if row.is_converted)
        for name, rows in table.packed(layer).items()
        if any(row.is_converted for row in rows)
    }
    if config.layers[layer].norms is NormPlacement.PARALLEL:
        # Attention and MLP read the same states, before either adds its outputs to them.
        groups = {name: groups[name] for name in sorted(groups, key=_PARALLEL_ORDER.index)}
    if ROUTER not in table.layers[layer]:
        return tuple(groups.values())
    shared, down = (groups.pop(name, ()) for name in ("shared_gate_up", "shared_down"))
    narrow, back = (groups.pop(name, ()) for name in (LATENT_DOWN, "latent_up"))
    has_own_norm = "router_norm" in table.layers[layer]
    assert not (has_own_norm and narrow), "latent experts would read other states than the router"
    routed = ((ROUTER,), shared) if has_own_norm else ((ROUTER, *narrow, *shared),)
    return tuple(group for group in (*groups.values(), *routed, back, down) if group)


class CapturingPass:
    """Passes `states` float32 [rows, T, hidden] through one layer, which replaces them in place.

    `groups` yields the roles of the next matrices. Their inputs are then in `inputs`, a list of
    pieces [R, T, K]. The function's product is called for these matrices only when the iteration
    continues. States are kept between the steps of a layer. After the last matrix of a step, the
    pass goes on from its inputs. After other matrices it begins their step again, because keeping
    results in between would take more memory than the inputs themselves. In most layers only norms
    precede these matrices; in a layer whose parts are parallel, attention is repeated.
    """

    def __init__(
        self, function: LayerFunction, states: Tensor, device: torch.device, workers: Workers
    ) -> None:
        self.inputs: list[Tensor] = []
        self.function = function
        self._states = states
        self._device = device
        self._dtype = compute_type(device)
        self._workers = workers
        self._step = 0  # the states are those before this step
        self._reached: tuple[str, ...] = ()  # `inputs` are those of these matrices

    def groups(self) -> Iterator[tuple[str, ...]]:
        for roles in self.function.groups:
            self._run(roles)
            yield roles
        self.to_end()

    def expert_inputs(self) -> list[Tensor]:
        """Inputs of the experts, pieces [R, T, hidden or latent], when the pass is at the router.
        Latent ones are outputs of the product's `latent_down`."""
        norm, narrow = self.function.expert_norm, self.function.latent_down
        if narrow is not None:
            return self._workers.map(
                lambda piece: AUTOGRAD.linear(piece, narrow).to(self._dtype), self.inputs
            )
        if norm is None:
            return self.inputs

        def run(states: Tensor) -> Tensor:
            return normed(AUTOGRAD, states.to(self._device), norm).to(self._dtype)

        return self._workers.map(run, torch.split(self._states, self._workers.rows_per_piece))

    def to_end(self) -> None:
        """Goes on to the end of the layer."""
        self._run(())

    def _run(self, until: tuple[str, ...]) -> None:
        """Goes on to the matrices `until`, or to the end if there are none."""
        known, self.inputs = self.inputs, []
        pieces = range(-(-len(self._states) // self._workers.rows_per_piece))
        stops = self._workers.map(lambda piece: self._run_piece(piece, known, until), pieces)
        self._step, self._reached = stops[0][0], until
        self.inputs = [inputs for _, inputs in stops]

    def _run_piece(
        self, piece: int, known: list[Tensor], until: tuple[str, ...]
    ) -> tuple[int, Tensor]:
        """The step in which the pass stops, and the inputs of the matrices there. `known` are the
        inputs at the last stop."""
        step = self._workers.rows_per_piece
        rows = slice(piece * step, piece * step + step)
        function = self.function.with_product(_stopping(self.function.product, until))
        x, first = self._states[rows].to(self._device), self._step
        if known and function.can_finish(first, self._reached):
            x, first = function.finish_step(first, x, known[piece]), first + 1
        for index in range(first, function.num_steps):
            try:
                x = function.run_step(index, x)
            except _Reached as reached:
                self._states[rows] = x.to(self._states.device)
                return index, reached.inputs.to(self._dtype)
        self._states[rows] = x.to(self._states.device)
        return function.num_steps, x[:, :0]


class _Reached(Exception):  # noqa: N818 - ends a pass, and is no error
    """A pass has come to matrices that it must not multiply with yet."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def _stopping(product: Product, until: tuple[str, ...]) -> Product:
    def stop_or_multiply(role: str, x: Tensor) -> Tensor:
        if role in until:
            raise _Reached(x)
        return product(role, x)

    return stop_or_multiply
