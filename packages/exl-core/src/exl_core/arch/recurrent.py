"""Reads the recurrent layers of a model, from `config.json` or from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from exl_core.arch.fields import (
    LARGEST,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INTERMEDIATE_SIZE,
    Fields,
)
from exl_core.arch.layers import GatedDeltaNet, KimiDeltaNet, Mamba2, Mixer, ShortConv
from exl_core.arch.spec import ArchSpec, Recurrence
from exl_core.errors import ConfigError

MAX_TAPS = 64
LEAST_STEP = 0.001  # default of `time_step_min`
PAIR = 2
ATTENTION_TYPES = ("full_attention", "attention")
RECURRENT_TYPES = {
    Recurrence.SHORT_CONV: ("conv",),
    Recurrence.DELTA_NET: ("linear_attention",),
    Recurrence.KIMI_DELTA: ("linear_attention",),
    Recurrence.MAMBA2: ("linear_attention", "mamba"),
}
"""Entries of `layer_types` for recurrent layers."""
ATTENTION_INTERVAL = 4  # default of Qwen3-Next and Qwen3.5
INTERMEDIATE_STEP = 256  # LFM2's default of `block_multiple_of`


def hf_recurrent(arch: ArchSpec, text: Fields, layers: int) -> Sequence[Mixer | None]:
    """Mixer of each recurrent layer; None for a layer of attention."""
    if arch.recurrence is Recurrence.NONE:
        return [None] * layers
    mixer = _hf_mixer(arch, text)
    if arch.has_single_parts:  # `arch/blocks.py` reads where it is
        return [mixer] * layers
    return [mixer if found else None for found in _is_recurrent(arch, text, layers)]


def _is_recurrent(arch: ArchSpec, text: Fields, layers: int) -> list[bool]:
    if not text.has("layer_types") and arch.recurrence is Recurrence.DELTA_NET:
        return _between_attention(text, layers)
    if not text.has("layer_types") and arch.recurrence is Recurrence.KIMI_DELTA:
        listed = text.nested("linear_attn_config").integers("kda_layers")  # counted from 1
        return [layer + 1 in listed for layer in range(layers)]
    if not text.has("layer_types"):
        if not text.has("full_attn_idxs"):
            return [False] * layers
        full = text.integers("full_attn_idxs")
        if max(full, default=0) >= layers:
            raise ConfigError(
                "'full_attn_idxs' names a layer that the model does not have",
                where=text.where,
                expected=f"indices below {layers}",
                got=max(full),
            )
        return [layer not in full for layer in range(layers)]
    names, known = text.strings("layer_types"), RECURRENT_TYPES[arch.recurrence]
    unknown = sorted(set(names) - {*known, *ATTENTION_TYPES})
    if unknown or len(names) != layers:
        raise ConfigError(
            "'layer_types' does not describe the layers",
            where=text.where,
            expected=f"{layers} of {', '.join((*known, *ATTENTION_TYPES))}",
            got=f"{len(names)}, {', '.join(unknown) or 'all known'}",
        )
    return [name in known for name in names]


def _hf_mixer(arch: ArchSpec, text: Fields) -> Mixer:
    if arch.recurrence is Recurrence.DELTA_NET:
        return _checked_delta_net(
            GatedDeltaNet(
                key_heads=text.integer("linear_num_key_heads", 16, high=MAX_HEADS),
                value_heads=text.integer("linear_num_value_heads", 32, high=MAX_HEADS),
                key_dim=text.integer("linear_key_head_dim", 128, high=MAX_HEAD_DIM),
                value_dim=text.integer("linear_value_head_dim", 128, high=MAX_HEAD_DIM),
                taps=text.integer("linear_conv_kernel_dim", 4, low=2, high=MAX_TAPS),
            ),
            text.where,
        )
    if arch.recurrence is Recurrence.KIMI_DELTA:
        return KimiDeltaNet(
            text.integer("linear_num_heads", 32, high=MAX_HEADS),
            text.integer("linear_head_dim", 128, high=MAX_HEAD_DIM),
            text.integer("linear_conv_kernel_dim", 4, low=2, high=MAX_TAPS),
        )
    size = text.integer("hidden_size", arch.hidden_size_default, high=MAX_HIDDEN_SIZE)
    if arch.recurrence is Recurrence.MAMBA2:
        return _hf_mamba2(arch, text, size)
    taps = text.integer("conv_L_cache", 3, low=2, high=MAX_TAPS)
    return ShortConv(size, taps, text.flag("conv_bias", False))


def _hf_mamba2(arch: ArchSpec, text: Fields, hidden_size: int) -> Mamba2:
    heads = text.integer("mamba_n_heads", 128, high=MAX_HEADS)
    width = text.integer("mamba_expand", 2, high=MAX_TAPS) * hidden_size
    key = "mamba_d_head"
    is_stated = isinstance(text.values.get(key), int)
    head_dim = text.integer(key, high=MAX_HEAD_DIM) if is_stated else width // heads
    if arch.has_single_parts:
        width = heads * head_dim  # it is not a multiple of the hidden size
    mixer = Mamba2(
        heads,
        head_dim,
        text.integer("mamba_d_state", 256, high=MAX_HEAD_DIM),
        text.integer("mamba_n_groups", 1, high=MAX_HEADS),
        text.integer("mamba_d_conv", 4, low=2, high=MAX_TAPS),
        has_bias=text.flag("mamba_proj_bias", False),
        has_taps_bias=text.flag("mamba_conv_bias", True),
        steps=_steps(arch, text),
    )
    return _checked_mamba2(mixer, width, text.where)


def _steps(arch: ArchSpec, text: Fields) -> tuple[float, float | None]:
    """Least and largest step of the state: `time_step_limit`, or the family's key of the least."""
    if arch.least_step_key is not None:
        return text.number(arch.least_step_key, LEAST_STEP), None
    limits = text.values.get("time_step_limit")
    if limits is None:
        return 0.0, None
    found = [_limit(value) for value in limits] if isinstance(limits, list) else []
    if len(found) != PAIR or not 0.0 <= found[0] < found[1]:
        raise ConfigError(
            "'time_step_limit' has no usable value",
            where=text.where,
            expected="two numbers from 0 on, the smaller one first",
            got=str(limits)[:80],
        )
    least, largest = found
    return least, None if math.isinf(largest) else largest


