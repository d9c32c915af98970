"""Context, the cache for custom loops: rows of different lengths, rewind, copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.errors import RequestError
from exl_core.model.context import Context
from exl_core.model.segment import LogitRows
from exl_core.model.transformer import Transformer
from exl_core.session.load import load_model
from support.tiny_models import VOCAB_SIZE, save, tiny_llama

TOLERANCE = 1e-4  # of the largest logit: fp32 on both sides, sums in a different order
IDS = torch.randint(3, VOCAB_SIZE, (3, 300), generator=torch.Generator().manual_seed(7))
TOKENS = IDS.tolist()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> tuple[Transformer, Tensor]:
    """The model, and transformers' logits for all ids."""
    model = tiny_llama()
    with torch.inference_mode():
        expected = model(IDS).logits
    return load_model(str(save(model, tmp_path_factory.mktemp("llama")))).model, expected


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


def context_of(model: Transformer, batch_size: int = 3, max_len: int = 300) -> Context:
    return Context(model, max_len, batch_size=batch_size, kv_format=KVFormat.FP32)


def test_equal_rows_fed_in_pieces_match_transformers(pair: tuple[Transformer, Tensor]) -> None:
    model, expected = pair
    context = context_of(model)
    assert context.length == 0
    assert_close(context.forward(IDS[:, :250]), expected[:, :250])
    assert context.forward(IDS[:, 250:270], LogitRows.NONE).shape == (3, 0, VOCAB_SIZE)
    assert_close(context.forward(IDS[:, 270:299], LogitRows.LAST), expected[:, 298:299])
    assert_close(context.forward(IDS[:, 299:]), expected[:, 299:])
    assert context.length == 300
    with pytest.raises(RequestError, match=r"row 0: 1 tokens more .*at most 300 in all, got 301"):
        context.forward(IDS[:, :1])


def test_rows_of_different_lengths_match_transformers(pair: tuple[Transformer, Tensor]) -> None:
    model, expected = pair
    context = context_of(model)
    first = context.feed([TOKENS[0][:280], [], TOKENS[2][:5]])
    assert_close(first[0], expected[0, :280])
    assert first[1].shape == (0, VOCAB_SIZE)
    assert_close(first[2], expected[2, :5])
    assert context.lengths == (280, 0, 5)
    with pytest.raises(RequestError, match="different lengths"):
        print(context.length)
    second = context.feed([TOKENS[0][280:281], TOKENS[1][:30], []], LogitRows.LAST)
    assert_close(second[0], expected[0, 280:281])
    assert_close(second[1], expected[1, 29:30])
    assert second[2].shape == (0, VOCAB_SIZE)
    assert [row.shape for row in context.feed([[], [], []])] == [(0, VOCAB_SIZE)] * 3
    assert context.lengths == (281, 30, 5)


def test_rewound_rows_continue_correctly(pair: tuple[Transformer, Tensor]) -> None:
    model, expected = pair
    context = context_of(model)
    context.forward(IDS[[1, 2, 0], :280])
    context.length = 0
    context.forward(IDS[:, :20])
    context.forward(IDS[[1, 2, 0], 20:40])  # a different continuation, rewound below
    context.length = 20
    assert_close(context.forward(IDS[:, 20:40]), expected[:, 20:40])
    context.lengths = (5, 40, 12)
    rows = context.feed([TOKENS[0][5:7], TOKENS[1][40:41], TOKENS[2][12:30]])
    for row, (start, stop) in enumerate(((5, 7), (40, 41), (12, 30))):
        assert_close(rows[row], expected[row, start:stop])
    for lengths in ((8, 41, 30), (-1, 0, 0)):
        with pytest.raises(RequestError, match="row 0: a row can only be cut back"):
            context.lengths = lengths
    with pytest.raises(RequestError, match="not a length for each row"):
        context.lengths = (1,)
    assert context.lengths == (7, 41, 30)


def test_a_clone_is_independent_of_its_source(pair: tuple[Transformer, Tensor]) -> None:
    model, expected = pair
    context = context_of(model)
    context.feed([TOKENS[0][:270], TOKENS[1][:3], []])
    other = context.clone()
    assert other.lengths == (270, 3, 0)
    other.feed([TOKENS[1][:20], TOKENS[2][:20], TOKENS[0][:20]])
    rows = context.feed([TOKENS[0][270:272], TOKENS[1][3:5], TOKENS[2][:2]])
    assert_close(rows[0], expected[0, 270:272])
    assert_close(rows[1], expected[1, 3:5])
    assert_close(rows[2], expected[2, :2])


def test_copied_rows_continue_one_prompt_in_several_ways(pair: tuple[Transformer, Tensor]) -> None:
    model, expected = pair
    prompt = context_of(model, batch_size=1, max_len=270)
    prompt.feed([TOKENS[0][:262]])
    replies = context_of(model)
    prompt.copy_row(0, [0, 2], to=replies)
    prompt.copy_row(0, [1], to=replies, length=7)
    assert replies.lengths == (262, 7, 262)
    rows = replies.feed([TOKENS[0][262:265], TOKENS[0][7:9], TOKENS[0][262:263]])
    assert_close(rows[0], expected[0, 262:265])
    assert_close(rows[1], expected[0, 7:9])
    replies.copy_row(2, [1, 2])  # within one context, and onto the source row itself
    assert replies.lengths == (265, 263, 263)
    assert_close(replies.feed([[], TOKENS[0][263:264], []])[1], expected[0, 263:264])
    with pytest.raises(RequestError, match=r"cannot be copied .*at most 262, got 263"):
        prompt.copy_row(0, [0], to=replies, length=263)
    with pytest.raises(RequestError, match=r"cannot be copied .*at most 100"):
        prompt.copy_row(0, [0], to=context_of(model, max_len=100))
    with pytest.raises(RequestError, match="different precision"):
        prompt.copy_row(0, [0], to=Context(model, 270))


