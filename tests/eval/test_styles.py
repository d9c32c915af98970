"""Perplexity styles: their windows, their scored tokens, and the counts of words and bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from exl_core.errors import RequestError
from exl_core.session.load import LoadOptions, load_model
from exl_core.tokenizer.base import ControlIds, Tokenizer
from exl_eval.perplexity import PerplexityOptions, measure_perplexity
from exl_eval.styles import BosRule, Layout, WindowOptions, lay_out, settle_bos
from exl_eval.texts import Text, as_text
from exl_eval.windows import measure_pieces
from support import scripted, tiny_models
from support.scripted import PieceTokenizer
from support.tables import BOS, ByteTokenizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
IDS = tuple(TEXT.encode())


def cut(style: str, *, adds_bos: bool = False, text: str | Text = TEXT, **options: Any) -> Layout:
    tokenizer = ByteTokenizer(adds_bos=adds_bos)
    return lay_out(as_text(text), tokenizer, WindowOptions(style, **options), 512)


def given(layout: Layout) -> list[tuple[int, ...]]:
    return [window.token_ids for window in layout.windows]


def test_paper_windows_are_disjoint_and_drop_the_tail() -> None:
    layout = cut("paper", ctx=16)
    assert given(layout) == [IDS[i : i + 16] for i in range(0, len(IDS) - 15, 16)]
    assert len(IDS) % 16 != 0
    assert {window.first for window in layout.windows} == {1}


def test_paper_with_bos_once_counts_it_as_a_token_of_the_first_window() -> None:
    layout = cut("paper", adds_bos=True, ctx=16)
    assert given(layout)[:2] == [(BOS, *IDS[:15]), IDS[15:31]]
    assert (layout.facts.bos, layout.facts.bos_id) == ("once", BOS)


def test_bos_before_each_replaces_the_last_token_of_every_window() -> None:
    layout = cut("paper", ctx=16, bos="each")
    assert given(layout)[:2] == [(BOS, *IDS[:15]), (BOS, *IDS[16:31])]
    assert {window.first for window in layout.windows} == {1}


def test_exl3_takes_the_first_hundred_windows_and_no_bos() -> None:
    layout = cut("exl3", adds_bos=True, text=TEXT * 10, ctx=16)
    assert given(layout) == given(cut("paper", text=TEXT * 10, ctx=16))[:100]
    assert (len(layout.windows), layout.facts.windows, layout.facts.bos) == (100, 100, "none")
    assert cut("exl3", text=TEXT * 10, ctx=16, windows=102).facts.windows == 102


def test_hf_stride_scores_the_tokens_of_the_transformers_guide() -> None:
    ctx, stride = 64, 24
    labels = []
    end_before = 0
    for begin in range(0, len(IDS), stride):
        end = min(begin + ctx, len(IDS))
        labels.append((IDS[begin:end], max(1, end_before - begin)))
        end_before = end
        if end == len(IDS):
            break
    layout = cut("hf-stride", ctx=ctx, stride=stride)
    assert [(window.token_ids, window.first) for window in layout.windows] == labels
    assert sum(len(ids) - first for ids, first in labels) == len(IDS) - 1


@pytest.mark.parametrize(
    ("style", "wanted", "is_special"),
    [("paper", None, True), ("paper", False, False), ("llama.cpp", None, False)],
)
def test_special_tokens_that_the_text_spells_out(
    style: str, wanted: bool | None, is_special: bool
) -> None:
    options = WindowOptions(style, ctx=16, special_text=wanted)
    layout = lay_out(as_text("a <eos> b " * 8), scripted.ByteTokenizer(), options, 512)
    ids = {token for window in layout.windows for token in window.token_ids}
    assert layout.facts.special_text is is_special
    assert (scripted.EOS_ID in ids) is is_special
    assert (ord("<") in ids) is not is_special


def test_hf_stride_defaults_to_the_whole_context() -> None:
    facts = cut("hf-stride", text=TEXT * 4, stride=100).facts
    assert (facts.ctx, facts.stride) == (512, 100)


def test_llama_cpp_scores_second_halves_after_bos() -> None:
    """Predictions at positions n / 2 to n - 2 count, so tokens n / 2 + 1 to n - 1 are scored. One
    newline at the end of the file is dropped. With BOS the text is shifted by one token."""
    plain = cut("llama.cpp", text=TEXT + "\n", ctx=16)
    assert given(plain) == given(cut("paper", ctx=16))
    assert {window.first for window in plain.windows} == {9}
    with_bos = cut("llama.cpp", adds_bos=True, ctx=16)
    shifted = (BOS, *IDS)
    assert given(with_bos) == [
        (BOS, *shifted[i + 1 : i + 16]) for i in range(0, len(shifted) - 15, 16)
    ]
    assert {window.first for window in with_bos.windows} == {9}
    assert with_bos.facts.special_text is False


@pytest.mark.parametrize("bos", ["each", "none"])
def test_per_document_scores_every_token_once(bos: str) -> None:
    rows = Text(("one two three four", "x", "five six"), "rows")
    layout = cut("per-document", text=rows, ctx=8, bos=bos)
    head = (BOS,) if bos == "each" else ()
    scored = [window.token_ids[window.first :] for window in layout.windows]
    whole = b"".join(bytes(ids) for ids in scored)
    assert whole == b"".join(row.encode()[1 - len(head) :] for row in rows.documents)
    assert layout.facts.documents == 3
    first, second, third = given(layout)[:3]
    assert first == (*head, *b"one two three four")[:9]  # at most 8 tokens of context
    assert second == (*head, *b"one two three four")[8:17]
    assert third == (*head, *b"one two three four")[-9:]  # overlaps, to have a full context
    assert all(len(ids) <= 9 for ids in given(layout))


def test_a_document_begins_with_eos_if_there_is_no_bos() -> None:
    class EosOnly(ByteTokenizer):
        def __init__(self) -> None:
            Tokenizer.__init__(self, ControlIds(eos_ids=(257,)), {}, "test")

    layout = lay_out(as_text(TEXT), EosOnly(), WindowOptions("per-document"), 512)
    assert (layout.windows[0].token_ids, layout.facts.bos_id) == ((257, *IDS), 257)


@pytest.mark.parametrize(
    ("style", "options", "message"),
    [
        ("papers", {}, "paper or exl3 or hf-stride or llama.cpp or per-document"),
        ("paper", {"stride": 4, "ctx": 16}, "has no stride"),
        ("hf-stride", {"stride": 16, "ctx": 16}, "would not overlap"),
        ("llama.cpp", {"bos": "once"}, "default or none or replace"),
        ("paper", {"bos": "replace"}, "default or none or once or each"),
        ("paper", {}, "2 to 512"),
        ("llama.cpp", {"ctx": 3}, "4 to 512"),
    ],
)
def test_options_that_do_not_fit_the_style_are_refused(
    style: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        cut(style, **options)


@pytest.mark.parametrize("name", ["ctx", "stride", "windows"])
@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "x", [4]])
def test_counts_are_whole_numbers_from_one(name: str, value: object) -> None:
    options: dict[str, Any] = {"ctx": 16, "stride": 4, name: value}
    with pytest.raises(RequestError, match=f"^{name} (has the wrong type|is too small) .*got"):
        cut("hf-stride", **options)


def test_counts_of_numpy_become_python_numbers() -> None:
    layout = cut("paper", ctx=np.int64(16), windows=np.int32(2))
    assert (type(layout.facts.ctx), len(layout.windows)) == (int, 2)


@pytest.mark.parametrize(("adds_bos", "rule"), [(True, BosRule.ONCE), (False, BosRule.NONE)])
def test_default_bos_follows_the_tokenizer(adds_bos: bool, rule: BosRule) -> None:
    assert settle_bos("default", ByteTokenizer(adds_bos=adds_bos)) is rule


@pytest.mark.parametrize("choice", ["once", "each"])
def test_bos_without_a_bos_token_is_refused(choice: str) -> None:
    with pytest.raises(RequestError, match="no BOS token"):
        settle_bos(choice, ByteTokenizer(bos_id=None))


def test_words_and_bytes_measure_the_scored_text() -> None:
    """Counts of all windows add up to those of the documents. A window counts the words that begin
    in its scored part."""
    rows = Text(("Grüße an  alle\n", " zwei Wörter"), "rows")
    layout = cut("per-document", text=rows, ctx=5)
    assert sum(window.words for window in layout.windows) == 5
    assert sum(window.size_bytes for window in layout.windows) == len(
        "".join(rows.documents).encode()
    )
    (window,) = cut("paper", text="one two three", ctx=10).windows
    assert (window.token_ids, window.size_bytes) == (tuple(b"one two th"), 9)
    assert window.words == 2  # "one" begins in the first token, which is not scored


def test_measure_pieces_with_word_pieces_and_dropped_spaces() -> None:
    tokenizer = PieceTokenizer(" the", " qu", "ick", leading_spaces_dropped=1)
    ids = [tokenizer.id_of(piece) for piece in (" the", " qu", "ick", " the")]
    assert measure_pieces(tokenizer, ids) == ([3, 3, 3, 4], [1, 1, 0, 1])


@pytest.mark.parametrize("style", ["paper", "exl3", "hf-stride", "llama.cpp", "per-document"])
@pytest.mark.parametrize("bos", ["none", "default"])
def test_each_style_matches_transformers(
    style: str, bos: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both sides run in float32 (exact path). The test computes the perplexity by itself."""
    model = tiny_models.tiny_llama()
    folder = tiny_models.save(model, tmp_path_factory.mktemp("tiny"))
    loaded = load_model(str(folder), LoadOptions(exact=True))
    rows = Text((TEXT, "A second, shorter document.", TEXT[7:]), "rows")
    options = PerplexityOptions(style, ctx=48, stride=20 if style == "hf-stride" else None, bos=bos)
    result = measure_perplexity(loaded, rows, options)

    nll = []
    layout = lay_out(rows, loaded.tokenizer, options, 512)
    with torch.no_grad():
        for window in layout.windows:
            logits = model(torch.tensor([window.token_ids])).logits[0].double()
            log_probs = logits.log_softmax(-1)
            for position, (_, true) in enumerate(pairwise(window.token_ids)):
                if position + 1 >= window.first:
                    nll.append(-float(log_probs[position, true]))
    assert result.tokens == len(nll)
    exact = torch.tensor(nll, dtype=torch.float64).mean().exp()
    assert result.perplexity == pytest.approx(float(exact), rel=1e-3)
