"""Report: stopped runs resume, failed models become rows, and the page is self-contained."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from exl_core.errors import ExlError, ModelError
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_eval import report as report_module
from exl_eval.report import Report, ReportOptions, Row, make_report
from exl_eval.report_page import render_page
from exl_eval.report_plots import Line, Point, bars, curves, scatter, steps
from exl_eval.speed import SpeedOptions
from exl_eval.texts import Text
from support import tiny_models

TEXT = Text(("The quick brown fox jumps over the lazy dog. " * 10,), "some/place/fox.txt")
OPTIONS = ReportOptions(
    TEXT, ctx=64, windows=2, speed=SpeedOptions(prefill=(8,), decode=4, repeat=1)
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one family with different numbers of layers, and a damaged model."""
    root = tmp_path_factory.mktemp("models")
    for name, layers in (("first", 3), ("second", 2)):
        model = tiny_models.tiny_llama(max_position_embeddings=256, num_hidden_layers=layers)
        tiny_models.save(model, root / name)
    shutil.copytree(root / "first", root / "damaged")
    weights = root / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return root


def opening(opened: list[str]) -> Callable[[str], LoadedModel]:
    def open_model(spec: str) -> LoadedModel:
        opened.append(Path(spec).name)
        return load_model(spec, LoadOptions(threads=1))

    return open_model


def made(
    folders: Path, records: Path, *names: str, options: ReportOptions = OPTIONS, **rest: Any
) -> tuple[Report, list[str]]:
    """Report on these models, with `first` as the reference, and the names of the loaded models."""
    opened: list[str] = []
    report = make_report(
        [str(folders / name) for name in names],
        str(folders / "first"),
        options,
        records,
        open_model=opening(opened),
        known_failure=lambda _error: None,
        **rest,
    )
    return report, opened


