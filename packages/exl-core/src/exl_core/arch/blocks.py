"""Reads the kinds of the layers of models whose layers have one part only (Nemotron-H).

`config.json` has a list of names (`layers_block_type`), or a string of letters
(`hybrid_override_pattern`). GGUF files have the numbers of key heads and the widths of the layers,
of which at most one is above 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from exl_core.arch.fields import MAX_LAYERS, Fields
from exl_core.arch.spec import LayerNumbers
from exl_core.errors import ConfigError


class Block(Enum):
    """The part of a layer."""

    RECURRENT = "recurrent"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"


LETTERS = {"M": Block.RECURRENT, "*": Block.ATTENTION, "-": Block.MLP, "E": Block.EXPERTS}
NAMES = {
    "mamba": Block.RECURRENT,
    "linear_attention": Block.RECURRENT,
    "attention": Block.ATTENTION,
    "full_attention": Block.ATTENTION,
    "mlp": Block.MLP,
    "moe": Block.EXPERTS,
}
LIST_KEY, PATTERN_KEY = "layers_block_type", "hybrid_override_pattern"


def hf_blocks(text: Fields) -> list[Block]:
    """The part of each layer."""
    key = LIST_KEY if text.has(LIST_KEY) else PATTERN_KEY
    is_list = key == LIST_KEY
    known = NAMES if is_list else LETTERS
    names = text.strings(key) if is_list else list(text.text(key))
    unknown = sorted(set(names) - known.keys())
    if unknown or not 0 < len(names) <= MAX_LAYERS:
        raise ConfigError(
            f"{key!r} does not describe the layers",
            where=text.where,
            expected=f"1 to {MAX_LAYERS} of {', '.join(known)}",
            got=f"{len(names)}, {', '.join(unknown) or 'all known'}"[:80],
        )
    return [known[name] for name in names]


def gguf_blocks(
    own: Fields, kv_heads: Sequence[int], widths: Sequence[int], *, has_experts: bool
) -> list[Block]:
    """The part of each layer, by its number of key heads and the width of its feed-forward part."""
    if any(heads and width for heads, width in zip(kv_heads, widths, strict=True)):
        raise ConfigError(
            "a layer has both attention and a feed-forward part",
            where=own.where,
            expected="'attention.head_count_kv' or 'feed_forward_length' of 0 in each layer",
        )
    wide = Block.EXPERTS if has_experts else Block.MLP
    return [
        Block.ATTENTION if heads else wide if width else Block.RECURRENT
        for heads, width in zip(kv_heads, widths, strict=True)
    ]


def as_blocks(numbers: Sequence[LayerNumbers], blocks: Sequence[Block]) -> list[LayerNumbers]:
    """The numbers of layers of which each has only the part that `blocks` says."""
    return [
        replace(
            one,
            has_mixer=block in (Block.RECURRENT, Block.ATTENTION),
            has_feed_forward=block in (Block.MLP, Block.EXPERTS),
            recurrent=one.recurrent if block is Block.RECURRENT else None,
            experts=one.experts if block is Block.EXPERTS else None,
        )
        for one, block in zip(numbers, blocks, strict=True)
    ]
