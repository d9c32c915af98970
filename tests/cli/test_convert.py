"""`exl convert`: options, output, exit codes. Most tests replace the stages by fast stubs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from exl_cli import conversion
from exl_core.convert.calibration import CalibrationRows
from exl_eval import gate
from exl_eval.held_out import HELD_OUT_TEXT
from support import stub_stages, tiny_models
from support.commands import Command
from support.conversions import SHAPE, content
from support.terminal import Terminal
from support.tiny_mtp import MtpCheckpoint

EVENTS = ["check", "calibrate", "sensitivity", "measure", "quantize", "ends", "tune", "write"]


def take_rows(texts: Any, tokenizer: Any, *, rows: int, length: int, name: str) -> CalibrationRows:
    ids = [i for text in texts for i in tokenizer.encode(text)][: rows * length]
    return CalibrationRows(torch.tensor(ids).view(rows, length), "7" * 64, name)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(
        tiny_models.tiny_llama(**SHAPE), tmp_path_factory.mktemp("convert-source")
    )


@pytest.fixture
def convert(exl: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`convert(*args)` converts the source to tmp_path/out, with a text for calibration."""
    stub_stages.install(monkeypatch.setattr)
    monkeypatch.setattr(conversion, "rows_of_texts", take_rows)
    monkeypatch.setattr(gate, "HELD_OUT_TEXT", HELD_OUT_TEXT[:1600])  # one token per byte
    text = tmp_path / "text.txt"
    text.write_text("Some text to be calibrated on. " * 100, encoding="utf-8")

    def run(*args: object, out: str = "out", source: Path = source) -> Any:
        fixed = ("--calibration", text, "--rows", 2, "--length", 64, "--bits", 8.25)
        return exl("convert", source, "-o", tmp_path / out, *fixed, *args)

    return run


def test_pickles_become_safetensors_without_quantization(
    exl: Command, source: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "bin"))
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    assert "--from-bin" in exl("inspect", "model", folder).error_line(3)

    done = exl("convert", folder, "-o", tmp_path / "out", "--from-bin")

    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("out: 1 weight file\n")
    assert exl("inspect", "model", tmp_path / "out", "--verify").code == 0
    exists = exl("convert", folder, "-o", tmp_path / "out", "--from-bin").error_line(2)
    assert "exists already" in exists


def test_a_copy_refuses_options_of_a_quantization(
    exl: Command, source: Path, tmp_path: Path
) -> None:
    options = ("--repack", "--shard-size", "1MB", "--bits", 3)
    line = exl("convert", source, "-o", tmp_path / "out", *options).error_line(2)
    assert "--bits does not go with --from-bin or --repack" in line
    assert exl("convert", source, "-o", tmp_path / "out", *options[:3]).code == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def events_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def steps_of(events: list[dict[str, Any]], stage: str) -> list[tuple[int, int]]:
    found = [event for event in events if event["event"] == "step" and event["stage"] == stage]
    return [(event["done"], event["total"]) for event in found]


def test_table(convert: Command, tmp_path: Path) -> None:
    done = convert()
    assert (done.code, done.err) == (0, "")
    for word in ("8.2", "divergence", "±", "perplexity", "held-out text", str(tmp_path / "out")):
        assert word in done.out, word
    assert (tmp_path / "out/config.json").is_file()


