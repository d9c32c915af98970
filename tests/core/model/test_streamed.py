"""A model whose blocks are read anew in every pass: the same figures, the memory of one block."""

from __future__ import annotations

import pytest
import torch

from exl_core.engine.score import score_tokens
from exl_core.load import LoadedModel, LoadOptions, load_model
from support import tiny_models


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[LoadedModel]:
    make = {"llama": tiny_models.tiny_llama, "gemma3": tiny_models.tiny_gemma3}[request.param]
    folder = tiny_models.save(make(), tmp_path_factory.mktemp(request.param))
    return [load_model(str(folder), LoadOptions(streamed=streamed)) for streamed in (True, False)]


def test_scores_and_sizes_are_those_of_the_whole_model(pair: list[LoadedModel]) -> None:
    ids = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    streamed, whole = (score_tokens(loaded.model, ids, chunk_rows=40) for loaded in pair)
    assert torch.equal(streamed, whole)
    # What kernels pad odd sizes with is not known before a matrix is packed.
    assert pair[0].weights_bytes == pytest.approx(pair[1].weights_bytes, rel=0.05)


def test_only_one_block_is_held(pair: list[LoadedModel]) -> None:
    blocks = pair[0].model._weights.blocks
    assert blocks[1] is blocks[1]  # a pass asks for each twice
    first = blocks[0]
    assert blocks[1] is not None
    assert blocks[0] is not first
    assert len(blocks[1:]) == len(blocks) - 1
