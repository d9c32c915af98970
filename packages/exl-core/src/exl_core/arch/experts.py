"""Reads the experts of each layer, from `config.json` or from the metadata of a GGUF file, and
changes the number that a token uses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from exl_core.arch.fields import MAX_EXPERTS, MAX_INTERMEDIATE_SIZE, Fields
from exl_core.arch.layers import LayerSpec, MoE, Router, RouterBias, Scores, SharedExpert
from exl_core.arch.spec import ArchSpec, ExpertForm
from exl_core.errors import ConfigError, RequestError, UnsupportedModelError

GATING_FUNCTIONS = {1: Scores.SOFTMAX, 2: Scores.SIGMOID}
"""`expert_gating_func` of GGUF files."""
ROUTER_BIAS = ".exp_probs_b.bias"
"""End of the names of tensors with the numbers added to the scores that choose experts."""
LAYER_KINDS = {"sparse": True, "dense": False}
"""Entries of `mlp_layer_types`."""


def hf_experts(arch: ArchSpec, text: Fields, layers: int) -> Sequence[MoE | None]:
    """Experts of each layer; None for a dense layer."""
    form = arch.experts
    if form is None or (form.flag_key is not None and not text.flag(form.flag_key, False)):
        return [None] * layers
    keys = form.num_experts_keys
    if form.is_optional and not any(text.values.get(key) for key in keys):
        return [None] * layers
    has_groups = form.has_groups and text.values.get("topk_method") != "greedy"
    count = text.integer(next((key for key in keys if text.has(key)), keys[0]), high=MAX_EXPERTS)
    router = Router(
        num_experts=count,
        top_k=text.integer(form.top_k_key, form.top_k_default, high=MAX_EXPERTS),
        scores=form.scores,
        bias=form.bias,
        groups=text.integer("n_group", 1, high=MAX_EXPERTS) if has_groups else 1,
        kept_groups=text.integer("topk_group", 1, high=MAX_EXPERTS) if has_groups else 1,
        group_scores=form.group_scores,
        normalizes=_normalizes(form, text),
        eps=form.eps,
        factor=_factor(form, text),
        has_norm=form.has_router_norm,
        has_expert_factors=form.has_expert_factors,
    )
    size = text.integer(form.size_key, form.size_default, high=MAX_INTERMEDIATE_SIZE)
    check_router(router, text.where)
    latent_size = _latent_size(form, text)
    part = _part(arch, router, size, _shared_size(form, text, size), latent_size)
    return [part if is_sparse else None for is_sparse in _sparse_layers(form, text, layers)]


def _part(arch: ArchSpec, router: Router, size: int, shared_size: int, latent_size: int) -> MoE:
    """Experts of width `size`, with a shared one of width `shared_size` if that is not 0."""
    form = arch.experts
    assert form is not None, "the caller has checked it"
    shared = SharedExpert(shared_size, form.has_shared_gate) if shared_size else None
    return MoE(
        router,
        size,
        arch.activation,
        shared,
        weighs_inputs=form.weighs_inputs,
        has_bias=form.has_bias,
        is_gated=arch.has_gated_mlp,
        latent_size=latent_size,
    )


def _shared_size(form: ExpertForm, text: Fields, size: int) -> int:
    """Width of the shared expert; 0 if there is none."""
    if form.shared_size_key is not None:
        return text.integer(form.shared_size_key, low=0, high=MAX_INTERMEDIATE_SIZE)
    if form.shared_count_key is None:
        return 0
    count = text.integer(form.shared_count_key, form.shared_count_default, low=0, high=MAX_EXPERTS)
    return count * size


def _latent_size(form: ExpertForm, fields: Fields) -> int:
    """Width of the experts' inputs and outputs; 0 if it is the hidden size. Both kinds of files
    have the same key."""
    key = form.latent_size_key
    if key is None or not fields.has(key):
        return 0
    return fields.integer(key, high=MAX_INTERMEDIATE_SIZE)


def _normalizes(form: ExpertForm, text: Fields) -> bool:
    key = form.norm_power_key
    if key is not None and key in text.values:
        power = text.optional_number(key)
        if power not in (None, 1.0):
            raise UnsupportedModelError(
                f"weights of experts with this {key!r} are not supported",
                where=text.where,
                expected="1 or null",
                got=power,
            )
        return power is not None
    if form.normalizes is not None:
        return form.normalizes
    return text.flag("norm_topk_prob", form.normalizes_default)


def _factor(form: ExpertForm, text: Fields) -> float:
    if form.factor_default is None:
        return 1.0
    return text.number("routed_scaling_factor", form.factor_default)


def _sparse_layers(form: ExpertForm, text: Fields, layers: int) -> Sequence[bool]:
    """Whether each layer has experts, by whichever keys the configuration has."""
    if text.has("mlp_layer_types"):
        kinds = text.strings("mlp_layer_types")
        if len(kinds) != layers or set(kinds) - LAYER_KINDS.keys():
            raise ConfigError(
                "'mlp_layer_types' does not describe the layers",
                where=text.where,
                expected=f"{layers} of {', '.join(LAYER_KINDS)}",
                got=f"{len(kinds)}, {', '.join(sorted(set(kinds)))}"[:80],
            )
        return [LAYER_KINDS[kind] for kind in kinds]
    if text.has("moe_layers"):
        sparse = text.integers("moe_layers")
        return [layer in sparse for layer in range(layers)]
    dense = text.integers("mlp_only_layers") if text.has("mlp_only_layers") else ()
    steps = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
    step = text.integer(next((key for key in steps if text.has(key)), steps[0]), 1)
    key = "moe_layer_start_index" if text.has("moe_layer_start_index") else "first_k_dense_replace"
    first = text.integer(key, form.first_sparse_default, low=0)
    last = text.integer("moe_layer_end_index", -1, low=-1)
    end = layers if last == -1 else last + 1
    return [
        first <= layer < end and layer not in dense and (layer + 1) % step == 0
        for layer in range(layers)
    ]


def gguf_experts(
    arch: ArchSpec, own: Fields, tensor_names: Collection[str], layers: int
) -> Sequence[MoE | None]:
    """Experts of each layer; None for a layer without a router."""
    form = arch.experts
    if form is None:
        return [None] * layers
    may_be_dense = form.flag_key is not None or form.is_optional
    if may_be_dense and own.values.get("expert_count") in (None, 0):
        return [None] * layers
    _refuse_unread_bias(form, tensor_names, own.where)
    key = "expert_feed_forward_length"
    size = own.integer(key if own.has(key) else "feed_forward_length", high=MAX_INTERMEDIATE_SIZE)
    router = Router(
        num_experts=own.integer("expert_count", high=MAX_EXPERTS),
        top_k=own.integer("expert_used_count", high=MAX_EXPERTS),
        scores=_gguf_scores(form, own),
        bias=form.bias,
        groups=own.integer("expert_group_count", 1, high=MAX_EXPERTS),
        kept_groups=own.integer("expert_group_used_count", 1, high=MAX_EXPERTS),
        group_scores=form.group_scores,
        normalizes=own.flag("expert_weights_norm", form.gguf_normalizes),
        eps=form.eps,
        factor=own.number("expert_weights_scale", form.factor_default or 1.0),
        has_norm=form.has_router_norm,
        has_expert_factors=form.has_expert_factors,
    )
    check_router(router, own.where)
    names = arch.gguf
    shared = own.integer("expert_shared_feed_forward_length", 0, low=0, high=MAX_INTERMEDIATE_SIZE)
    if not shared:
        is_equal = form.shared_size_key == form.size_key
        count = own.integer("expert_shared_count", int(is_equal), low=0, high=MAX_EXPERTS)
        shared = size * count
    part = _part(arch, router, size, shared, _latent_size(form, own))
    return [
        part if names.is_stored("router", "weight", tensor_names, layer) else None
        for layer in range(layers)
    ]


def _refuse_unread_bias(form: ExpertForm, tensor_names: Collection[str], where: object) -> None:
    """Refuses biases of the scores in a file whose metadata say that there are none."""
    found = next((name for name in tensor_names if name.endswith(ROUTER_BIAS)), None)
    if form.bias is not RouterBias.CHOICE and found is not None:
        raise UnsupportedModelError(
            f"the file has {found!r}, which its 'expert_gating_func' does not use",
            where=where,
            next_step="Files of GLM-4.7-Flash of January 2026 may be so: get a later one.",
        )


def _gguf_scores(form: ExpertForm, own: Fields) -> Scores:
    if not own.has("expert_gating_func"):
        return form.scores
    found = own.integer("expert_gating_func", low=0)
    if found not in GATING_FUNCTIONS:
        raise UnsupportedModelError(
            "the router's scores are not supported",
            where=own.where,
            expected="'expert_gating_func' of 1 (softmax) or 2 (sigmoid)",
            got=found,
        )
    return GATING_FUNCTIONS[found]


def check_router(router: Router, where: object) -> None:
    """Raises `ConfigError` for numbers that no router can have."""
    if router.top_k > router.num_experts:
        raise ConfigError(
            "each token uses more experts than the model has",
            where=where,
            expected=f"at most {router.num_experts}",
            got=router.top_k,
        )
    size, rest = divmod(router.num_experts, router.groups)
    if rest or router.kept_groups > router.groups or router.kept_groups * size < router.top_k:
        raise ConfigError(
            "the experts cannot be divided into groups like this",
            where=where,
            expected=f"groups of equal size, with {router.top_k} experts in those that are kept",
            got=f"{router.num_experts} experts, {router.kept_groups} of {router.groups} groups",
        )


def with_experts_per_token(layers: Sequence[LayerSpec], count: int) -> tuple[LayerSpec, ...]:
    """The layers with `count` experts per token. Raises RequestError if no layer has experts, or if
    one has too few."""
    parts = [layer.feed_forward for layer in layers]
    sizes = [_choosable(part.router) for part in parts if isinstance(part, MoE)]
    if not sizes:
        raise RequestError("the model has no experts", expected="no --experts-per-token", got=count)
    if not 1 <= count <= min(sizes):
        raise RequestError(
            "a token cannot use so many experts", expected=f"1 to {min(sizes)}", got=count
        )
    return tuple(
        replace(layer, feed_forward=replace(part, router=replace(part.router, top_k=count)))
        if isinstance(part, MoE)
        else layer
        for layer, part in zip(layers, parts, strict=True)
    )


def _choosable(router: Router) -> int:
    """Experts of the groups that are kept."""
    return router.num_experts // router.groups * router.kept_groups