def _limit(value: object) -> float:
    """A number of at most `LARGEST`, or infinity, which transformers writes as an object. NaN for
    anything else."""
    if value in ({"__float__": "Infinity"}, math.inf):
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if 0 <= value <= LARGEST else math.nan


def _between_attention(fields: Fields, layers: int) -> list[bool]:
    """Layers between those of attention, which come at an interval."""
    interval = fields.integer("full_attention_interval", ATTENTION_INTERVAL)
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _checked_delta_net(mixer: GatedDeltaNet, where: object) -> GatedDeltaNet:
    if mixer.value_heads % mixer.key_heads:
        raise ConfigError(
            "the value heads of a gated delta net cannot be shared out among its key heads",
            where=where,
            got=f"{mixer.value_heads} value heads, {mixer.key_heads} key heads",
        )
    return mixer


def rounded_intermediate_size(text: Fields, size: int) -> int:
    """Width of LFM2's MLP: two thirds of the number in the checkpoint, times a factor, rounded up
    to a multiple."""
    if not text.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if text.has("block_ffn_dim_multiplier"):
        size = int(text.number("block_ffn_dim_multiplier") * size)
    step = text.integer("block_multiple_of", INTERMEDIATE_STEP)
    size = -(-size // step) * step
    if not 0 < size <= MAX_INTERMEDIATE_SIZE:
        raise ConfigError(
            "the width of the MLP is impossible",
            where=text.where,
            expected=f"from 1 to {MAX_INTERMEDIATE_SIZE}",
            got=f"{size:.3g}, from 'block_ffn_dim_multiplier' and 'block_multiple_of'",
        )
    return size


def gguf_recurrent(
    arch: ArchSpec, own: Fields, tensor_names: Collection[str], kv_heads: Sequence[int]
) -> Sequence[Mixer | None]:
    """Mixer of each recurrent layer, which files give no key heads; None for one of attention."""
    if arch.recurrence is Recurrence.NONE:
        return [None] * len(kv_heads)
    if arch.recurrence is Recurrence.DELTA_NET:
        mixer = _gguf_delta_net(arch, own)
        between = _between_attention(own, len(kv_heads))
        return [mixer if is_recurrent else None for is_recurrent in between]
    recurrent: Mixer
    if arch.recurrence is Recurrence.MAMBA2:
        layers = range(len(kv_heads))
        first = next((i for i in layers if _is_stored(arch, "mixer_in", tensor_names, i)), 0)
        recurrent = _gguf_mamba2(arch, own, tensor_names, first)
    else:
        size = own.integer("embedding_length", high=MAX_HIDDEN_SIZE)
        recurrent = ShortConv(size, own.integer("shortconv.l_cache", low=2, high=MAX_TAPS))
    if arch.has_single_parts:  # `arch/blocks.py` reads where it is
        return [recurrent] * len(kv_heads)
    return [None if heads else recurrent for heads in kv_heads]


def _is_stored(arch: ArchSpec, role: str, tensor_names: Collection[str], layer: int) -> bool:
    return arch.gguf.is_stored(role, "weight", tensor_names, layer)


def _gguf_mamba2(arch: ArchSpec, own: Fields, tensor_names: Collection[str], layer: int) -> Mamba2:
    """Numbers of Mamba-2. `layer` is one of its layers. The format has no limits of the step."""
    heads = own.integer("ssm.time_step_rank", high=MAX_HEADS)
    width = own.integer("ssm.inner_size", high=MAX_HEADS * MAX_HEAD_DIM)
    groups = own.integer("ssm.group_count", high=MAX_HEADS)
    mixer = Mamba2(
        heads,
        max(1, width // heads),
        own.integer("ssm.state_size", high=MAX_HEAD_DIM),
        groups,
        own.integer("ssm.conv_kernel", low=2, high=MAX_TAPS),
        has_bias=arch.gguf.is_stored("mixer_in", "bias", tensor_names, layer),
        has_taps_bias=arch.gguf.is_stored("taps", "bias", tensor_names, layer),
    )
    return _checked_mamba2(mixer, width, own.where)


def _checked_mamba2(mixer: Mamba2, width: int, where: object) -> Mamba2:
    """Raises ConfigError if the heads are not as wide as `width`, or do not form groups."""
    if mixer.size != width or mixer.heads % mixer.groups:
        raise ConfigError(
            "the heads of Mamba-2 do not fit its width, or cannot be divided into groups",
            where=where,
            got=f"{mixer.heads} heads of {mixer.head_dim}, width {width}, {mixer.groups} groups",
        )
    return mixer


def _gguf_delta_net(arch: ArchSpec, own: Fields) -> GatedDeltaNet:
    value_heads = own.integer("ssm.time_step_rank", high=MAX_HEADS)
    inner = own.integer("ssm.inner_size", high=MAX_HEADS * MAX_HEAD_DIM)
    if inner % value_heads:
        raise ConfigError(
            "the values of a gated delta net cannot be shared out among its heads",
            where=own.where,
            got=f"{inner} values, {value_heads} heads",
        )
    mixer = GatedDeltaNet(
        key_heads=own.integer("ssm.group_count", high=MAX_HEADS),
        value_heads=value_heads,
        key_dim=own.integer("ssm.state_size", high=MAX_HEAD_DIM),
        value_dim=inner // value_heads,
        taps=own.integer("ssm.conv_kernel", low=2, high=MAX_TAPS),
        is_tiled=arch.has_tiled_gguf,
    )
    return _checked_delta_net(mixer, own.where)
