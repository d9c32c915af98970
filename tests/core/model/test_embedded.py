"""Embedded vectors: they replace token embeddings in a pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.errors import RequestError
from exl_core.model.context import Context
from exl_core.model.embedded import EMBEDDED_FROM, EmbeddedSpan
from exl_core.model.runner import make_batch
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.session.load import load_model
from support.tiny_models import VOCAB_SIZE, save, tiny_gemma3, tiny_llama

TOKENS = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gemma3])  # the latter scales embeddings
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Transformer:
    return load_model(str(save(request.param(), tmp_path_factory.mktemp("model")))).model


def test_a_tokens_own_embedding_gives_the_tokens_logits(model: Transformer) -> None:
    plain = Context(model, 64, kv_format=KVFormat.FP32).feed([TOKENS])[0]
    first = EmbeddedSpan(model.embed(torch.tensor(TOKENS[3:9])))
    second = EmbeddedSpan(model.embed(torch.tensor(TOKENS[20:21])))
    ids = [*TOKENS[:3], *first.token_ids, *TOKENS[9:20], *second.token_ids, *TOKENS[21:]]
    whole = Context(model, 64, kv_format=KVFormat.FP32)
    assert torch.equal(whole.feed([ids], embeddings=[second, first])[0], plain)

    # A chunk border may cut a span, and rows of other sequences are unaffected.
    pieces = Context(model, 64, batch_size=2, kv_format=KVFormat.FP32)
    cuts = [0, 5, 7, 21, 40]
    for start, stop in pairwise(cuts):
        rows = pieces.feed([ids[start:stop], TOKENS[start:stop]], embeddings=[first, second])
        for row in rows:
            error = (row - plain[start:stop]).abs().max()
            assert error <= 1e-5 * plain.abs().max()  # float32 sums, ordered by row count


def test_batch_holds_the_vectors_unchanged(model: Transformer) -> None:
    """Includes half precision, and the same vectors twice in a batch."""
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(3, model.config.hidden_size, generator=generator).half()
    span, again = EmbeddedSpan(vectors), EmbeddedSpan(vectors)
    assert span.token_ids[0] >= EMBEDDED_FROM
    assert set(span.token_ids).isdisjoint(again.token_ids)
    batch = make_batch(
        [
            Segment((5, *span.token_ids), 0, (0,), LogitRows.LAST, (), (span,)),
            Segment((6,), 0, (1,), LogitRows.LAST),
            Segment((*again.token_ids[1:], 7), 0, (2,), LogitRows.LAST, (), (again, span)),
        ]
    )
    assert batch.embedded is not None
    assert batch.embedded.rows.tolist() == [1, 2, 3, 5, 6]
    assert torch.equal(batch.embedded.vectors, vectors.float()[[0, 1, 2, 1, 2]])
    assert batch.token_ids.tolist() == [5, 0, 0, 0, 6, 0, 0, 7]


def test_embedded_ids_without_their_vectors_are_refused(model: Transformer) -> None:
    width = model.config.hidden_size
    one, other = EmbeddedSpan(torch.ones(2, width)), EmbeddedSpan(torch.ones(2, width))
    segments = [
        Segment((5,), 0, (0,), LogitRows.LAST, (), (other,)),
        Segment((5, *other.token_ids), 0, (1,), LogitRows.LAST, (), (one,)),
    ]
    with pytest.raises(RequestError, match=f"id {other.token_ids[1]} stands for a vector that did"):
        make_batch(segments)


def test_vectors_of_the_wrong_width_are_refused(model: Transformer) -> None:
    span = EmbeddedSpan(torch.ones(2, model.config.hidden_size + 1))
    with pytest.raises(RequestError, match=r"not as wide .*expected 72, got 73"):
        Context(model, 64).feed([span.token_ids], embeddings=[span])


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (torch.ones(5), "wrong form"),
        (torch.ones(0, 5), "wrong form"),
        (torch.ones(2, 5, dtype=torch.int64), r"wrong form .*got torch.int64"),
        (torch.tensor([[1.0, torch.inf]]), "NaN or infinity"),
    ],
)
def test_spans_of_wrong_form_or_value_are_refused(vectors: torch.Tensor, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EmbeddedSpan(vectors)
