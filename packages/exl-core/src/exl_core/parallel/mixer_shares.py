"""Rows that one rank has of the tensors of a mixer: those of its heads or channels.

A tensor that belongs to no head is whole on every rank: latent vectors and their norms, the inner
vectors of Kimi-Linear's decays and gates, and norms whose factors all heads share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.arch.layers import (
    MLA,
    Attention,
    GatedDeltaNet,
    KimiDeltaNet,
    Mamba2,
    Mixer,
    ShortConv,
)
from exl_core.arch.modules import Kind, ModuleRow
from exl_core.arch.parts import KIMI_TAPS
from exl_core.parallel.plan import (
    Rank,
    channel_share,
    delta_share,
    even_heads,
    head_share,
    latent_heads,
    scan_share,
)


def mixer_rows(spec: Mixer, row: ModuleRow, rank: Rank) -> Tensor | None:
    """The rank's rows of a tensor of a mixer, int64, ascending, or its input features of the last
    matrix. None for a tensor that is whole on every rank."""
    match spec:
        case Attention():
            found = _attention_rows(spec, row, rank)
        case MLA():
            found = _latent_rows(spec, row, rank)
        case GatedDeltaNet():
            found = _delta_rows(spec, row, rank)
        case KimiDeltaNet():
            found = _kimi_rows(spec, row, rank)
        case Mamba2():
            found = _scan_rows(spec, row, rank)
        case ShortConv():
            found = _channel_rows(spec, row, rank)
        case _:
            return None
    return found.get(row.role)


def _attention_rows(spec: Attention, row: ModuleRow, rank: Rank) -> dict[str, Tensor]:
    heads, dim = head_share(spec, rank), spec.head_dim
    q, kv = of_heads(heads.q, dim), of_heads(heads.kv, dim)
    found = {"q": q, "q_gate": q, "output": q, "k": kv, "v": kv, "sinks": _indices(heads.q)}
    if row.kind is Kind.NORM:  # with factors of all heads
        found |= {"q_norm": q, "k_norm": kv}
    return found


def _latent_rows(spec: MLA, _: ModuleRow, rank: Rank) -> dict[str, Tensor]:
    heads = latent_heads(spec, rank)
    sizes = {
        **{"q": spec.head_dim, "q_b": spec.head_dim},
        **{"kv_up": spec.nope_dim + spec.value_dim, "k_up": spec.kv_rank},
        **{"v_up": spec.value_dim, "output": spec.value_dim},
    }
    return {role: of_heads(heads, size) for role, size in sizes.items()}


def _delta_rows(spec: GatedDeltaNet, _: ModuleRow, rank: Rank) -> dict[str, Tensor]:
    heads = delta_share(spec, rank)
    numbers = _indices(heads.q)
    if spec.is_tiled:  # value head t * key_heads + k is the one numbered t of key head k
        shared = spec.value_heads // spec.key_heads
        numbers = (numbers % shared * spec.key_heads + numbers // shared).sort().values
    keys, values = of_heads(heads.kv, spec.key_dim), _spread(numbers, spec.value_dim)
    return {
        **{"delta_q": keys, "delta_k": keys, "delta_v": values, "delta_z": values},
        **{"delta_b": numbers, "delta_a": numbers, "mixer_out": values},
        "taps": _side_by_side((keys, keys, values), (spec.key_size, spec.key_size)),
        **{"decay": numbers, "step_bias": numbers},
    }


def _kimi_rows(spec: KimiDeltaNet, _: ModuleRow, rank: Rank) -> dict[str, Tensor]:
    heads = even_heads(spec.heads, rank)
    wide, numbers = of_heads(heads, spec.head_dim), _indices(heads)
    roles = ("delta_q", "delta_k", "delta_v", "decay_b", "delta_z_b", "mixer_out", "step_bias")
    found = dict.fromkeys((*roles, *KIMI_TAPS), wide)
    return {**found, "delta_b": numbers, "decay": numbers}


def _scan_rows(spec: Mamba2, _: ModuleRow, rank: Rank) -> dict[str, Tensor]:
    heads = scan_share(spec, rank)
    numbers, wide = _indices(heads.q), of_heads(heads.q, spec.head_dim)
    vectors, size = of_heads(heads.kv, spec.state_size), spec.groups * spec.state_size
    channels = _side_by_side((wide, vectors, vectors), (spec.size, size))
    return {
        "mixer_in": _side_by_side((wide, channels, numbers), (spec.size, spec.channels)),
        **{"taps": channels, "mixer_norm": wide, "mixer_out": wide},
        **{"decay": numbers, "step_bias": numbers, "skip": numbers},
    }


def _channel_rows(spec: ShortConv, _: ModuleRow, rank: Rank) -> dict[str, Tensor]:
    own = _indices(channel_share(spec, rank))
    wide = _side_by_side((own, own, own), (spec.size, spec.size))
    return {"mixer_in": wide, "taps": own, "mixer_out": own}


def of_heads(heads: range, head_dim: int) -> Tensor:
    """Rows of consecutive heads, int64."""
    return torch.arange(heads.start * head_dim, heads.stop * head_dim)


def _spread(heads: Tensor, head_dim: int) -> Tensor:
    """Rows of these heads, int64."""
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _side_by_side(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Rows of several parts of a tensor. `sizes` are the rows of the whole parts but the last."""
    found, first = [], 0
    for own, size in zip(parts, (*sizes, 0), strict=True):
        found.append(own + first)
        first += size
    return torch.cat(found)


def _indices(part: range) -> Tensor:
    return torch.arange(part.start, part.stop)
