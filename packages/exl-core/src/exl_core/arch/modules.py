"""The module table: one row for every matrix and vector of a model, derived once from its numbers.

A row says everything about a tensor that does not depend on a file's contents: name, shape, places
in safetensors and GGUF files, bias, packing, sharding. Readers, the loader, the converter, LoRA and
descriptions read the rows and know no names of their own. The rows follow from `LayerSpec`s (which
tensors, which shapes) and from the family's `FileForm`s (names, fused tensors, row orders).

Canonical names are those of the family's checkpoints (`model.layers.0.self_attn.q_proj.weight`).
Matrices are [out_features, in_features].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from exl_core.arch.layers import (
    Activation,
    Attention,
    Dense,
    FeedForward,
    HeadNorm,
    LayerSpec,
    Mixer,
    NormKind,
    NormPlacement,
    unsupported,
)
from exl_core.arch.names import FileForm, Fused
from exl_core.arch.spec import ModelConfig
from exl_core.errors import UnsupportedModelError


class Kind(Enum):
    EMBEDDING = "embedding"
    LINEAR = "linear"
    HEAD = "head"
    BIAS = "bias"
    NORM = "norm"
    HEAD_NORM = "head norm"
    SCALAR = "scalar"


class Shard(Enum):
    """Dimension of a matrix that tensor parallelism divides."""

    OUT_FEATURES = "out_features"
    IN_FEATURES = "in_features"


Packed = Literal["qkv", "output", "gate_up", "down"]
"""Matrices of a layer at run time. Projections that read the same input are packed into one."""

Container = Literal["safetensors", "gguf"]


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Rows of a matrix's heads in a file that stores them in another order than the model.

    rotary_dim  rows at the start of each head that the file stores as interleaved RoPE pairs. Its
                pairs are rows (2i, 2i + 1), the model's pairs are (i, i + rotary_dim/2). 0: none.
    group       heads that the file stores one after the other
    stride      heads from the first one of a group to the first one of the next group
    """

    num_heads: int
    head_dim: int
    rotary_dim: int
    group: int = 1
    stride: int = 1

    def stored_rows(self) -> list[int]:
        """Row in the file of each of the model's rows."""
        rotated = range(self.rotary_dim)
        head = [*rotated[::2], *rotated[1::2], *range(self.rotary_dim, self.head_dim)]
        return [first + row for first in self._firsts() for row in head]

    def model_rows(self) -> list[int]:
        """The model's row of each row in the file: the inverse of `stored_rows`. The file must have
        nothing between the groups."""
        half = self.rotary_dim // 2
        pairs = chain.from_iterable((i, i + half) for i in range(half))
        head = [*pairs, *range(self.rotary_dim, self.head_dim)]
        return [first + row for first in self._firsts() for row in head]

    def _firsts(self) -> Iterator[int]:
        """First row of each head in the file."""
        for head in range(self.num_heads):
            group, place = divmod(head, self.group)
            yield (group * self.stride + place) * self.head_dim


@dataclass(frozen=True, slots=True)
class Place:
    """A place where a file may store a tensor: rows from `first_row` on of the tensor `name`.

    `num_rows` counts all rows of the stored tensor. `order` is the order of its rows, None for the
    model's. `addend` is added to the stored values.
    """

    name: str
    first_row: int
    num_rows: int
    order: RowOrder | None = None
    addend: float = 0.0


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One matrix or vector.

    role       its part in the model or layer, equal in all families: `embed`, `q`, `mlp_norm`
    layer      None outside the layers
    bias       name of a matrix's bias, which is a row of its own
    packed     matrix that it is packed into at run time, from output `first_out` on
    shard      dimension that tensor parallelism divides; None for a copy on every device
    num_heads  heads that a head norm applies to
    is_converted  whether the converter quantizes it
    is_normalized  whether files that do not quantize it store rows that have yet to be divided by
                   their length
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

    @property
    def is_norm(self) -> bool:
        return self.kind in (Kind.NORM, Kind.HEAD_NORM)

    @property
    def is_matrix(self) -> bool:
        return self.kind in (Kind.EMBEDDING, Kind.LINEAR, Kind.HEAD)

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
        if self._is_embedding or all(place.order is None for place in self.places):
            return None
        found: list[int] = []
        for row, place in zip(self.rows, self.places, strict=True):
            own = range(row.shape[0]) if place.order is None else place.order.stored_rows()
            found += [place.first_row + index for index in own]
        return found


