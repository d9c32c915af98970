"""Calibration rows: from texts, and as the model writes them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from exl_core.convert.calibration import AT_ONCE, rows_at_once, rows_of_model, rows_of_texts
from exl_core.errors import RequestError
from exl_core.load import LoadedModel, LoadOptions, load_model
from exl_core.prompt.template import ChatTemplate
from support.tiny_models import save, tiny_llama


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save(tiny_llama(), tmp_path_factory.mktemp("model"))
    return load_model(str(folder), LoadOptions(threads=1))


def test_texts_follow_each_other_until_the_rows_are_full(loaded: LoadedModel) -> None:
    texts = iter(["ab", "cd", "e" * 10, "never read"])
    rows = rows_of_texts(texts, loaded.tokenizer, rows=2, length=6, name="some.txt")
    expected = loaded.tokenizer.encode("abcdeeeeeeee", add_bos=False)
    assert rows.token_ids.tolist() == [expected[:6], expected[6:12]]
    assert rows.description == "some.txt"
    digest = hashlib.sha256(rows.token_ids.numpy().astype("<i8").tobytes()).hexdigest()
    assert rows.sha256 == digest
    assert next(texts) == "never read"


def test_too_short_texts_are_refused_with_what_is_missing(loaded: LoadedModel) -> None:
    with pytest.raises(RequestError, match="expected 40 tokens: 4 rows of 10, got 3") as caught:
        rows_of_texts(["abc"], loaded.tokenizer, rows=4, length=10, name="some.txt")
    assert caught.value.exit_code == 2


def test_the_model_writes_the_same_again_for_the_same_seed(loaded: LoadedModel) -> None:
    calls: list[tuple[int, int]] = []
    rows = rows_of_model(
        loaded, rows=3, length=24, seed=5, at_once=2, on_progress=lambda *at: calls.append(at)
    )
    assert rows.token_ids.shape == (3, 24)
    assert rows.token_ids.dtype is torch.int64
    assert calls[-1] == (3 * 23, 3 * 23)
    assert rows.token_ids[:, 0].tolist() == [loaded.tokenizer.bos_id] * 3
    again = rows_of_model(loaded, rows=3, length=24, seed=5, at_once=2)
    assert again.sha256 == rows.sha256
    assert rows_of_model(loaded, rows=3, length=24, seed=6, at_once=2).sha256 != rows.sha256
    assert len({tuple(row) for row in rows.token_ids.tolist()}) == 3


def test_chat_models_begin_every_other_row_where_a_user_speaks(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    from dataclasses import replace

    source = "<s>{% for m in messages %}U:{{ m['content'] }}\n{% endfor %}A:"
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", where="test")
    rows = rows_of_model(
        replace(loaded, template=template), rows=2, length=16, seed=0, at_once=2
    ).token_ids
    encode = loaded.tokenizer.encode
    assert rows[1, :3].tolist() == [loaded.tokenizer.bos_id, *encode("U:", add_bos=False)]


def test_with_little_memory_blocks_are_read_again_and_the_text_is_the_same(
    loaded: LoadedModel,
) -> None:
    tight = load_model(str(loaded.path), LoadOptions(threads=1, held_bytes=0))
    assert not isinstance(tight.model._weights.blocks, tuple)
    texts = [rows_of_model(one, rows=3, length=24, seed=5, at_once=2) for one in (loaded, tight)]
    assert torch.equal(texts[0].token_ids, texts[1].token_ids)


def test_rows_side_by_side_take_no_more_than_there_is(loaded: LoadedModel) -> None:
    config = loaded.config
    token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    row = token * (100 + 256)
    assert rows_at_once(config, 100, 5 * row + 1) == (5, 5 * row)
    assert rows_at_once(config, 100, 0) == (1, row)
    assert rows_at_once(config, 100, 1 << 40) == (AT_ONCE, AT_ONCE * row)
