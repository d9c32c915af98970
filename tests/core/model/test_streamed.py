"""Streamed models, which read blocks anew in every pass: equal scores, memory of one block."""

from __future__ import annotations

import pytest
import torch

from exl_core.engine.score import score_tokens
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from support import tiny_models


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[LoadedModel]:
    make = {"llama": tiny_models.tiny_llama, "gemma3": tiny_models.tiny_gemma3}[request.param]
    folder = tiny_models.save(make(), tmp_path_factory.mktemp(request.param))
    return [load_model(str(folder), LoadOptions(held_bytes=held)) for held in (0, None)]


def test_streamed_scores_equal_those_of_the_loaded_model(pair: list[LoadedModel]) -> None:
    ids = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    streamed, whole = (score_tokens(loaded.model, ids, chunk_rows=40) for loaded in pair)
    assert torch.equal(streamed, whole)
    # The kernels' padding of odd sizes is unknown until a matrix is packed.
    assert pair[0].weights_bytes == pytest.approx(pair[1].weights_bytes, rel=0.05)


def test_only_one_block_is_kept(pair: list[LoadedModel]) -> None:
    blocks = pair[0].model._weights.blocks
    assert blocks[1] is blocks[1]  # a pass indexes each block twice
    first = blocks[0]
    assert blocks[1] is not None
    assert blocks[0] is not first
    assert len(blocks[1:]) == len(blocks) - 1


def test_first_blocks_that_fit_held_bytes_are_kept(pair: list[LoadedModel]) -> None:
    whole = pair[1]
    sizes = [block.size_bytes for block in whole.model._weights.blocks]
    without_blocks = whole.weights_bytes - sum(sizes)
    loaded = load_model(
        str(whole.path), LoadOptions(held_bytes=without_blocks + sizes[0] + round(1.1 * max(sizes)))
    )
    blocks = loaded.model._weights.blocks
    first, again = ([blocks[layer] for layer in range(len(blocks))] for _ in range(2))
    assert first[0] is again[0]
    assert not any(a is b for a, b in zip(first[1:], again[1:], strict=True))
    ids = torch.arange(40).tolist()
    assert torch.equal(*(score_tokens(model.model, ids) for model in (loaded, whole)))
    complete = load_model(str(whole.path), LoadOptions(held_bytes=1 << 40))
    assert isinstance(complete.model._weights.blocks, tuple)
