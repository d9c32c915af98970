"""The module table: one row for every matrix and vector of a model, derived once from its numbers.

A row says everything about a tensor that does not depend on a file's contents: name, shape, places
in safetensors and GGUF files, bias, packing, sharding. Readers, the loader, the converter, LoRA and
descriptions read the rows and know no names of their own. The rows follow from `LayerSpec`s (which
tensors, which shapes) and from the family's `FileForm`s (names, fused tensors, permutations).

Canonical names are those of the family's checkpoints (`model.layers.0.self_attn.q_proj.weight`).
Matrices are [out_features, in_features].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from exl_core.arch.layers import MoE
from exl_core.arch.names import FileForm
from exl_core.arch.naming import (
    NOWHERE,
    Owner,
    Wanted,
    canonical_name,
    ending,
    place_of_expert,
    places_of,
)
from exl_core.arch.parts import Kind, Packed, Part, Shard, expert_parts, layer_parts, norm_part
from exl_core.arch.places import Place, RowPermutation
from exl_core.arch.spec import ModelConfig

__all__ = [
    "Container",
    "Kind",
    "LoraTarget",
    "ModuleRow",
    "ModuleTable",
    "Packed",
    "Shard",
    "expert_matrices",
    "module_table",
]

Container = Literal["safetensors", "gguf"]


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One matrix or vector.

    role       its part in the model or layer, equal in all families: `embed`, `q`, `mlp_norm`
    layer      None outside the layers
    expert     index of the expert in its layer; None for matrices that every token passes
    bias       name of a matrix's bias, which is a row of its own
    packed     matrix that it is packed into at run time, from output `first_out` on
    shard      dimension that tensor parallelism divides; None for a copy on every device
    num_heads  heads that a head norm applies to. A norm with factors for each of its heads is
               written by head
    is_converted  whether the converter quantizes it
    is_normalized  whether files that do not quantize it store rows that have yet to be divided by
                   their length
    is_dense   whether the loader dequantizes it, as no op reads its codes
    """

    name: str
    role: str
    layer: int | None
    kind: Kind
    shape: tuple[int, ...]
    safetensors: tuple[Place, ...]
    gguf: tuple[Place, ...]
    bias: str | None = None
    packed: Packed | None = None
    first_out: int = 0
    shard: Shard | None = None
    num_heads: int = 0
    is_converted: bool = False
    is_normalized: bool = False
    expert: int | None = None
    is_dense: bool = False

    @property
    def is_norm(self) -> bool:
        return self.kind in (Kind.NORM, Kind.HEAD_NORM)

    @property
    def is_matrix(self) -> bool:
        return self.kind in (Kind.EMBEDDING, Kind.POSITIONS, Kind.LINEAR, Kind.HEAD)

    @property
    def key(self) -> str:
        """Name of the weight within its layer: its role, and the index of its expert if any."""
        return self.role if self.expert is None else f"{self.role}.{self.expert}"

    @property
    def stem(self) -> str:
        """Name of the module: of the tensor without `.weight` or `.bias`."""
        return self.name.rpartition(".")[0]

    @property
    def written(self) -> Place:
        """Place under which the converter writes the tensor."""
        return next(place for place in self.safetensors if place.name == self.name)

    def places(self, container: Container) -> tuple[Place, ...]:
        """Possible places, most likely first. Fused tensors come before separate ones: in a file
        that has both, the separate ones are a leftover."""
        return self.gguf if container == "gguf" else self.safetensors

    def own_name(self, container: Container) -> str:
        """Name of the tensor in files that do not fuse it."""
        places = self.places(container)
        alone = (place.name for place in places if place.num_rows == self.shape[0])
        return next(alone, places[0].name if places else self.name)


class LoraTarget(NamedTuple):
    """Rows that an adapter's module changes, and their places in it. A fused projection changes
    several."""

    rows: tuple[ModuleRow, ...]
    places: tuple[Place, ...]

    @property
    def in_features(self) -> int:
        return self.rows[0].shape[0 if self._is_embedding else 1]

    @property
    def out_features(self) -> int:
        if self._is_embedding:  # ids to states
            return self.rows[0].shape[1]
        return sum(row.shape[0] for row in self.rows)

    @property
    def _is_embedding(self) -> bool:
        return self.rows[0].kind is Kind.EMBEDDING

    def stored_rows(self) -> list[int] | None:
        """Output in the adapter's file of each of the model's outputs; None if the orders agree."""
        if self._is_embedding or all(place.permutation is None for place in self.places):
            return None
        found: list[int] = []
        for row, place in zip(self.rows, self.places, strict=True):
            own = (
                range(row.shape[0])
                if place.permutation is None
                else place.permutation.stored_rows()
            )
            found += [place.first_row + index for index in own]
        return found