def test_a_family_that_exllamav2_does_not_know(
    convert: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = convert()
    assert "exllamav2 does not know" not in done.out
    monkeypatch.setattr(conversion, "EXLLAMAV2_FAMILIES", ())
    done = convert(out="other")
    assert "exllamav2 does not know models of the family llama" in " ".join(done.out.split())


def test_json_events(convert: Command, tmp_path: Path) -> None:
    done = convert("--json", "--head-bits", 8)
    assert (done.code, done.err) == (0, "")
    events = events_of(done.out)
    assert [e["stage"] for e in events if e["event"] == "stage"] == [*EVENTS, "gate"]
    matrices = [event for event in events if event["event"] == "matrix"]
    assert matrices[0]["name"] == "model.layers.0.self_attn.q_proj.weight"
    assert {"layout", "bits", "error", "incidents", "seconds"} < set(matrices[0])
    assert steps_of(events, "measure") == [(0, 3), (1, 3), (2, 3)]
    last = events[-1]
    assert (last["event"], last["out"]) == ("done", str(tmp_path / "out"))
    figures = last["gate"]["figures"]
    assert last["gate"]["fault"] is None
    assert 0 < figures["kld"]["mean"] < figures["limit_nats"]
    assert 0 < figures["kld"]["stderr"] < figures["kld"]["mean"]
    assert 0.5 < figures["same_top"] < 1
    assert figures["tokens"] > 1000


def test_the_result_runs(convert: Command, exl: Command, tmp_path: Path) -> None:
    assert convert().code == 0
    done = exl("inspect", "model", "--verify", tmp_path / "out")
    assert done.code == 0
    assert "no problems" in done.out
    done = exl("generate", tmp_path / "out", "-p", "Some", "-n", 4, "--temp", 0)
    assert done.code == 0


def test_result_beyond_the_divergence_limit(
    convert: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stub_stages.rounded

    def poor(name: str, weight: torch.Tensor, *args: Any) -> dict[str, torch.Tensor]:
        return real(name, weight.flip(0) if "o_proj" in name else weight, *args)

    monkeypatch.setattr(stub_stages, "rounded", poor)
    done = convert("--quiet")
    line = done.error_line(7)
    assert "the limit" in line
    assert str(tmp_path / "out.partial") in line
    assert "--force" in line
    assert not (tmp_path / "out").exists()
    record = json.loads((tmp_path / "out.partial/exl_conversion.json").read_text())
    assert record["gate"]["fault"]
    done = convert("--force", "--json")
    assert done.code == 0
    assert events_of(done.out)[-1]["gate"]["fault"] == record["gate"]["fault"]
    assert json.loads((tmp_path / "out/exl_conversion.json").read_text())["is_forced"]


def test_finished_conversion_with_kept_work_is_not_repeated(
    convert: Command, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letter.txt").touch()
    assert "exists already" in convert().error_line(2)
    work = tmp_path / "kept"
    assert convert("--work", work, out="b").code == 0
    again = convert("--work", work, out="b")
    assert again.code == 0
    assert again.err == f"this conversion is finished; its intermediate results are in {work}\n"
    other = convert("--work", work, "--seed", 5, out="b")
    assert "another seed (expected 0, got 5)" in other.error_line(2)


@pytest.mark.parametrize("option", [(), ("--resume",)], ids=["plain", "--resume"])
def test_the_same_command_continues_an_unfinished_conversion(
    option: tuple[str, ...], convert: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    real = vars(conversion)["measure_gate"]
    monkeypatch.setattr(conversion, "measure_gate", interrupted)
    stopped = convert()
    assert stopped.code == 130
    command = stopped.err.removeprefix("stopped; resume with: ").rstrip()
    assert command.startswith(f"exl convert --output {tmp_path / 'out'} ")
    assert "--resume" not in command
    monkeypatch.setattr(conversion, "measure_gate", real)
    work = tmp_path / "out.work"
    refused = convert("--seed", 5, *option).error_line(2)
    assert f"{work}: the work directory belongs to an unfinished conversion" in refused
    assert "another seed (expected 0, got 5)" in refused
    done = convert(*option)
    assert done.code == 0
    found = f"continuing the unfinished conversion; its intermediate results are in {work}\n"
    assert done.err == found
    assert not work.exists()


def test_the_printed_command_needs_no_profile_and_no_settings(
    exl: Command,
    convert: Command,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    settings, text = tmp_path / "settings.toml", tmp_path / "text.txt"
    settings.write_text(
        f"bits = 3\n[profiles.p]\nmodel = {json.dumps(str(source))}\nrows = 2\nlength = 64\n"
        f"calibration = {json.dumps(str(text))}\n[convert]\nhead-bits = 8\n",
        encoding="utf-8",
    )
    for name in ("EXL_MODEL", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # restored after the test; the command sets it
        monkeypatch.delenv(name)
    monkeypatch.setenv("EXL_CONFIG", str(settings))
    real = vars(conversion)["measure_gate"]
    monkeypatch.setattr(conversion, "measure_gate", interrupted)
    args = ("--profile", "p", "-o", tmp_path / "my out", "--bits", "4.0", "--force", "--offline")
    stopped = exl("convert", *args)
    assert stopped.code == 130
    monkeypatch.setattr(conversion, "measure_gate", real)
    for name in ("EXL_MODEL", "HF_HUB_OFFLINE", "EXL_CONFIG"):
        monkeypatch.delenv(name)
    words = shlex.split(stopped.err.removeprefix("stopped; resume with: "))
    assert words[:2] == ["exl", "convert"]
    assert {"--force", "--offline", str(source)} <= set(words)
    done = exl(*words[1:])
    assert done.code == 0, done.err
    assert done.err.startswith("continuing the unfinished conversion; ")
    record = json.loads((tmp_path / "my out/exl_conversion.json").read_text())
    assert (record["bits"], record["options"]["head_bits"]) == (4.0, 8)


def test_resume_event_in_json(convert: Command, tmp_path: Path) -> None:
    work = tmp_path / "kept"
    assert convert("--work", work).code == 0
    events = events_of(convert("--work", work, "--json").out)
    (resumed,) = [event for event in events if event["event"] == "resume"]
    assert (resumed["work"], resumed["is_published"]) == (str(work), True)
    assert not steps_of(events, "measure")


def test_a_layer_for_multi_token_prediction_is_left_out_by_name(
    convert: Command, exl: Command, tmp_path: Path
) -> None:
    shape = {**SHAPE, "first_k_dense_replace": 3}  # without experts
    folder = MtpCheckpoint("glm4-moe", **shape).save(tmp_path / "mtp")
    done = convert(source=folder)
    assert done.code == 0
    assert "layer for multi-token prediction: left out: it is not converted" in done.err
    line = exl("generate", tmp_path / "out", "-p", "a", "--mtp").error_line(3)
    assert "the files have no layer for multi-token prediction" in line


def test_calibration_rows_without_text_are_refused_without_naming_other_options(
    convert: Command, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "a text", "id": 1}\n')
    line = convert("--calibration", rows).error_line(2)
    assert "rows.jsonl, line 1: there is no column 'text' (got body, id)" in line
    assert line.endswith("Rename the column that holds the text to 'text'.")


def test_several_problems_print_several_lines(convert: Command, tmp_path: Path) -> None:
    done = convert("--head-bits", 7, "--shard-size", "1kB", "--measurement", tmp_path / "none")
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("exl: error: ") for line in lines)


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (("--shard-size", "many"), 2, "--shard-size"),
        (("--shard-size", "0"), 2, "--shard-size"),
        (("--calibration", "no/such.jsonl"), 2, "no/such.jsonl"),
        (("--device", "tpu"), 2, "tpu"),
        (("--model", "other"), 2, "two models"),
        (("--bits", "nan"), 2, "--bits"),
        (("--seed", 2**64), 2, "--seed is out of range"),
        (("-o", "."), 2, "-o is not a name"),
        (("-o", "new/.."), 2, "-o is not a name"),
    ],
)
def test_bad_options(args: tuple[object, ...], code: int, expected: str, convert: Command) -> None:
    assert expected in convert(*args).error_line(code)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_and_prints_the_resume_command(
    number: signal.Signals,
    convert: Command,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = conversion._write_event

    def write_event(kind: str, started: float, facts: Any) -> None:
        real(kind, started, facts)
        if (kind, facts.get("stage"), facts.get("done")) == ("step", "quantize", 1):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(conversion, "_write_event", write_event)
    before = signal.getsignal(number)
    stopped = convert("--json")
    assert stopped.code == 128 + number
    assert signal.getsignal(number) is before
    assert stopped.err.startswith(
        f"stopped; resume with: exl convert --output {tmp_path / 'out'} {source}"
    )
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(conversion, "_write_event", real)
    went_on = convert("--json")
    assert went_on.code == 0
    events = events_of(went_on.out)
    assert not steps_of(events, "measure")  # finished stages are not run again
    assert steps_of(events, "quantize")[-1] == (2, 3)
    assert convert(out="whole").code == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_text_that_is_too_short_leaves_no_files(exl: Command, source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Hi.", encoding="utf-8")
    done = exl("convert", source, "-o", tmp_path / "out", "--calibration", text, "--rows", 2)
    assert "too short" in done.error_line(2)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.thorough
def test_progress_bar_is_erased_before_the_resume_command(source: Path, tmp_path: Path) -> None:
    terminal = Terminal("convert", str(source), "-o", str(tmp_path / "out"))
    try:
        terminal.expect("2/9 calibrate.* left ")
        terminal.type("\x03")
        assert terminal.wait() == 130
    finally:
        terminal.close()
    erased, last = terminal.seen.rsplit("\x1b[2K", 1)  # erases the progress bar
    assert "\x1b[?25h" in erased  # shows the cursor again
    assert last == f"stopped; resume with: exl convert --output {tmp_path}/out {source}\r\n"
    assert (tmp_path / "out.work").is_dir()


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_real_conversion_stops_within_seconds(tmp_path: Path) -> None:
    """Interrupts the sensitivity stage during the gradients of the head, and the stages that
    measure and quantize in the middle of a layer. The limit counts processor seconds, because the
    machine may be busy."""
    text = Path(__file__).resolve().parents[2] / "docs/experiments/cuda-linear.md"
    args = ["convert", "smollm2", "-o", str(tmp_path / "out"), "--calibration", str(text), "--json"]
    args += ["--rows", "8", "--length", "512", "--fast"]
    for stage, done in (("sensitivity", 30), ("measure", 0), ("measure", 2), ("quantize", 1)):
        process = subprocess.Popen(
            [sys.executable, "-m", "exl_cli", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "EXL_THREADS": "2"},
        )
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            for line in process.stdout:
                event = json.loads(line)
                if (event.get("stage"), event.get("done")) == (stage, done):
                    break
            time.sleep(1.0)
            asked = time.monotonic(), processor_s(process.pid)
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            assert process.stderr.read().splitlines()[-1].startswith("stopped; resume with: ")
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 130
        cpu_s = used.ru_utime + used.ru_stime - asked[1]
        print(f"{stage} {done}: {time.monotonic() - asked[0]:.2f} s, {cpu_s:.2f} s of processors")
        assert cpu_s < 6.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--codebook", "mcg"), "--codebook does not go with --format exl2"),
        (("--head-bits", "2.5"), "--head-bits 2, 3, 4, 5, 6, 8"),
        (("--format", "exl3", "--bits", "0.5"), "--bits of "),
        (("--format", "exl3", "--bits", "99"), "--bits of "),
        (
            ("--format", "exl3", "--bits", "9", "--codebook", "mcg", "--head-bits", "2.5"),
            "--head-bits 1, 2, 3, 4, 5, 6, 7, 8, 16",
        ),
    ],
)
def test_formats_name_the_options_that_they_do_not_have(
    convert: Command, options: tuple[str, ...], message: str
) -> None:
    assert message in convert(*options).error_line(2)
