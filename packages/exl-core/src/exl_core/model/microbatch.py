"""Cuts a pass into microbatches, so that the stages of a split model work at the same time.

While a later stage computes one microbatch, an earlier one computes the next. Plain data, no
tensors: the runner passes the microbatches through the stages in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from exl_core.cache.format import pages_for
from exl_core.model.segment import LogitRows, Segment

MICROBATCH_ROWS = 512
"""Rows of a microbatch of prompts. Fewer rows use a GPU less well, more leave later stages idle
for longer."""

MIN_SPLIT_SEQUENCES = 128
"""Fewest sequences in decode that are divided if the host reads all tokens before the next step.
Each microbatch reads all weights, and with two of them each stage waits for half of a step. So
dividing pays only where the time of a pass grows with its rows: on two GPUs, 8 and 32 sequences
decoded at 0.58 and 0.64 of the speed of one GPU when they were divided."""

MIN_PART_SEQUENCES = 8
"""Fewest sequences in each part of a decode pass that is launched before the host has read the
tokens. Fewer take a GPU about as long as 8."""


def microbatches(
    segments: Sequence[Segment], num_stages: int, *, splits_decode: bool
) -> list[tuple[Segment, ...]]:
    """Microbatches whose logits, one after the other, are those of `segments`.

    Rows keep their order, so a sequence's earlier positions are computed first. Without
    `splits_decode` only prompts are divided.
    """
    rows = sum(len(one.token_ids) for one in segments)
    if rows > MICROBATCH_ROWS:
        return _by_rows(segments, -(-rows // -(-rows // MICROBATCH_ROWS)))
    is_decoding = rows == len(segments)
    if is_decoding and splits_decode and rows >= MIN_SPLIT_SEQUENCES:
        return _by_rows(segments, -(-rows // num_stages))
    return [tuple(segments)]


def decode_parts(segments: Sequence[Segment], num_stages: int) -> list[tuple[Segment, ...]]:
    """Parts of a decode pass, each of which is sampled by itself, so that the first stage continues
    with one part while later stages compute the others. Other passes are one part."""
    count = min(num_stages, len(segments) // MIN_PART_SEQUENCES)
    if count < 2 or any(len(one.token_ids) != 1 for one in segments):
        return [tuple(segments)]
    return _by_rows(segments, -(-len(segments) // count))


def _by_rows(segments: Sequence[Segment], most: int) -> list[tuple[Segment, ...]]:
    """Microbatches of `most` rows; the last one may have fewer."""
    found: list[tuple[Segment, ...]] = []
    current: list[Segment] = []
    free = most
    for segment in segments:
        first, count = 0, len(segment.token_ids)
        while first < count:
            last = min(first + free, count)
            current.append(_part(segment, first, last))
            free -= last - first
            first = last
            if free == 0:
                found.append(tuple(current))
                current, free = [], most
    if current:
        found.append(tuple(current))
    return found


def _part(segment: Segment, first: int, last: int) -> Segment:
    """Tokens first .. last - 1 of a segment. Those before the last token want no logits of their
    own, unless all do."""
    if (first, last) == (0, len(segment.token_ids)):
        return segment
    is_inner = last < len(segment.token_ids) and segment.logit_rows is LogitRows.LAST
    return replace(
        segment,
        token_ids=segment.token_ids[first:last],
        past_len=segment.past_len + first,
        page_ids=segment.page_ids[: pages_for(segment.past_len + last)],
        logit_rows=LogitRows.NONE if is_inner else segment.logit_rows,
    )