class ModuleTable:
    """The rows of one model, in the order of the forward pass. A tied head is not among `rows`."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, forms = config.hidden_size, (config.arch.safetensors, config.arch.gguf)
        ends = (config.vocab_size, hidden)
        embed = _Part("embed", Kind.EMBEDDING, ends, shard=Shard.OUT_FEATURES)
        head = _Part("head", Kind.HEAD, ends, shard=Shard.OUT_FEATURES, is_converted=True)
        (self.embed,) = _rows([embed], forms)
        final = _rows([_norm_part("final_norm", hidden, config.arch.norm_kind)], forms)
        self.final_norm = final[0]
        (self.head,) = _rows([head], forms)
        self.head = replace(self.head, is_normalized=config.has_normalized_head)
        layers = [
            _rows(_layer_parts(config, layer), forms, index)
            for index, layer in enumerate(config.layers)
        ]
        self.layers: tuple[Mapping[str, ModuleRow], ...] = tuple(
            {row.role: row for row in rows if row.kind is not Kind.BIAS} for rows in layers
        )
        """Weights of each layer by role, without biases."""
        body = (self.embed, *chain.from_iterable(layers), *final)
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

    def packed_with(self, row: ModuleRow) -> tuple[ModuleRow, ...]:
        """Matrices that are packed into one with `row`, itself included."""
        if row.layer is None or row.packed is None:
            return (row,)
        return self.packed(row.layer)[row.packed]

    @cached_property
    def lora_targets(self) -> Mapping[str, LoraTarget]:
        """Matrices by the names of their modules in checkpoints, fused ones included."""
        found: dict[str, LoraTarget] = {}
        for row in self._by_name.values():
            for place in row.safetensors if row.is_matrix else ():
                stem = place.name.removesuffix(".weight")
                before = found.get(stem, LoraTarget((), ()))
                found[stem] = LoraTarget((*before.rows, row), (*before.places, place))
        return found


@lru_cache(maxsize=8)
def module_table(config: ModelConfig) -> ModuleTable:
    return ModuleTable(config)


class _Part(NamedTuple):
    """A row before its names are known. `heads` are its heads, with the rows of each that files may
    store as interleaved RoPE pairs."""

    role: str
    kind: Kind
    shape: tuple[int, ...]
    has_bias: bool = False
    packed: Packed | None = None
    shard: Shard | None = None
    num_heads: int = 0
    heads: RowOrder | None = None
    is_converted: bool = False


def _layer_parts(config: ModelConfig, layer: LayerSpec) -> list[_Part]:
    hidden = config.hidden_size
    mixer = _mixer_parts(config, layer.mixer)
    matrices = [part for part in mixer if part.kind is Kind.LINEAR]
    others = [part for part in mixer if part.kind is not Kind.LINEAR]
    norms = {
        NormPlacement.PRE: ("attention_norm", "mlp_norm"),
        NormPlacement.POST: ("attention_post_norm", "mlp_post_norm"),
        NormPlacement.PARALLEL: ("attention_norm",),
        NormPlacement.SANDWICH: (
            *("attention_norm", "attention_post_norm"),
            *("mlp_norm", "mlp_post_norm"),
        ),
    }[layer.norms]
    return [
        *matrices,
        *_feed_forward_parts(hidden, layer.feed_forward),
        *(_norm_part(role, hidden, layer.norm_kind) for role in norms),
        *([_Part("scalar", Kind.SCALAR, (1,))] if layer.has_scalar else []),
        *others,
    ]


def _norm_part(role: str, hidden: int, kind: NormKind) -> _Part:
    return _Part(role, Kind.NORM, (hidden,), has_bias=kind is NormKind.LAYER_BIAS)


def _mixer_parts(config: ModelConfig, mixer: Mixer) -> list[_Part]:
    match mixer:
        case Attention():
            return _attention_parts(config, mixer)
        case _:
            raise unsupported("mixer", mixer)


def _attention_parts(config: ModelConfig, spec: Attention) -> list[_Part]:
    hidden = config.hidden_size
    rope = config.rope_of(spec)

    def heads(num_heads: int, *, is_rotated: bool = True) -> RowOrder:
        rotated = rope.rotary_dim if rope is not None and is_rotated else 0
        return RowOrder(num_heads, spec.head_dim, rotated)

    parts = [
        _Part(
            role,
            Kind.LINEAR,
            (num_heads * spec.head_dim, hidden),
            spec.has_qkv_bias,
            "qkv",
            Shard.OUT_FEATURES,
            heads=heads(num_heads, is_rotated=role != "v"),
            is_converted=True,
        )
        for role, num_heads in (
            ("q", spec.num_q_heads),
            ("k", spec.num_kv_heads),
            ("v", spec.num_kv_heads),
        )
        if role != "v" or not spec.is_value_key
    ]
    parts.append(
        _Part(
            "output",
            Kind.LINEAR,
            (hidden, spec.q_size),
            spec.has_output_bias,
            "output",
            Shard.IN_FEATURES,
            is_converted=True,
        )
    )
    if spec.head_norm is not HeadNorm.NONE:
        for role, num_heads in (("q_norm", spec.num_q_heads), ("k_norm", spec.num_kv_heads)):
            if spec.head_norm not in (HeadNorm.RMS, HeadNorm.RMS_AFTER_ROPE):
                shape = (num_heads * spec.head_dim,)
                parts.append(_Part(role, Kind.NORM, shape, heads=heads(num_heads)))
                continue
            shape = (spec.head_dim,)
            parts.append(_Part(role, Kind.HEAD_NORM, shape, num_heads=num_heads, heads=heads(1)))
    return parts


def _feed_forward_parts(hidden: int, feed_forward: FeedForward) -> list[_Part]:
    match feed_forward:
        case Dense(intermediate_size=inner, has_bias=has_bias, is_gated=is_gated) as spec:
            wide = _Part("gate", Kind.LINEAR, (inner, hidden), has_bias, "gate_up")
            wide = wide._replace(shard=Shard.OUT_FEATURES, is_converted=True)
            down = _Part("down", Kind.LINEAR, (hidden, inner), has_bias, "down")
            down = down._replace(shard=Shard.IN_FEATURES, is_converted=True)
            up = wide._replace(role="up")
            roles = ("alpha_p", "alpha_n") if spec.activation is Activation.XIELU else ()
            numbers = [_Part(role, Kind.SCALAR, (1,)) for role in roles]
            return [wide, up, down] if is_gated else [up, down, *numbers]
        case _:
            raise unsupported("feed-forward part", feed_forward)


def _rows(
    parts: Sequence[_Part], forms: tuple[FileForm, FileForm], layer: int | None = None
) -> list[ModuleRow]:
    rows: list[ModuleRow] = []
    first_outs: dict[Packed | None, int] = {}
    by_role = {part.role: part for part in parts}
    for part in parts:
        first_out = first_outs.get(part.packed, 0)
        first_outs[part.packed] = first_out + part.shape[0]
        bias_shape = part.shape[:1] if part.has_bias else None
        for shape, suffix in ((part.shape, "weight"), (bias_shape, "bias")):
            if shape is None:
                continue
            safetensors, gguf = (_places(part, suffix, by_role, form, layer) for form in forms)
            is_weight = suffix == "weight"
            name = _canonical(part.role, forms[0], layer)
            rows.append(
                ModuleRow(
                    name=name + _suffix(part.role, suffix, forms[0]),
                    role=part.role,
                    layer=layer,
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
                )
            )
    return rows


def _places(
    part: _Part, suffix: str, by_role: Mapping[str, _Part], form: FileForm, layer: int | None
) -> tuple[Place, ...]:
    is_norm = part.kind in (Kind.NORM, Kind.HEAD_NORM)
    addend = form.norm_addend if is_norm else 0.0
    order = part.heads if form.is_interleaved and part.heads and part.heads.rotary_dim else None
    places = []
    for fused in form.fused:
        is_here = part.role in fused.roles and by_role.keys() >= set(fused.roles)
        if not is_here or layer is None:
            continue
        for root in form.roots:
            name = f"{root}{form.layer.format(layer)}{fused.name}.{suffix}"
            places.append(_fused_place(part, name, fused, by_role, order))
    for stem in form.stems(part.role):
        for root in _head_roots(form) if part.role == "head" else form.roots:
            name = _name(part.role, stem, form, root, layer) + _suffix(part.role, suffix, form)
            places.append(Place(name, 0, part.shape[0], order, addend))
    return tuple(places)


def _suffix(role: str, suffix: str, form: FileForm) -> str:
    return "" if role in form.bare else f".{suffix}"


def _fused_place(
    part: _Part, name: str, fused: Fused, by_role: Mapping[str, _Part], order: RowOrder | None
) -> Place:
    """The rows of `part` in a tensor that consists of several roles."""
    rows = [by_role[role].shape[0] for role in fused.roles]
    before = fused.roles.index(part.role)
    if not fused.is_grouped:
        return Place(name, sum(rows[:before]), sum(rows), order)
    assert part.heads is not None, "only heads are stored in groups"
    groups, head_dim = by_role["k"].shape[0] // part.heads.head_dim, part.heads.head_dim
    sizes = [count // (groups * head_dim) for count in rows]  # heads of each role in a group
    grouped = replace(
        part.heads,
        rotary_dim=0 if order is None else order.rotary_dim,
        group=sizes[before],
        stride=sum(sizes),
    )
    return Place(name, sum(sizes[:before]) * head_dim, sum(rows), grouped)


def _canonical(role: str, form: FileForm, layer: int | None) -> str:
    if role not in form.names:
        raise UnsupportedModelError(f"the family has no name for the tensor of role {role!r}")
    return _name(role, form.names[role], form, form.roots[0], layer)


def _name(role: str, stem: str, form: FileForm, root: str, layer: int | None) -> str:
    inside = "" if layer is None else form.layer.format(layer)
    prefix = "" if role == "head" and root == form.roots[0] else root
    return f"{prefix}{inside}{stem}"


def _head_roots(form: FileForm) -> tuple[str, ...]:
    """Prefixes of the head, which is beside the `model.` of a language model."""
    inner = [root.removesuffix("model.") for root in form.roots if root.endswith(".model.")]
    return (form.roots[0], *inner)