class ModuleTable:
    """The rows of one model, in the order of the forward pass. A tied head is not among `rows`."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, forms = config.hidden_size, (config.arch.safetensors, config.arch.gguf)
        ends = (config.vocab_size, hidden)
        embed = Part("embed", Kind.EMBEDDING, ends, shard=Shard.OUT_FEATURES)
        head = Part("head", Kind.HEAD, ends, shard=Shard.OUT_FEATURES, is_converted=True)
        (self.embed,) = _rows([embed], forms)
        vectors = Part("positions", Kind.POSITIONS, (config.num_positions, hidden))
        found = _rows([vectors], forms) if config.num_positions else []
        self.positions = found[0] if found else None
        """Vectors of the positions, of families that have them."""
        final = _rows([norm_part("final_norm", hidden, config.arch.norm_kind)], forms)
        self.final_norm = final[0]
        (self.head,) = _rows([head], forms)
        self.head = replace(self.head, is_normalized=config.has_normalized_head)
        layers = [
            _rows(layer_parts(config, layer), forms, Owner(index))
            for index, layer in enumerate(config.layers)
        ]
        self.layers: tuple[Mapping[str, ModuleRow], ...] = tuple(
            {row.role: row for row in rows if row.kind is not Kind.BIAS} for rows in layers
        )
        """Weights of each layer by role, without biases and experts."""
        experts = [_expert_rows(config, index, forms) for index in range(config.num_layers)]
        self.experts: tuple[tuple[Mapping[str, ModuleRow], ...], ...] = tuple(
            tuple({row.role: row for row in rows if row.kind is not Kind.BIAS} for rows in of_layer)
            for of_layer in experts
        )
        """Weights of the experts of each layer, by index and role, without biases."""
        self.surplus = tuple(
            _surplus_row(layer.feed_forward, hidden, index, forms)
            for index, layer in enumerate(config.layers)
            if isinstance(layer.feed_forward, MoE)
        )
        """A row per layer with experts that only a file with too many of them has."""
        for rows, of_layer in zip(layers, experts, strict=True):
            rows.extend(chain.from_iterable(of_layer))
        body = (self.embed, *found, *chain.from_iterable(layers), *final)
        self.is_tied = config.has_tied_embeddings
        self.rows: tuple[ModuleRow, ...] = body if self.is_tied else (*body, self.head)
        self._by_name = {row.name: row for row in (*body, self.head)}

    def __getitem__(self, name: str) -> ModuleRow:
        """The row of a canonical name, of a tied head too."""
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def rows_of(self, layer: int | None) -> Iterator[ModuleRow]:
        """All rows of a layer, biases included; None for those outside the layers."""
        return (row for row in self.rows if row.layer == layer)

    def packed(self, layer: int) -> dict[Packed, tuple[ModuleRow, ...]]:
        """Matrices of a layer by the packed matrix that they belong to, in order."""
        found: dict[Packed, tuple[ModuleRow, ...]] = {}
        for row in self.layers[layer].values():
            if row.packed is not None:
                found[row.packed] = (*found.get(row.packed, ()), row)
        return found

    def weights_of(self, layer: int) -> dict[str, ModuleRow]:
        """Weights of a layer by key, those of its experts included, without biases."""
        rows = chain(self.layers[layer].values(), *(one.values() for one in self.experts[layer]))
        return {row.key: row for row in rows if row.kind is not Kind.BIAS}

    def packed_with(self, row: ModuleRow) -> tuple[ModuleRow, ...]:
        """Matrices that are packed into one with `row`, itself included."""
        if row.layer is None or row.packed is None:
            return (row,)
        if row.expert is not None:
            return expert_matrices(self.experts[row.layer][row.expert])[row.packed]
        return self.packed(row.layer)[row.packed]

    @cached_property
    def lora_targets(self) -> Mapping[str, LoraTarget]:
        """Matrices by the names of their modules in checkpoints, fused ones included. Routers and
        experts are not among them."""
        found: dict[str, LoraTarget] = {}
        for row in self._by_name.values():
            is_packed = row.layer is None or row.packed is not None
            is_target = row.is_matrix and is_packed and row.expert is None
            is_target = is_target and row.kind is not Kind.POSITIONS
            for place in row.safetensors if is_target else ():
                stem = place.name.removesuffix(".weight")
                before = found.get(stem, LoraTarget((), ()))
                found[stem] = LoraTarget((*before.rows, row), (*before.places, place))
        return found


def expert_matrices(expert: Mapping[str, ModuleRow]) -> dict[Packed, tuple[ModuleRow, ...]]:
    """Matrices of an expert by the packed matrix that they belong to, in order."""
    gate_up = tuple(expert[role] for role in ("expert_gate", "expert_up") if role in expert)
    return {"expert_gate_up": gate_up, "expert_down": (expert["expert_down"],)}


@lru_cache(maxsize=8)
def module_table(config: ModelConfig) -> ModuleTable:
    return ModuleTable(config)


def _expert_rows(
    config: ModelConfig, layer: int, forms: tuple[FileForm, FileForm]
) -> list[list[ModuleRow]]:
    """Rows of each expert of a layer."""
    spec = config.layers[layer].feed_forward
    if not isinstance(spec, MoE):
        return []
    parts, count = expert_parts(config.hidden_size, spec), spec.router.num_experts
    # The rows of all experts follow from one of them: deriving each anew took 0.1 ms per matrix.
    rows = _rows(parts, forms, Owner(layer, None, count))
    return [[_row_of_expert(row, index, count) for row in rows] for index in range(count)]


def _row_of_expert(row: ModuleRow, expert: int, count: int) -> ModuleRow:
    """The row of one expert from that of all of them, whose names have a `{}` for the index."""
    return ModuleRow(
        name=row.name.replace("{}", str(expert)),
        role=row.role,
        layer=row.layer,
        kind=row.kind,
        shape=row.shape,
        safetensors=tuple(place_of_expert(place, expert, count) for place in row.safetensors),
        gguf=tuple(place_of_expert(place, expert, count) for place in row.gguf),
        bias=None if row.bias is None else row.bias.replace("{}", str(expert)),
        packed=row.packed,
        first_out=row.first_out,
        shard=row.shard,
        num_heads=row.num_heads,
        is_converted=row.is_converted,
        is_normalized=row.is_normalized,
        expert=expert,
        is_dense=row.is_dense,
    )


def _surplus_row(spec: MoE, hidden: int, layer: int, forms: tuple[FileForm, FileForm]) -> ModuleRow:
    """A row of the expert after the last one. Tensors of all experts are not among its places."""
    count = spec.router.num_experts
    row = _rows(expert_parts(hidden, spec), forms, Owner(layer, count, count))[0]
    safetensors, gguf = (
        tuple(place for place in places if not place.experts)
        for places in (row.safetensors, row.gguf)
    )
    return replace(row, safetensors=safetensors, gguf=gguf)


def _heads_in_gguf(part: Part, safetensors: FileForm) -> RowPermutation | None:
    """Heads of the rows of `part` as llama.cpp's converter sees them: where it interleaves the rows
    of queries and keys, it does so in layers without RoPE too."""
    heads = part.heads
    is_unrotated = heads is not None and heads.rotary_dim == 0 and part.role in ("q", "k")
    if heads is None or not is_unrotated or safetensors.is_interleaved:
        return heads
    return replace(heads, rotary_dim=heads.head_dim)


def _rows(
    parts: Sequence[Part],
    forms: tuple[FileForm, FileForm],
    owner: Owner = NOWHERE,
) -> list[ModuleRow]:
    rows: list[ModuleRow] = []
    first_outs: dict[Packed | None, int] = {}
    num_rows = {part.role: part.shape[0] for part in parts}
    for part in parts:
        first_out = first_outs.get(part.packed, 0)
        first_outs[part.packed] = first_out + part.shape[0]
        bias_shape = part.shape[:1] if part.has_bias else None
        for shape, suffix in ((part.shape, "weight"), (bias_shape, "bias")):
            if shape is None:
                continue
            is_norm = part.kind in (Kind.NORM, Kind.HEAD_NORM)
            wanted = Wanted(part.role, suffix, part.shape[0], part.heads, is_norm, part.stacked)
            in_gguf = wanted._replace(heads=_heads_in_gguf(part, forms[0]))
            safetensors = places_of(wanted, num_rows, forms[0], owner)
            gguf = places_of(in_gguf, num_rows, forms[1], owner)
            is_weight = suffix == "weight"
            name = canonical_name(part.role, forms[0], owner)
            rows.append(
                ModuleRow(
                    name=name + ending(part.role, forms[0].names[part.role], suffix, forms[0]),
                    role=part.role,
                    layer=owner.layer,
                    kind=part.kind if is_weight else Kind.BIAS,
                    shape=shape,
                    safetensors=safetensors,
                    gguf=gguf,
                    bias=f"{name}.bias" if part.has_bias and is_weight else None,
                    packed=part.packed,
                    first_out=first_out if part.packed is not None else 0,
                    shard=part.shard if is_weight or part.shard is Shard.OUT_FEATURES else None,
                    num_heads=part.num_heads,
                    is_converted=part.is_converted and is_weight,
                    expert=owner.expert,
                    is_dense=part.is_dense,
                )
            )
    return rows