def test_the_documented_greedy_loop(pair: tuple[Transformer, Tensor]) -> None:
    model, _ = pair
    prompts = [TOKENS[0][:9], TOKENS[1][:4]]
    context = Context(model, max_len=256, batch_size=2)
    replies: list[list[int]] = [[], []]
    logits = context.feed(prompts, LogitRows.LAST)
    for _ in range(6):
        newest = [row[-1].argmax() for row in logits]
        for reply, token_id in zip(replies, newest, strict=True):
            reply.append(int(token_id))
        logits = context.feed([[int(token_id)] for token_id in newest])
    for prompt, reply in zip(prompts, replies, strict=True):
        alone = Context(model, max_len=256)
        whole = alone.feed([prompt + reply])[0]
        assert whole[len(prompt) - 1 : -1].argmax(-1).tolist() == reply


@pytest.mark.parametrize(
    "kind",
    [
        lambda ids: ids,
        list,
        lambda ids: ids.numpy(),
        lambda ids: list(ids.to(torch.int32).numpy()),
    ],
    ids=["tensor", "list of tensors", "array", "list of arrays"],
)
def test_rows_may_be_tensors_or_arrays(pair: tuple[Transformer, Tensor], kind: Any) -> None:
    context = context_of(pair[0])
    rows = context.feed(kind(IDS[:, :5]))
    assert_close(torch.stack(rows), pair[1][:, :5])
    assert context.lengths == (5, 5, 5)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda c: setattr(c, "length", 1.5), "a length has the wrong type .*got 1.5"),
        (lambda c: setattr(c, "lengths", 2), "lengths has the wrong type"),
        (lambda c: c.copy_row(0, [3]), "no such target row .*0 to 2, got 3"),
        (lambda c: c.copy_row(0, [1, -1]), "no such target row .*0 to 2, got -1"),
        (lambda c: c.copy_row(3, [0]), "no such source row .*0 to 2, got 3"),
        (lambda c: c.copy_row(0, 1), "the target rows has the wrong type"),
        (lambda c: c.feed([[5], [5], [5]], "last"), "logits has the wrong type .*NONE, LAST, ALL"),
        (lambda c: c.feed([[], [], []], "last"), "logits has the wrong type"),
    ],
)
def test_a_refused_call_leaves_the_context_as_it_was(
    pair: tuple[Transformer, Tensor], act: Any, message: str
) -> None:
    context = context_of(pair[0])
    context.forward(IDS[:, :2])
    with pytest.raises(RequestError, match=message):
        act(context)
    assert context.lengths == (2, 2, 2)
    assert_close(context.forward(IDS[:, 2:4]), pair[1][:, 2:4])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[5]], "not the tokens of each row"),
        ([[5], [5], [300]], "row 2: not a token of the model .*0 to 299, got 300"),
        ([[5], [-1], []], "row 1: not a token of the model"),
        ([[5], [1.5], []], "row 1: not a token of the model .*got 1.5"),
        ([[5], "a", []], "row 1: not a token of the model .*got 'a'"),
        ([torch.tensor([5]), torch.tensor([1.5]), []], "row 1: not a token of the model .*got 1.5"),
        (IDS[0, :3], "a row of ids has the wrong type .*a list, a tensor or an array"),
        (5, "the rows of ids has the wrong type"),
    ],
)
def test_feeding_bad_ids_is_refused(
    pair: tuple[Transformer, Tensor], ids: Any, message: str
) -> None:
    context = context_of(pair[0])
    with pytest.raises(RequestError, match=message):
        context.feed(ids)
    assert context.lengths == (0, 0, 0)


def test_contexts_of_impossible_size_are_refused(
    pair: tuple[Transformer, Tensor], tmp_path: Path
) -> None:
    for max_len, batch_size in ((0, 1), (5, 0)):
        with pytest.raises(RequestError, match="at least one row and one token"):
            Context(pair[0], max_len, batch_size=batch_size)
    with pytest.raises(RequestError, match=r"kv_format has the wrong type .*got 'q8'"):
        Context(pair[0], 10, kv_format=cast(Any, "q8"))
    with pytest.raises(RequestError, match=r"expected ids of all rows .*shape \[5\]"):
        Context(pair[0], 10).forward(torch.arange(5))
    with pytest.raises(RequestError, match=r"max_len has the wrong type .*got 1\.5"):
        Context(pair[0], 1.5)  # type: ignore[arg-type]
    loaded = load_model(str(save(tiny_llama(), tmp_path)))
    with pytest.raises(RequestError, match=r"got 'LoadedModel'.*Context\(loaded\.model, "):
        Context(loaded, 10)  # type: ignore[arg-type]
