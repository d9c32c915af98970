"""The job around the stages: its output, the requests that it refuses, and how it resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from exl_core.convert.events import ConversionStopped, Event, Stage
from exl_core.convert.job import MEASUREMENT_NAME, RECORD_NAME, GateOutcome
from exl_core.convert.work import open_work
from exl_core.errors import ExlError, QualityError, RequestError
from exl_core.formats.verify import verify
from exl_core.session.open import open_checkpoint
from support.conversions import COMMAND, content, conversion, hooks, recorder, run

pytestmark = pytest.mark.usefixtures("stubs")


def test_published_files(source_dir: Path, tmp_path: Path) -> None:
    events, on_event = recorder()
    out = run(conversion(source_dir, tmp_path), hooks(on_event=on_event))

    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no other file remains
    files = {path.name for path in out.iterdir()}
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    count = len(shards)
    assert count > 1
    assert shards == [f"output-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert all((out / name).stat().st_size < (1 << 17) + 8192 for name in shards)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = {name: load_file(out / name) for name in shards}
    assert index["weight_map"] == {key: name for name in shards for key in tensors[name]}
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for part in tensors.values() for tensor in part.values()
    )
    assert {"config.json", "tokenizer.json", "notes.md", RECORD_NAME, MEASUREMENT_NAME} < files
    assert "model.safetensors" not in files
    assert not verify(*open_checkpoint(out)).problems
    seen = [event.stage for event in events if event.kind == "stage"]
    assert seen == list(Stage)
    matrices = [event.facts["name"] for event in events if event.kind == "matrix"]
    assert len(matrices) == 3 * 7 + 1


def test_config_is_source_plus_quantization_config(source_dir: Path, tmp_path: Path) -> None:
    out = run(conversion(source_dir, tmp_path))
    text = (out / "config.json").read_text(encoding="utf-8")
    written, before = json.loads(text), json.loads((source_dir / "config.json").read_text())
    assert written.pop("quantization_config") == {
        "quant_method": "exl2",
        "version": "0.3.2",
        "bits": 6.5,
        "head_bits": 6,
        "calibration": {"rows": 3, "length": 20, "dataset": "numbers"},
    }
    assert written == before
    assert text.startswith("{\n    ")


def test_record_lists_decisions(source_dir: Path, tmp_path: Path) -> None:
    out = run(conversion(source_dir, tmp_path))
    record = json.loads((out / RECORD_NAME).read_text())
    assert record["gate"] == {"figures": {"kld": 0.01}, "fault": None}
    assert record["calibration"]["sha256"] == "5" * 64
    assert len(record["matrices"]) == 3 * 7 + 1
    assert record["matrices"][0]["layout"] == "6:100/64"
    assert 6 < record["bits_per_weight"] < 8
    assert str(tmp_path) not in (out / RECORD_NAME).read_text()


def test_measurement_is_reusable_at_another_bit_rate(source_dir: Path, tmp_path: Path) -> None:
    first = run(conversion(source_dir, tmp_path))
    events, on_event = recorder()
    again = conversion(
        source_dir, tmp_path, out=tmp_path / "b", bits=8.25, measurement=first / MEASUREMENT_NAME
    )
    out = run(again, hooks(on_event=on_event))
    assert Stage.MEASURE not in {event.stage for event in events}
    record = json.loads((out / RECORD_NAME).read_text())
    assert {matrix["layout"] for matrix in record["matrices"][:-1]} == {"8:100/32"}
    assert (out / MEASUREMENT_NAME).read_bytes() == (first / MEASUREMENT_NAME).read_bytes()


def test_output_is_independent_of_paths(source_dir: Path, tmp_path: Path) -> None:
    first = run(conversion(source_dir, tmp_path))
    other = conversion(source_dir, tmp_path, out=tmp_path / "b", work=tmp_path / "w")
    assert content(run(other)) == content(first)
    kept = {path.name for path in (tmp_path / "w").iterdir()}
    assert {"measurement.json", "calibration.safetensors"} < kept
    assert not any(name.startswith(("layer", "quantize", "measure-")) for name in kept)
    assert content(run(other)) == content(first)  # no work remains


def test_stop_and_resume_between_layers(source_dir: Path, tmp_path: Path) -> None:
    whole = content(run(conversion(source_dir, tmp_path, out=tmp_path / "whole")))
    task, stops = conversion(source_dir, tmp_path), 0
    while not task.out.exists():
        answers = iter([False] * 3 + [True] * 1000)
        try:
            run(task, hooks(should_stop=lambda answers=answers: next(answers)))
        except ConversionStopped:
            stops += 1
            assert not task.out.exists()
    assert stops > 2
    assert content(task.out) == whole


def test_a_removal_of_work_files_that_was_killed_is_resumed(
    source_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the first steps of the removal and at the last ones, where the job goes."""
    steps, kill_at, folder = 0, 0, tmp_path / "whole"
    real = {name: getattr(Path, name) for name in ("unlink", "rmdir")}

    def killing(name: str) -> Any:
        def step(path: Path, *args: Any, **settings: Any) -> None:
            nonlocal steps
            is_work = "out.work" in (path.name, path.parent.name)
            if is_work and (folder / "out").is_dir():
                steps += 1
                if steps == kill_at:
                    raise KeyboardInterrupt
            real[name](path, *args, **settings)

        return step

    for name in real:
        monkeypatch.setattr(Path, name, killing(name))
    folder.mkdir()
    whole = content(run(conversion(source_dir, folder)))
    num_steps = steps
    assert num_steps > 10
    for point in (1, 2, *range(num_steps - 4, num_steps + 1)):
        folder = tmp_path / f"at-{point}"
        folder.mkdir()
        steps, kill_at = 0, point
        with pytest.raises(KeyboardInterrupt):
            run(conversion(source_dir, folder))
        kill_at = 0
        if (folder / "out.work").exists():  # else the removal was complete
            run(conversion(source_dir, folder))
        assert content(folder / "out") == whole
        assert [path.name for path in folder.iterdir()] == ["out"]


