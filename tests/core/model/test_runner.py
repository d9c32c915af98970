"""Layout of a batch plan as tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from exl_core.arch.modules import Packed
from exl_core.arch.spec import ModelConfig
from exl_core.model.adapters import AdapterUse, Delta
from exl_core.model.runner import make_batch
from exl_core.model.segment import LogitRows, Segment


def test_segments_are_flattened_with_their_pages_and_slots() -> None:
    segments = [
        Segment((11,), past_len=5, page_ids=(9, 3), logit_rows=LogitRows.LAST),
        Segment((21, 22, 23), past_len=2, page_ids=(4, 6), logit_rows=LogitRows.NONE),
        Segment((31, 32), past_len=0, page_ids=(1,), logit_rows=LogitRows.ALL),
        Segment((41, 42), past_len=0, page_ids=(2,), logit_rows=LogitRows.LAST),
    ]
    batch = make_batch(segments, page_size=4)
    assert batch.token_ids.tolist() == [11, 21, 22, 23, 31, 32, 41, 42]
    assert batch.positions.tolist() == [5, 2, 3, 4, 0, 1, 0, 1]
    assert batch.row_starts.tolist() == [0, 1, 4, 6, 8]
    assert batch.past_lens.tolist() == [5, 2, 0, 0]
    assert batch.page_table.tolist() == [[9, 3], [4, 6], [1, 0], [2, 0]]
    assert batch.slots.tolist() == [13, 18, 19, 24, 4, 5, 8, 9]
    assert batch.logit_rows.tolist() == [0, 4, 5, 7]


def test_batch_tensors_have_the_documented_dtypes() -> None:
    batch = make_batch([Segment((1,), 0, (0,), LogitRows.NONE)])
    assert batch.logit_rows.shape == (0,)
    for tensor in (batch.token_ids, batch.positions, batch.slots, batch.logit_rows):
        assert tensor.dtype == torch.int64
    for tensor in (batch.row_starts, batch.past_lens, batch.page_table):
        assert tensor.dtype == torch.int32


class EmptyAdapter:
    """An adapter without deltas."""

    serial = 0
    ends = None
    path = Path()
    digest = ""

    def deltas(self, layer: int, matrix: Packed) -> tuple[Delta, ...]:
        return ()

    def fits(self, config: ModelConfig) -> bool:
        return True


def test_adjacent_segments_with_equal_adapters_share_one_range() -> None:
    one, two = AdapterUse(EmptyAdapter()), AdapterUse(EmptyAdapter(), 0.5)
    off = AdapterUse(EmptyAdapter(), 0.0)
    uses = [(one,), (one,), (one, off), (), (one,), (one, two), (two, one), (off,), (two,)]
    batch = make_batch([Segment((1, 2), 0, (0,), LogitRows.NONE, use) for use in uses])
    assert batch.adapters == (
        (0, 6, (one,)),
        (8, 10, (one,)),
        (10, 12, (one, two)),
        (12, 14, (two, one)),
        (16, 18, (two,)),
    )
    assert batch.embedded is None
