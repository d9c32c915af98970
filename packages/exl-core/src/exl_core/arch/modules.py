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
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from exl_core.arch.layers import (
    MLA,
    Activation,
    Attention,
    Dense,
    FeedForward,
    GatedDeltaNet,
    HeadNorm,
    LayerSpec,
    Mamba2,
    Mixer,
    MoE,
    NoFeedForward,
    NoMixer,
    NormKind,
    NormPlacement,
    RouterBias,
    ShortConv,
    unsupported,
)
from exl_core.arch.names import FileForm
from exl_core.arch.naming import NOWHERE, Owner, Wanted, canonical_name, ending, places_of
from exl_core.arch.places import Place, RowPermutation
from exl_core.arch.spec import ModelConfig


class Kind(Enum):
    EMBEDDING = "embedding"
    POSITIONS = "positions"
    LINEAR = "linear"
    HEAD = "head"
    BIAS = "bias"
    NORM = "norm"
    HEAD_NORM = "head norm"
    SCALAR = "scalar"
    SINKS = "sinks"
    ROUTER_VECTOR = "router vector"
    TAPS = "taps"
    VECTOR = "vector"


class Shard(Enum):
    """Dimension of a matrix that tensor parallelism divides."""

    OUT_FEATURES = "out_features"
    IN_FEATURES = "in_features"