def test_a_conversion_does_not_take_another_output_for_its_own(
    source_dir: Path, tmp_path: Path
) -> None:
    run(conversion(source_dir, tmp_path))
    (tmp_path / "out.work").mkdir()
    other = conversion(source_dir, tmp_path, bits=5.0)
    with pytest.raises(RequestError, match="the output exists already"):
        run(other)


def test_unfinished_conversion_goes_on_and_says_so(source_dir: Path, tmp_path: Path) -> None:
    task = conversion(source_dir, tmp_path)
    events, on_event = recorder()
    stop_after_a_layer = hooks(
        on_event=on_event, should_stop=(task.work_folder / "layer-00001.safetensors").is_file
    )
    with pytest.raises(ConversionStopped):
        run(task, stop_after_a_layer)
    assert "resume" not in {event.kind for event in events}
    events.clear()
    run(task, hooks(on_event=on_event))
    (resumed,) = [event for event in events if event.kind == "resume"]
    assert resumed.facts == {"work": str(task.work_folder), "is_published": False}
    measured = [event for event in events if (event.kind, event.stage) == ("step", Stage.MEASURE)]
    assert not measured  # finished before the stop


def test_unfinished_conversion_with_other_options_is_refused(
    source_dir: Path, tmp_path: Path
) -> None:
    task = conversion(source_dir, tmp_path)
    with pytest.raises(ConversionStopped):
        run(task, hooks(should_stop=lambda: True))
    before = content(task.work_folder)
    with pytest.raises(RequestError, match=r"another length \(expected 20, got 10\)"):
        run(conversion(source_dir, tmp_path, length=10))
    both = r"another bits and another rows \(expected bits 6.5, rows 3, got bits 7, rows 4\)"
    with pytest.raises(RequestError, match=both):
        run(conversion(source_dir, tmp_path, bits=7, rows=4))
    assert content(task.work_folder) == before