def test_a_report_covers_working_and_damaged_models(folders: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    names = ("first", "second", "damaged")
    report, opened = made(folders, tmp_path, *names, on_step=lambda *step: steps.append(step))
    first, second, damaged = report.rows
    assert (first.is_reference, second.is_reference) == (True, False)
    assert first.failure is second.failure is None
    assert set(first.parts) == {"description", "perplexity", "speed"}
    kld: Any = second.parts["divergence"]["kld"]
    assert kld["mean"] > 0.01
    assert second.parts["divergence"]["tokens"] == second.parts["perplexity"]["tokens"] == 126
    times: Any = second.parts["speed"]["layers"]
    assert times["prompt_tokens"] == OPTIONS.speed.prefill[0]
    assert len(times["prefill_s"]) == len(times["decode_s"]) == 2
    assert min(times["prefill_s"] + times["decode_s"]) > 0
    layers: Any = second.parts["description"]["layers"]
    assert [layer["name"] for layer in layers if "layer" in layer["name"]] == ["layer 0", "layer 1"]
    assert damaged.failure is not None
    assert "model.safetensors" in damaged.failure
    assert dict(damaged.parts) == {}
    assert opened == ["first", "second", "first"]  # the last one is the reference
    assert all(done < total == 12 for done, total, _ in steps)
    assert any(what.endswith("second: perplexity, window 2/2") for _, _, what in steps)

    record = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert record["measurement"] == "report"
    assert [model["name"] for model in record["models"]] == list(names)

    again, opened = made(folders, tmp_path, *names)
    assert opened == []
    assert json.dumps(again.as_dict()) == json.dumps(report.as_dict())
    other = ReportOptions(TEXT, ctx=32, windows=2, speed=OPTIONS.speed)
    _, opened = made(folders, tmp_path, "first", options=other)
    assert opened == ["first"], "another context length needs new measurements"


def test_a_stopped_run_is_resumed(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_args: object, **_rest: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(report_module, "measure_speed", stopped)
        with pytest.raises(KeyboardInterrupt):
            made(folders, tmp_path, "second")
    with monkeypatch.context() as patch:
        patch.setattr(report_module, "measure_perplexity", stopped)
        patch.setattr(report_module, "measure_divergence", stopped)
        report, opened = made(folders, tmp_path, "second")
    assert opened == ["second"]
    assert set(report.rows[0].parts) == {"description", "perplexity", "divergence", "speed"}


def test_a_changed_model_is_measured_again(folders: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(folders / "second", tmp_path / "second"))
    opened: list[str] = []

    def run() -> None:
        make_report(
            [str(model)],
            None,
            OPTIONS,
            tmp_path / "records",
            open_model=opening(opened),
            known_failure=lambda _error: None,
        )

    run()
    run()
    assert opened == ["second"]
    (model / "config.json").write_bytes((model / "config.json").read_bytes() + b"\n")
    run()
    assert opened == ["second", "second"]


def test_a_failed_part_does_not_affect_the_others(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: object) -> None:
        raise ExlError("another tokenizer")

    monkeypatch.setattr(report_module, "measure_divergence", refused)
    row = made(folders, tmp_path, "second")[0].rows[0]
    assert row.failure == "divergence: another tokenizer"
    assert set(row.parts) == {"description", "perplexity", "speed"}


def test_known_failures_become_rows_and_bugs_are_raised(folders: Path, tmp_path: Path) -> None:
    def fails(error: Exception) -> Callable[[str], LoadedModel]:
        def open_model(_spec: str) -> LoadedModel:
            raise error

        return open_model

    def make(error: Exception) -> Row:
        return make_report(
            [str(folders / "second")],
            None,
            OPTIONS,
            tmp_path,
            open_model=fails(error),
            known_failure=lambda e: ExlError("no memory") if isinstance(e, MemoryError) else None,
        ).rows[0]

    assert make(MemoryError()).failure == "no memory"
    assert make(ModelError("bad model")).failure == "bad model"
    with pytest.raises(RuntimeError, match="a bug"):
        make(RuntimeError("a bug"))


class Links(HTMLParser):
    """Collects tags, ids, text, and addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "srcset") and value:
                self.fetched.append(value)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(*rows: Row, reference: str | None = "ref") -> tuple[str, Links]:
    html = render_page(Report(OPTIONS, reference, rows), "today")
    links = Links()
    links.feed(html)
    return html, links


def known(name: str, size: float, perplexity: float, kld: float | None = None) -> Row:
    layers = [{"name": f"layer {i}", "bits_per_weight": 4.0 + i % 2} for i in range(4)]
    described = {
        **{"name": name, "format": "exl2", "file_bytes": size, "bits_per_weight": 4.5},
        "layers": [{"name": "embed_tokens", "bits_per_weight": 16.0}, *layers],
    }
    scored = {
        **{"perplexity": perplexity, "stderr": 0.5, "text_sha256": "abc", "windows": 2},
        **{"ctx": 64, "style": "paper", "bos": "none", "special_text": False},
    }
    speed = {
        **{"decode_tok_s": 123.4, "prefill_tok_s": 2345.6, "floor_share": 0.71},
        "weights_bytes": 2e9,
    }
    parts: dict[str, Any] = {"description": described, "perplexity": scored, "speed": speed}
    if kld is not None:
        figures = {"mean": kld, "stderr": 0.001, "p99": 0.5}
        parts["divergence"] = {"kld": figures, "same_top": 0.95}
    return Row(name, name, False, parts)


def test_the_page_is_self_contained() -> None:
    html, links = page_of(known("a", 1e8, 10.0, 0.1), known("b", 2e8, 8.0, 0.01))
    assert links.tags["script"] == links.tags["link"] == links.tags["img"] == 0
    assert all(target.startswith("#") for target in links.fetched), links.fetched
    assert not re.search(r"@import|url\((?!#)", html)
    assert links.tags["svg"] == 5
    for expected in ("10.000 ± 0.500", "0.1000 ± 0.0010", "95.0 %", "71 %", "2.00 GB", "fox.txt"):
        assert expected in html
    assert "paper, BOS none, special tokens are read as text" in html
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert 'name="viewport"' in html


def test_plots_use_page_colors_and_unique_ids() -> None:
    html, links = page_of(known("a", 1e8, 10.0, 0.1), known("b", 2e8, 80.0, 0.01))
    svgs = re.findall(r"<svg.*?</svg>", html, re.S)
    assert all("var(--ink)" in svg for svg in svgs)
    assert not re.search(r"#[0-9a-f]{6}", "".join(svgs).replace("#ffffff", ""))
    used = {target.removeprefix("#") for target in links.fetched}
    used |= set(re.findall(r"url\(#([^)]+)\)", html))
    counts = Counter(links.ids)
    assert used
    assert {name: counts[name] for name in used} == dict.fromkeys(used, 1)


def test_likelihood_by_position_is_plotted(folders: Path, tmp_path: Path) -> None:
    report, _ = made(folders, tmp_path, "second")
    buckets: Any = report.rows[0].parts["perplexity"]["by_position"]
    html, links = page_of(*report.rows)
    assert "Likelihood by position" in html
    text = "".join(links.text)
    for bucket in buckets:
        assert f"{bucket['first']}-{bucket['last']}" in text
    older = known("a", 1e8, 10.0)  # a record without positions
    assert "Likelihood by position" not in page_of(older)[0]


def test_times_by_layer_are_plotted(folders: Path, tmp_path: Path) -> None:
    report, _ = made(folders, tmp_path, "second")
    measured = page_of(*report.rows)[0]
    assert "Decode time by layer" in measured
    assert "Prompt time by layer" in measured
    speed: Any = dict(report.rows[0].parts["speed"])
    speed["layers"] = {**speed["layers"], "decode_s": None}  # a GPU
    html = page_of(replace(report.rows[0], parts={**report.rows[0].parts, "speed": speed}))[0]
    assert "Decode time by layer" not in html
    assert "Prompt time by layer" in html
    assert "time by layer" not in page_of(known("a", 1e8, 10.0))[0], "a record without times"


def test_names_from_files_are_escaped() -> None:
    evil = '<script>alert("$x$")</script>\x1b[31m'
    html, links = page_of(known(evil, 1e8, 10.0), Row(evil, evil, False, {}, evil))
    assert links.tags["script"] == 0
    assert html.count("&lt;script&gt;") >= 3
    assert "\x1b" not in html


def test_a_page_of_failed_models_has_no_plots() -> None:
    html, links = page_of(Row("x", "x", False, {}, "cannot be read"), reference=None)
    assert "cannot be read" in "".join(links.text)
    assert "mean KL" not in html
    assert links.tags["svg"] == 0
    assert "1 model on fox.txt" in html


def test_plots_scale_and_have_readable_labels() -> None:
    near = scatter([Point(1, 5.0, 10.0), Point(2, 6.0, 12.0)], x_label="size", y_label="ppl")
    far = scatter([Point(1, 5.0, 10.0), Point(2, 6.0, 1200.0)], x_label="size", y_label="ppl")
    for svg in (near, far, bars([Point(9, 3.0, 0.0)], label="tok/s")):
        assert svg.startswith("<svg")
        assert not re.search(r'<svg[^>]*(width|height)="', svg)
        assert "viewBox" in svg
    assert ">1000<" in far.replace(" ", "")
    assert ">12.0<" in near.replace(" ", "")
    text = steps([Line(1, (4.0, 4.0)), Line(2, (4.0, 4.01))], x_label="layer", y_label="bits")
    assert "bits" in text
    places = re.findall(r'translate\(([\d.]+) ([\d.]+)\)"\s*>\s*[12]\s*<', text)
    assert len({y for _, y in places}) == len(places), "numbers must not overlap"


@pytest.mark.parametrize("wild", [1e30, 1e300, math.inf, math.nan])
def test_a_wild_perplexity_is_a_triangle_at_the_top(wild: float) -> None:
    points = [Point(2, 6.0, wild, wild), Point(1, 5.0, 10.0, 0.5), Point(3, 7.0, 11.0, 20.0)]
    svg = scatter(points, x_label="size", y_label="ppl")
    assert len(numbers_in(svg)) == 3
    assert len(re.findall(r">\s*1e\+0[68]\s*<", svg)) >= 1  # the axis ends near the triangle
    html, _ = page_of(known("a", 1e8, 10.0), known("b", 1e8, wild))
    longest = max(len(cell) for cell in re.findall(r">([^<>]*±[^<>]*)<", html))
    assert longest < 40


def test_the_numbers_of_many_models_do_not_overlap() -> None:
    rng = random.Random(7)
    near = [Point(n, 100.0 + rng.random(), 10.0 + 0.1 * rng.random()) for n in range(1, 25)]
    same = [Line(n, (4.0, 4.0 + n % 3 * 0.01)) for n in range(1, 25)]
    for svg in (
        scatter(near, x_label="size", y_label="ppl"),
        steps(same, x_label="layer", y_label="bits"),
        curves(same, ("0-1", "2-3"), x_label="tokens", y_label="nll"),
    ):
        places = numbers_in(svg)
        assert len(places) == 24
        width, height = (float(part) for part in re.findall(r'viewBox="0 0 (\S+) (\S+)"', svg)[0])
        for at, (x, y) in enumerate(places):
            assert 0 <= x <= width
            assert 0 <= y <= height
            for other_x, other_y in places[:at]:
                # A number is about 6 points high and 12 wide.
                assert abs(x - other_x) >= 5.0 or abs(y - other_y) >= 6.0


def numbers_in(svg: str) -> list[tuple[float, float]]:
    """Places of the bold numbers of models in a plot, in points."""
    place = r'font-weight: 700[^>]*?(?:x="([\d.]+)" y="|translate\(([\d.]+) )([\d.]+)'
    return [(float(x or moved), float(y)) for x, moved, y in re.findall(place, svg)]