Packed = Literal[
    "qkv",
    "q_up",
    "output",
    "mixer_in",
    "mixer_out",
    "gate_up",
    "down",
    "expert_gate_up",
    "expert_down",
    "shared_gate_up",
    "shared_down",
    "latent_down",
    "latent_up",
]
"""Matrices of a layer at run time. Projections that read the same input are packed into one. Each
expert has its own two."""

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
        embed = _Part("embed", Kind.EMBEDDING, ends, shard=Shard.OUT_FEATURES)
        head = _Part("head", Kind.HEAD, ends, shard=Shard.OUT_FEATURES, is_converted=True)
        (self.embed,) = _rows([embed], forms)
        vectors = _Part("positions", Kind.POSITIONS, (config.num_positions, hidden))
        found = _rows([vectors], forms) if config.num_positions else []
        self.positions = found[0] if found else None
        """Vectors of the positions, of families that have them."""
        final = _rows([_norm_part("final_norm", hidden, config.arch.norm_kind)], forms)
        self.final_norm = final[0]
        (self.head,) = _rows([head], forms)
        self.head = replace(self.head, is_normalized=config.has_normalized_head)
        layers = [
            _rows(_layer_parts(config, layer), forms, Owner(index))
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
    heads: RowPermutation | None = None
    is_converted: bool = False
    is_dense: bool = False
    stacked: int = 0  # matrices in the stored tensor, which then has three dimensions


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
    absent = {"attention_norm"} if isinstance(layer.mixer, NoMixer) else set()
    absent |= {"mlp_norm"} if isinstance(layer.feed_forward, NoFeedForward) else set()
    return [
        *matrices,
        *_feed_forward_parts(hidden, layer.feed_forward),
        *(_norm_part(role, hidden, layer.norm_kind) for role in norms if role not in absent),
        *([_Part("scalar", Kind.SCALAR, (1,))] if layer.has_scalar else []),
        *others,
    ]


def _norm_part(role: str, hidden: int, kind: NormKind) -> _Part:
    return _Part(role, Kind.NORM, (hidden,), has_bias=kind is NormKind.LAYER_BIAS)


def _mixer_parts(config: ModelConfig, mixer: Mixer) -> list[_Part]:
    match mixer:
        case Attention():
            return _attention_parts(config, mixer)
        case ShortConv():
            return _short_conv_parts(config.hidden_size, mixer)
        case GatedDeltaNet():
            return _delta_net_parts(config.hidden_size, mixer)
        case Mamba2():
            return _mamba2_parts(config.hidden_size, mixer)
        case MLA():
            return _latent_parts(config, mixer)
        case NoMixer():
            return []
        case _:
            raise unsupported("mixer", mixer)


def _attention_parts(config: ModelConfig, spec: Attention) -> list[_Part]:
    hidden = config.hidden_size
    rope = config.rope_of(spec)

    def heads(num_heads: int, *, is_rotated: bool = True) -> RowPermutation:
        rotated = rope.rotary_dim if rope is not None and is_rotated else 0
        return RowPermutation(num_heads, spec.head_dim, rotated)

    parts = [
        _Part(
            role,
            Kind.LINEAR,
            (num_heads * spec.head_dim, hidden),
            spec.has_qkv_bias,
            "qkv",
            Shard.OUT_FEATURES,
            heads=heads(num_heads, is_rotated=role in ("q", "k")),
            is_converted=True,
        )
        for role, num_heads in (
            ("q", spec.num_q_heads),
            ("k", spec.num_kv_heads),
            ("v", spec.num_kv_heads),
            ("q_gate", spec.num_q_heads if spec.has_gate else 0),
        )
        if num_heads and (role != "v" or not spec.is_value_key)
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
    if spec.has_sinks:
        parts.append(_Part("sinks", Kind.SINKS, (spec.num_q_heads,)))
    if spec.head_norm not in (HeadNorm.NONE, HeadNorm.PLAIN_AFTER_ROPE):
        for role, num_heads in (("q_norm", spec.num_q_heads), ("k_norm", spec.num_kv_heads)):
            if spec.head_norm not in (HeadNorm.RMS, HeadNorm.RMS_AFTER_ROPE):
                whole = _Part(role, Kind.NORM, (num_heads * spec.head_dim,))
                is_by_head = spec.head_norm is HeadNorm.LAYER
                count = num_heads if is_by_head else 0
                parts.append(whole._replace(num_heads=count, heads=heads(num_heads)))
                continue
            shape = (spec.head_dim,)
            parts.append(_Part(role, Kind.HEAD_NORM, shape, num_heads=num_heads, heads=heads(1)))
    return parts


def _short_conv_parts(hidden: int, spec: ShortConv) -> list[_Part]:
    wide = _Part("mixer_in", Kind.LINEAR, (3 * spec.size, hidden), spec.has_bias, "mixer_in")
    narrow = _Part("mixer_out", Kind.LINEAR, (hidden, spec.size), spec.has_bias, "mixer_out")
    taps = _Part("taps", Kind.TAPS, (spec.size, spec.taps), spec.has_bias)
    return [wide._replace(is_converted=True), narrow._replace(is_converted=True), taps]


def _delta_net_parts(hidden: int, spec: GatedDeltaNet) -> list[_Part]:
    shared = spec.value_heads // spec.key_heads  # value heads of a key head
    wide = []
    for role, each, is_converted in (
        ("delta_q", spec.key_dim, True),
        ("delta_k", spec.key_dim, True),
        ("delta_v", shared * spec.value_dim, True),
        ("delta_z", shared * spec.value_dim, True),
        ("delta_b", shared, False),
        ("delta_a", shared, False),
    ):
        part = _Part(role, Kind.LINEAR, (spec.key_heads * each, hidden), packed="mixer_in")
        heads = RowPermutation(spec.key_heads, each, 0)
        wide.append(part._replace(heads=heads, is_converted=is_converted))
    narrow = _Part("mixer_out", Kind.LINEAR, (hidden, spec.value_size), packed="mixer_out")
    return [
        *wide,
        narrow._replace(is_converted=True),
        _Part("taps", Kind.TAPS, (spec.channels, spec.taps)),
        _Part("decay", Kind.VECTOR, (spec.value_heads,)),
        _Part("step_bias", Kind.VECTOR, (spec.value_heads,)),
        _Part("mixer_norm", Kind.VECTOR, (spec.value_dim,)),
    ]


def _mamba2_parts(hidden: int, spec: Mamba2) -> list[_Part]:
    width = spec.size + spec.channels + spec.heads
    wide = _Part("mixer_in", Kind.LINEAR, (width, hidden), spec.has_bias, "mixer_in")
    narrow = _Part("mixer_out", Kind.LINEAR, (hidden, spec.size), spec.has_bias, "mixer_out")
    return [
        wide._replace(is_converted=True),
        narrow._replace(is_converted=True),
        _Part("taps", Kind.TAPS, (spec.channels, spec.taps), spec.has_taps_bias),
        *(_Part(role, Kind.VECTOR, (spec.heads,)) for role in ("decay", "step_bias", "skip")),
        _Part("mixer_norm", Kind.VECTOR, (spec.size,)),
    ]


def _latent_parts(config: ModelConfig, spec: MLA) -> list[_Part]:
    """`attend_latent` multiplies with the dense matrices head by head."""
    hidden, heads, rank = config.hidden_size, spec.num_q_heads, spec.kv_rank

    def linear(role: str, shape: tuple[int, int], packed: Packed, **more: Any) -> _Part:
        return _Part(role, Kind.LINEAR, shape, packed=packed, is_converted=True, **more)

    rotated = 0 if spec.rope is None else spec.rope_dim
    of_queries = RowPermutation(heads, spec.head_dim, rotated, before=spec.nope_dim)
    of_row = RowPermutation(1, spec.row_dim, rotated, before=rank)
    if spec.q_rank:
        first = linear("q_a", (spec.q_rank, hidden), "qkv", has_bias=spec.has_bias)
        queries = [linear("q_b", (spec.q_size, spec.q_rank), "q_up", heads=of_queries)]
        queries.append(_Part("q_a_norm", Kind.NORM, (spec.q_rank,)))
    else:
        first, queries = linear("q", (spec.q_size, hidden), "qkv", heads=of_queries), []
    row = linear("kv_a", (spec.row_dim, hidden), "qkv", has_bias=spec.has_bias, heads=of_row)
    last = linear("output", (hidden, spec.output_size), "output", has_bias=spec.has_bias)
    shapes = [("kv_up", heads * (spec.nope_dim + spec.value_dim), rank)]
    if spec.has_split_up:
        shapes = [("k_up", heads * rank, spec.nope_dim), ("v_up", heads * spec.value_dim, rank)]
    stacked = heads if spec.has_split_up else 0
    up = [_Part(role, Kind.LINEAR, (n, k), is_dense=True, stacked=stacked) for role, n, k in shapes]
    return [first, row, *queries, *up, last, _Part("kv_a_norm", Kind.NORM, (rank,))]


def _feed_forward_parts(hidden: int, feed_forward: FeedForward) -> list[_Part]:
    match feed_forward:
        case Dense(intermediate_size=inner, has_bias=has_bias, is_gated=is_gated) as spec:
            wide = _Part("gate", Kind.LINEAR, (inner, hidden), has_bias, "gate_up")
            wide = wide._replace(shard=Shard.OUT_FEATURES, is_converted=True)
            down = _Part("down", Kind.LINEAR, (hidden, inner), has_bias, "down")
            down = down._replace(shard=Shard.IN_FEATURES, is_converted=True)
            up = wide._replace(role="up")
            has_tensors = spec.activation is Activation.XIELU and spec.activation_numbers is None
            roles = ("alpha_p", "alpha_n") if has_tensors else ()
            numbers = [_Part(role, Kind.SCALAR, (1,)) for role in roles]
            return [wide, up, down] if is_gated else [up, down, *numbers]
        case MoE() as spec:
            return _moe_parts(hidden, spec)
        case NoFeedForward():
            return []
        case _:
            raise unsupported("feed-forward part", feed_forward)


def _moe_parts(hidden: int, spec: MoE) -> list[_Part]:
    """Parts of a layer with experts that every token passes."""
    count = spec.router.num_experts
    has_bias = spec.router.bias is RouterBias.LOGITS
    parts = [_Part("router", Kind.LINEAR, (count, hidden), has_bias)]
    if spec.router.bias is RouterBias.CHOICE:
        parts.append(_Part("router_bias", Kind.ROUTER_VECTOR, (count,)))
    if spec.router.has_expert_factors:
        parts.append(_Part("expert_factors", Kind.ROUTER_VECTOR, (count,)))
    norms = ["router_norm"] if spec.router.has_norm else []
    if spec.is_beside_shared:
        norms += ["expert_norm", "expert_post_norm", "shared_post_norm"]
    parts += [_Part(role, Kind.NORM, (hidden,)) for role in norms]
    if spec.latent_size:
        narrow = (spec.latent_size, hidden)
        latent = _Part("latent_down", Kind.LINEAR, narrow, packed="latent_down", is_converted=True)
        back = latent._replace(role="latent_up", shape=narrow[::-1], packed="latent_up")
        parts += [latent, back]
    if spec.shared is None:
        return parts
    inner = spec.shared.intermediate_size
    wide = _Part("shared_gate", Kind.LINEAR, (inner, hidden), packed="shared_gate_up")
    wide = wide._replace(shard=Shard.OUT_FEATURES, is_converted=True)
    down = _Part("shared_down", Kind.LINEAR, (hidden, inner), packed="shared_down")
    down = down._replace(shard=Shard.IN_FEATURES, is_converted=True)
    parts += [*([wide] if spec.is_gated else []), wide._replace(role="shared_up"), down]
    if spec.shared.is_gated:
        parts.append(_Part("shared_router", Kind.LINEAR, (1, hidden)))
    return parts


def _expert_rows(
    config: ModelConfig, layer: int, forms: tuple[FileForm, FileForm]
) -> list[list[ModuleRow]]:
    """Rows of each expert of a layer."""
    spec = config.layers[layer].feed_forward
    if not isinstance(spec, MoE):
        return []
    parts, count = _expert_parts(config.hidden_size, spec), spec.router.num_experts
    return [_rows(parts, forms, Owner(layer, index, count)) for index in range(count)]


def _surplus_row(spec: MoE, hidden: int, layer: int, forms: tuple[FileForm, FileForm]) -> ModuleRow:
    """A row of the expert after the last one. Tensors of all experts are not among its places."""
    count = spec.router.num_experts
    row = _rows(_expert_parts(hidden, spec), forms, Owner(layer, count, count))[0]
    safetensors, gguf = (
        tuple(place for place in places if not place.experts)
        for places in (row.safetensors, row.gguf)
    )
    return replace(row, safetensors=safetensors, gguf=gguf)


def _expert_parts(hidden: int, spec: MoE) -> list[_Part]:
    hidden = spec.latent_size or hidden
    wide = _Part(
        *("expert_gate", Kind.LINEAR, (spec.intermediate_size, hidden), spec.has_bias),
        packed="expert_gate_up",
        shard=Shard.OUT_FEATURES,
        is_converted=True,
    )
    down = _Part(
        *("expert_down", Kind.LINEAR, (hidden, spec.intermediate_size), spec.has_bias),
        packed="expert_down",
        shard=Shard.IN_FEATURES,
        is_converted=True,
    )
    return [*([wide] if spec.is_gated else []), wide._replace(role="expert_up"), down]


def _rows(
    parts: Sequence[_Part],
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
            safetensors, gguf = (places_of(wanted, num_rows, form, owner) for form in forms)
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