def test_changed_source_cannot_be_resumed(source_dir: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(source_dir, tmp_path / "source"))
    task = conversion(source, tmp_path)
    with pytest.raises(ConversionStopped):
        run(task, hooks(should_stop=lambda: True))
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RequestError, match="another source_sha256"):
        run(task)


def test_work_directory_is_exclusive(source_dir: Path, tmp_path: Path) -> None:
    task = conversion(source_dir, tmp_path, work=tmp_path / "w")
    facts = task.facts("x")
    with (
        open_work(tmp_path / "w", facts),
        pytest.raises(RequestError, match="another process"),
        open_work(tmp_path / "w", facts),
    ):
        pass


def test_output_is_exclusive(source_dir: Path, tmp_path: Path) -> None:
    """Starts a second job while the first computes and has not created its output yet."""
    second = conversion(source_dir, tmp_path, work=tmp_path / "w")
    refusals: list[str] = []

    def begin_another(event: Event) -> None:
        if (event.kind, event.stage) == ("stage", Stage.QUANTIZE):
            with pytest.raises(RequestError, match="converting to this output") as caught:
                run(second)
            refusals.append(str(caught.value))

    first = conversion(source_dir, tmp_path)
    out = run(first, hooks(on_event=begin_another))
    assert len(refusals) == 1
    assert str(out) in refusals[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(RequestError, match="the output exists already"):
        run(second)


def test_failed_gate_keeps_partial_output_until_forced(source_dir: Path, tmp_path: Path) -> None:
    task = conversion(source_dir, tmp_path)
    poor = hooks(gate=lambda *_: GateOutcome({"kld": 9.0}, "a divergence of 9 nats"))
    with pytest.raises(QualityError, match="9 nats") as caught:
        run(task, poor)
    assert f"{COMMAND} --force" in str(caught.value)
    assert caught.value.where == str(tmp_path / "out.partial")
    assert caught.value.exit_code == 7
    assert not task.out.exists()
    partial = tmp_path / "out.partial"
    assert json.loads((partial / RECORD_NAME).read_text())["gate"]["figures"] == {"kld": 9.0}
    with pytest.raises(QualityError):  # the gate is not repeated
        run(task)
    out = run(task, force=True)
    assert json.loads((out / RECORD_NAME).read_text())["is_forced"] is True
    assert not partial.exists()


def test_read_back_mismatch_is_never_published(
    source_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exl_core.convert import job

    real = vars(job)["write_weights"]

    def damaging(folder: Path, *args: object) -> None:
        real(folder, *args)
        path = sorted(folder.glob("*.safetensors"))[-1]
        data = bytearray(path.read_bytes())
        data[-5] ^= 4
        path.write_bytes(data)

    monkeypatch.setattr(job, "write_weights", damaging)
    task = conversion(source_dir, tmp_path)
    with pytest.raises(ExlError, match="reads back differently"):
        run(task)
    assert not task.out.exists()
    monkeypatch.setattr(job, "write_weights", real)
    with pytest.raises(ExlError, match="reads back differently"):  # the check is repeated
        run(task)
    shutil.rmtree(tmp_path / "out.partial")
    assert run(task).is_dir()


@pytest.mark.parametrize("name", ["measured-00001.json", "layer-00001.safetensors"])
def test_damaged_work_file_is_named(name: str, source_dir: Path, tmp_path: Path) -> None:
    task = conversion(source_dir, tmp_path)
    stop = hooks(should_stop=(task.work_folder / name).is_file)
    with pytest.raises(ConversionStopped):
        run(task, stop)
    (task.work_folder / name).write_bytes(b"{")
    with pytest.raises(ExlError, match=name):
        run(task)
    assert not task.out.exists()


def test_shard_size_does_not_change_tensors(source_dir: Path, tmp_path: Path) -> None:
    many = run(conversion(source_dir, tmp_path))
    one = run(conversion(source_dir, tmp_path, out=tmp_path / "one", shard_bytes=1 << 30))
    (single,) = one.glob("*.safetensors")
    assert single.name == "output.safetensors"
    tensors = load_file(single)
    for path in many.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, tensors.pop(name))
    assert not tensors
