"""Passes of calibration rows through one layer, by the functions of the model's layers.

The autograd backend runs them. `LayerFunction` computes a whole layer, and gradients flow through
it. `CapturingPass` stops at each group of matrices that read the same inputs, so that the caller
can use these inputs to quantize the matrices before the pass goes on with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from exl_core.arch.layers import LayerSpec
from exl_core.arch.modules import ModuleRow, module_table
from exl_core.arch.spec import ModelConfig, RopeConfig
from exl_core.convert.layers import compute_type
from exl_core.convert.parallel import Workers
from exl_core.model.build import block_weights
from exl_core.model.layers.state import PassState, make_buffers
from exl_core.model.layers.steps import layer_steps
from exl_core.model.rotation import RotationTable
from exl_core.ops.attention import CacheLayer
from exl_core.ops.backends.autograd.attention import WholeSequences, no_pages
from exl_core.ops.backends.autograd.linear import Product, RoleMatrices
from exl_core.ops.backends.autograd.table import AUTOGRAD


class LayerFunction:
    """One layer as a function of its states x [R, T, hidden]. `norms` are factors, by role."""

    def __init__(
        self, config: ModelConfig, layer: int, norms: Mapping[str, Tensor], product: Product
    ) -> None:
        self.product = product
        self.groups = matrix_groups(config, layer)
        self.with_product = partial(LayerFunction, config, layer, norms)
        """Returns the same layer with another product."""
        self._layer, self._spec = layer, config.layers[layer]
        self._rope = config.rope_of(self._spec.attention)
        self._weights = block_weights(config, layer, _Source(norms, product))
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

    def _state(self, x: Tensor) -> PassState:
        count = self._layer + 1  # entries are by layer
        return PassState(
            caches=_NoCache(self._spec),
            rows={self._spec.attention.rope: _sequences(self._rope, x.shape[1], x.device)},
            smoothing=(None,) * count,
            buffers=make_buffers(AUTOGRAD, (self._spec,), 0) * count,
        )


class _Source:
    """WeightSource of norms by role and of a product."""

    def __init__(self, norms: Mapping[str, Tensor], product: Product) -> None:
        self.device = next(iter(norms.values())).device
        self._norms = norms
        self._product = product

    def norm(self, row: ModuleRow) -> Tensor:
        return self._norms[row.role]

    @staticmethod
    def norm_bias(row: ModuleRow) -> Tensor | None:
        assert row.bias is None, "the checks before a conversion refuse norms with biases"
        return None

    def packed(self, rows: Sequence[ModuleRow]) -> RoleMatrices:
        roles, sizes = tuple(row.role for row in rows), tuple(row.shape[0] for row in rows)
        return RoleMatrices(roles, sizes, rows[0].shape[1], self._product)


class _NoCache:
    """LayerCaches of one layer, with no pages."""

    def __init__(self, spec: LayerSpec) -> None:
        self._layer = no_pages(spec.attention.num_kv_heads, spec.attention.head_dim)

    def layer(self, layer: int) -> CacheLayer:  # noqa: ARG002 - there is one layer
        return self._layer


@lru_cache(maxsize=4)  # local and global layers, two sequence lengths
def _sequences(rope: RopeConfig | None, length: int, device: torch.device) -> WholeSequences:
    if rope is None:
        none = torch.empty(length, 0, device=device)
        return WholeSequences(none, none)
    cos, sin = RotationTable(rope, torch.device("cpu")).at(torch.arange(length))
    return WholeSequences(cos.to(device), sin.to(device))


def matrix_groups(config: ModelConfig, layer: int) -> tuple[tuple[str, ...], ...]:
    """Roles of a layer's matrices, grouped by the inputs that they read, in the order in which
    these are computed."""
    packed = module_table(config).packed(layer).values()
    return tuple(tuple(row.role for row in rows) for rows in packed)


class CapturingPass:
    """Passes `states` float32 [rows, T, hidden] through one layer, which replaces them in place.

    `groups` yields the roles of the next matrices. Their inputs are then in `inputs`, a list of
    pieces [R, T, K]. The function's product is called for these matrices only when the iteration
    continues. States are kept between the steps of a layer. The work of a step that precedes the
    matrices is repeated for each group, because keeping its results would take more memory than
    the inputs themselves.
    """

    def __init__(
        self, function: LayerFunction, states: Tensor, device: torch.device, workers: Workers
    ) -> None:
        self.inputs: list[Tensor] = []
        self._function = function
        self._states = states
        self._device = device
        self._dtype = compute_type(device)
        self._workers = workers
        self._step = 0  # the states are those before this step

    def groups(self) -> Iterator[tuple[str, ...]]:
        for roles in self._function.groups:
            self._run(roles)
            yield roles
        self.to_end()

    def to_end(self) -> None:
        """Goes on to the end of the layer."""
        self._run(())

    def _run(self, until: tuple[str, ...]) -> None:
        """Goes on to the matrices `until`, or to the end if there are none."""
        self.inputs = []
        pieces = range(-(-len(self._states) // self._workers.rows_per_piece))
        stops = self._workers.map(lambda piece: self._run_piece(piece, until), pieces)
        self._step = stops[0][0]
        self.inputs = [inputs for _, inputs in stops]

    def _run_piece(self, piece: int, until: tuple[str, ...]) -> tuple[int, Tensor]:
        """The step in which the pass stops, and the inputs of the matrices there."""
        step = self._workers.rows_per_piece
        rows = slice(piece * step, piece * step + step)
        function = self._function.with_product(_stopping(self._function.product, until))
        x = self._states[rows].to(self._device)
        for index in range(self._step, function.num_steps):
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
