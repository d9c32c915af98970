"""Names and storage of tensors in files, as data: one `FileForm` per family and kind of file.

A tensor is identified by its role (`q`, `attention_norm`, `gate`), which is the same in all
families. A `FileForm` says under which names a kind of file stores the roles, which of them are
fused into one tensor, in which order it has the rows of rotated heads, and how it stores norms.
`arch/modules.py` turns the forms of a family into the places of each tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Fused:
    """A stored tensor that consists of the rows of several roles of one layer, in order.

    If `is_grouped`, the roles are q, k and v, and the order repeats for each key head: the query
    heads that share it, the key head, the value head. If `is_bare`, the name has no `.weight`, and
    that of the biases ends in `_bias`. If `is_interleaved`, the first rows of all roles come first,
    then the second ones. If `is_by_head`, the rows of the first head of all roles come first.
    """

    name: str
    roles: tuple[str, ...]
    is_grouped: bool = False
    is_bare: bool = False
    is_interleaved: bool = False
    is_by_head: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FileForm:
    """Names and storage of a family's tensors in one kind of file.

    roots           prefixes of names outside the layers and of `layer`; the first is canonical
    layer           prefix of the names within a layer, after the root
    other_layers    other prefixes of the names within a layer, which some files have
    names           name of each role after these prefixes, without `.weight` or `.bias`; {} in it
                    is the index of an expert. A tensor of an expert's role without {} in its name
                    holds all experts of the layer, one after the other
    aliases         other names of roles, which some files use instead
    fused           fused tensors, which take precedence over separate ones
    is_interleaved  rotated heads store RoPE pairs as rows 2i and 2i + 1, not i and i + rotary_dim/2
    norm_addend     number to add to the stored norm weights
    transposed      names of matrices that are stored as [in_features, out_features] (codes are not)
    transposable    names of matrices that some files store so
    bare            roles, or names of them, that have no `.weight` after the name, and `_bias`
                    instead of `.bias`
    decays          roles that the file stores as -exp(value)
    """

    names: Mapping[str, str]
    roots: tuple[str, ...] = ("",)
    layer: str = "layers.{}."
    other_layers: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused: tuple[Fused, ...] = ()
    is_interleaved: bool = False
    norm_addend: float = 0.0
    bare: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    transposable: tuple[str, ...] = ()
    decays: tuple[str, ...] = ()

    def stems(self, role: str) -> list[str]:
        """Names of a tensor of its own, the canonical one first."""
        canonical = [self.names[role]] if role in self.names else []
        return [*canonical, *self.aliases.get(role, ())]

    def prefixes(self, layer: int | None) -> list[str]:
        """Prefixes of the names in a layer, or outside the layers; the canonical one first."""
        if layer is None:
            return list(self.roots)
        insides = (self.layer, *self.other_layers)
        return [f"{root}{inside.format(layer)}" for inside in insides for root in self.roots]

    def is_stored(
        self, role: str, suffix: str, tensor_names: Collection[str], layer: int | None = None
    ) -> bool:
        """Whether a file with these tensors has the weight or bias of a role, alone or fused."""
        stems = [fused.name for fused in self.fused if role in fused.roles and layer is not None]
        stems += self.stems(role)
        return any(
            f"{prefix}{stem}.{suffix}" in tensor_names
            for prefix in self.prefixes(layer)
            for stem in stems
        )


@dataclass(frozen=True, slots=True, eq=False)
class PredictingForm:
    """Names of a layer for multi-token prediction in a family's checkpoints.

    roots   prefixes of the names; the first is canonical
    layer   prefix after the root. {} in it is the number of the model's layers
    inside  prefix after that, of the parts that every layer has
    names   names of the other parts after `layer`, by role
    """

    roots: tuple[str, ...]
    layer: str
    inside: str
    names: Mapping[str, str]


NEXTN = PredictingForm(
    roots=("model.", "language_model.model.", "model.language_model."),
    layer="layers.{}.",
    inside="",
    names={
        "mtp_join": "eh_proj",
        "mtp_embed_norm": "enorm",
        "mtp_state_norm": "hnorm",
        "mtp_norm": "shared_head.norm",
        "mtp_embed": "embed_tokens",
        "mtp_head": "shared_head.head",
    },
)
"""The layer after the last one, in checkpoints of DeepSeek V3, GLM and their relatives."""

GGUF_NEXTN = PredictingForm(
    roots=("",),
    layer="blk.{}.",
    inside="",
    names={
        "mtp_join": "nextn.eh_proj",
        "mtp_embed_norm": "nextn.enorm",
        "mtp_state_norm": "nextn.hnorm",
        "mtp_norm": "nextn.shared_head_norm",
        "mtp_embed": "nextn.embed_tokens",
        "mtp_head": "nextn.shared_head_head",
    },
)
"""The layer after the last one, in GGUF files of all families."""


def predicting(form: FileForm, own: PredictingForm, num_layers: int) -> FileForm:
    """The form of a layer for multi-token prediction in files of `form`."""

    def inside(name: str) -> str:
        return own.inside + name

    return replace(
        form,
        roots=own.roots,
        layer=own.layer.format(num_layers),
        other_layers=(),
        names={**{role: inside(name) for role, name in form.names.items()}, **own.names},
        aliases={role: tuple(map(inside, names)) for role, names in form.aliases.items()},
        fused=tuple(replace(fused, name=inside(fused.name)) for fused in form.fused),
        transposed=tuple(map(inside, form.transposed)),
        transposable=tuple(map(inside, form.transposable)),
        bare=(*form.bare, *map(inside, form.bare)),
    )


_HF_NAMES = {
    "embed": "embed_tokens",
    "final_norm": "norm",
    "head": "lm_head",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{}.gate_proj",
    "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
    "router_bias": "mlp.gate.e_score_correction_bias",
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_up": "self_attn.kv_b_proj",
    "k_up": "self_attn.k_b_proj",
    "v_up": "self_attn.v_b_proj",
}
_GGUF_NAMES = {
    "embed": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "output": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "router": "ffn_gate_inp",
    "expert_gate": "ffn_gate_exps",
    "expert_up": "ffn_up_exps",
    "expert_down": "ffn_down_exps",
    "router_bias": "exp_probs_b.bias",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
    "shared_router": "ffn_gate_inp_shexp",
    "q_a": "attn_q_a",
    "q_a_norm": "attn_q_a_norm",
    "q_b": "attn_q_b",
    "kv_a": "attn_kv_a_mqa",
    "kv_a_norm": "attn_kv_a_norm",
    "kv_up": "attn_kv_b",
    "k_up": "attn_k_b",
    "v_up": "attn_v_b",
}
_FUSED = (
    Fused("self_attn.qkv_proj", ("q", "k", "v")),
    Fused("mlp.gate_up_proj", ("gate", "up")),
)

MAMBA2_GGUF_NAMES = {
    "mixer_in": "ssm_in",
    "taps": "ssm_conv1d",
    "decay": "ssm_a",
    "step_bias": "ssm_dt.bias",
    "skip": "ssm_d",
    "mixer_norm": "ssm_norm",
    "mixer_out": "ssm_out",
}

MULTIMODAL_ROOTS = ("model.", "language_model.model.", "model.language_model.")
"""Roots of a language model alone, and of one that is part of a multimodal model."""

HF = FileForm(_HF_NAMES, roots=("model.",), fused=_FUSED, bare=("router_bias",))
"""Checkpoints of Llama and of most families. All readers accept fused projections (Phi-3)."""

HF_SANDWICH = FileForm(
    {
        **_HF_NAMES,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    roots=("model.",),
    fused=_FUSED,
)

HF_POST = FileForm(
    {
        **{role: name for role, name in _HF_NAMES.items() if not role.endswith("_norm")},
        "final_norm": "norm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    roots=("model.",),
    fused=_FUSED,
)

GGUF = FileForm(_GGUF_NAMES, layer="blk.{}.", bare=("router_bias",))

GGUF_SANDWICH = FileForm(
    {
        **_GGUF_NAMES,
        "attention_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
    },
    layer="blk.{}.",
)
