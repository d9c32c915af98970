"""Window files: a resumed run gives the same figures as an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exl_core.errors import ExlError, RequestError
from exl_eval.divergence import (
    DivergenceOptions,
    RunningReference,
    lay_out_for_both,
    measure_against,
    measure_divergence,
)
from exl_eval.perplexity import PerplexityOptions, score_text
from exl_eval.texts import as_text
from exl_eval.window_file import WindowFile
from support.tables import loaded_with, random_table

HEADER = {"measurement": "test", "ctx": 16, "bos": None}
TEXT = "The quick brown fox jumps over the lazy dog. " * 4


def values(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(number + 3.0), "b": torch.tensor([[number]], dtype=torch.int32)}


def filled(path: Path, count: int = 3) -> Path:
    with WindowFile(path, HEADER) as file:
        for number in range(count):
            file.append(values(number))
    return path


def check(path: Path, count: int) -> None:
    with WindowFile(path, HEADER) as file:
        assert len(file) == count
        for number in range(count):
            got, wanted = file.read(number), values(number)
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_appended_windows_are_read_back(tmp_path: Path) -> None:
    path = filled(tmp_path / "kept")
    check(path, 3)
    with WindowFile(path, HEADER) as file:
        file.append(values(3))
    check(path, 4)


@pytest.mark.parametrize(("size", "code"), [(20, 6), (300, 1)], ids=["header", "window"])
def test_full_disk_is_named_with_the_file(
    tmp_path: Path, size: int, code: int, small_files: Callable[[int], None]
) -> None:
    small_files(size)
    with pytest.raises(ExlError, match=r"kept: .*File too large") as caught:
        filled(tmp_path / "kept")
    assert caught.value.exit_code == code


@pytest.mark.parametrize("lost", [1, 5, 40, 100])
def test_an_incomplete_last_window_is_replaced(tmp_path: Path, lost: int) -> None:
    path = filled(tmp_path / "kept")
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    with WindowFile(path, HEADER) as file:
        assert len(file) == 2
        file.append(values(2))
    assert path.read_bytes() == whole


def test_a_damaged_last_window_is_dropped(tmp_path: Path) -> None:
    path = filled(tmp_path / "kept")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    check(path, 2)


def test_a_frame_size_beyond_the_file_is_not_allocated(tmp_path: Path) -> None:
    path = filled(tmp_path / "kept", 1)
    path.write_bytes(path.read_bytes() + (2**60).to_bytes(8, "little") + bytes(8))
    check(path, 1)


def test_windows_of_another_run_are_not_overwritten(tmp_path: Path) -> None:
    path = filled(tmp_path / "kept")
    before = path.read_bytes()
    with pytest.raises(RequestError, match=r"another run: ctx differs \(expected 32, got 16\)"):
        WindowFile(path, {**HEADER, "ctx": 32})
    assert path.read_bytes() == before


@pytest.mark.parametrize("data", [b"text\n", b'{"a": 1}', b"[1]\n", b"\xff\xfe\x00\n"])
def test_other_files_are_not_overwritten(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(RequestError, match="holds no windows"):
        WindowFile(path, HEADER)
    assert path.read_bytes() == data


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with WindowFile(path, HEADER), pytest.raises(RequestError, match="another run"):
        WindowFile(path, HEADER)
    check(filled(path), 3)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be opened"):
        WindowFile(tmp_path / "none" / "kept", HEADER)


class StoppedError(Exception):
    """Simulates a killed run."""


def stop_after(count: int) -> Callable[[int, int, float], None]:
    def on_window(done: int, total: int, figure: float) -> None:
        if done == count:
            raise StoppedError

    return on_window


@pytest.mark.parametrize("style", ["paper", "llama.cpp", "hf-stride"])
def test_a_resumed_perplexity_is_unchanged(tmp_path: Path, style: str) -> None:
    path, model = tmp_path / "kept", loaded_with(random_table(5))
    options = PerplexityOptions(style, ctx=32, stride=8 if style == "hf-stride" else None)
    whole = score_text(model, TEXT, options)
    with pytest.raises(StoppedError):
        score_text(model, TEXT, options, stop_after(2), resume=path)
    resumed = score_text(model, TEXT, options, resume=path)
    assert resumed.result.kept_windows == 2
    assert torch.equal(resumed.nll, whole.nll)
    assert resumed.result.perplexity == whole.result.perplexity
    again = score_text(model, TEXT, options, resume=path).result
    assert (again.kept_windows, again.tokens_per_s) == (again.text.windows, None)


def test_a_longer_run_reuses_the_windows_of_a_shorter_run(tmp_path: Path) -> None:
    path, model = tmp_path / "kept", loaded_with(random_table(5))
    score_text(model, TEXT, PerplexityOptions(ctx=16, windows=3), resume=path)
    longer = score_text(model, TEXT, PerplexityOptions(ctx=16, windows=5), resume=path)
    assert longer.result.kept_windows == 3
    shorter = score_text(model, TEXT, PerplexityOptions(ctx=16, windows=2), resume=path)
    assert torch.equal(shorter.nll, longer.nll[:30])


def test_another_text_model_or_option_is_not_resumed(tmp_path: Path) -> None:
    path, model = tmp_path / "kept", loaded_with(random_table(5))
    score_text(model, TEXT, PerplexityOptions(ctx=16, windows=3), resume=path)
    for text, options, field in (
        (TEXT + ".", PerplexityOptions(ctx=16), "text_sha256"),
        (TEXT, PerplexityOptions(ctx=32), "ctx"),
        (TEXT, PerplexityOptions("exl3", ctx=16), "style"),
        (TEXT, PerplexityOptions(ctx=16, token_by_token=True), "token_by_token"),
    ):
        with pytest.raises(RequestError, match=f"{field} differs"):
            score_text(model, text, options, resume=path)


def test_a_resumed_divergence_is_unchanged(tmp_path: Path) -> None:
    reference, candidate = loaded_with(random_table(5)), loaded_with(random_table(6))
    options = DivergenceOptions(ctx=16)
    whole = measure_divergence(candidate, reference, TEXT, options)
    tokenizer = reference.tokenizer
    layout = lay_out_for_both(tokenizer, tokenizer, as_text(TEXT), options, 512)
    running = RunningReference(reference, layout, 260)
    path = tmp_path / "kept"
    with pytest.raises(StoppedError):
        measure_against(running, candidate, layout, on_window=stop_after(4), resume=path)
    resumed = measure_against(running, candidate, layout, resume=path)
    assert resumed.kept_windows == 4
    assert (resumed.kld, resumed.delta_p) == (whole.kld, whole.delta_p)
