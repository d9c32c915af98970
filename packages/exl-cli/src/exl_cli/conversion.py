"""Runs `exl convert`: calibration rows, quality gate, progress events and the final summary.

The job (`exl_core/convert/job.py`) fixes the order of the stages. This module supplies the parts
that lie in higher layers, such as the gate and the output. It imports torch, so the command
imports it only when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from exl_cli import output
from exl_cli.interrupt import StopSignals
from exl_cli.render import (
    facts_table,
    format_bytes,
    print_answer,
    print_note,
    stages_progress,
)
from exl_core.convert.calibration import (
    AT_ONCE,
    CalibrationRows,
    rows_at_once,
    rows_of_model,
    rows_of_texts,
)
from exl_core.convert.events import ConversionStopped, Event, Stage
from exl_core.convert.job import (
    RECORD_NAME,
    SELF,
    Conversion,
    GateOutcome,
    Hooks,
    convert_model,
)
from exl_core.convert.plan import ConvertOptions, Format
from exl_core.convert.preflight import memory_needed
from exl_core.convert.repack import repack as copy_tensors
from exl_core.convert.target import target_of
from exl_core.errors import ExlError, RequestError
from exl_core.files import read_json_object
from exl_core.ops.backends.cuda.device import parse_device
from exl_core.ops.weights import Codebook
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.open import gguf_fields, open_checkpoint, open_model
from exl_core.session.resolve import resolve_model
from exl_core.tokenizer.detect import load_tokenizer
from exl_eval.gate import figures_of, measure_gate
from exl_eval.texts import Text, read_dataset, read_text

ROWS, FAST_ROWS, GPU_ROWS = 64, 16, 256
"""Calibration rows by default: `GPU_ROWS` for EXL3 on a GPU, where they take seconds."""
DATASET_ROWS = 4096
"""Rows read from a data set. More than calibration uses, whatever the length of the documents."""

SCHEMA_VERSION = 1
MANY_STEPS, SECONDS_BETWEEN_STEPS = 500, 1.0
"""A stage with more than `MANY_STEPS` steps counts tokens or bytes. It reports one of them a
second."""

EXLLAMAV2_FAMILIES = (
    *("llama", "yi", "mistral", "mixtral", "qwen2", "qwen3", "qwen3moe", "phi3", "granite"),
    *("gemma", "gemma2", "gemma3", "cohere", "cohere2", "starcoder2", "dbrx", "minicpm"),
    *("internlm2", "index", "orion", "glm4"),
)
"""Families that exllamav2 loads too. It takes any other model for a Llama."""

Say = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """The options of the command. None: this module chooses."""

    spec: str | None
    out: Path
    bits: float
    head_bits: float
    target: Format
    codebook: Codebook | None
    calibration: str
    rows: int | None
    length: int
    is_fast: bool
    seed: int
    measurement: Path | None
    work: Path | None
    shard_bytes: int
    device: str


def repack(spec: str | None, out: Path, shard_bytes: int, *, from_bin: bool) -> None:
    """Copies the model's tensors to other weight files, and says how many there are."""
    source = Path(spec) if from_bin and spec is not None else resolve_model(spec)
    count = copy_tensors(source, out, shard_bytes, from_bin=from_bin)
    print_answer(f"{out}: {count} weight file{'s' if count > 1 else ''}")


def run(wish: Wish, *, command: str, force: bool, is_json: bool, is_quiet: bool) -> None:
    """The whole command. Ctrl-C and SIGTERM stop it at once.

    The last line on stderr is then the command that resumes the conversion.
    """
    started = time.monotonic()
    text = None if wish.calibration == SELF else calibration_text(wish.calibration)
    wanted = _conversion(wish, text)
    given = None if text is None else _taken_rows(wanted, text)
    torch.set_num_threads(1)  # kernels and stages have threads of their own
    with StopSignals() as signals:
        try:
            with _saying(is_json=is_json, is_quiet=is_quiet) as say:
                hooks = Hooks(
                    make_rows=lambda step: given or _written_rows(wanted, step),
                    gate=lambda source, candidate: _gate(wanted, source, candidate, say),
                    on_event=say,
                    should_stop=lambda: signals.is_set,
                    command=command,
                )
                out = convert_model(wanted, hooks, force=force)
        except (ConversionStopped, KeyboardInterrupt) as stop:
            if not is_quiet:
                print_note(f"stopped; resume with: {command}")
            raise typer.Exit(signals.code) from stop
    record = read_json_object(out / RECORD_NAME, ExlError)
    if is_json:
        facts = {"bits_per_weight": record["bits_per_weight"], "gate": record["gate"]}
        _write_event("done", started, {"out": str(out), **facts})
    else:
        _show(out, record, time.monotonic() - started)


def calibration_text(spec: str) -> Text:
    """Text of a file, or of the training split of a data set."""
    path = Path(spec)
    looks_like_file = path.suffix in (".txt", ".jsonl", ".ndjson", ".parquet", ".md")
    if path.exists() or looks_like_file or path.is_absolute():
        found = read_text(path, column=None)
        return Text(found.documents, path.name)
    return read_dataset(spec, split="train", column=None, rows=DATASET_ROWS)


def _conversion(wish: Wish, text: Text | None) -> Conversion:
    if wish.out.name in {"", ".."}:
        raise RequestError(
            "-o is not a name", where=wish.out, expected="the name of a directory to create"
        )
    if wish.codebook is not None and wish.target == "exl2":
        raise RequestError(
            "--codebook does not go with --format exl2", next_step="Only EXL3 has codebooks."
        )
    path, device = resolve_model(wish.spec), parse_device(wish.device)
    _, config, _ = open_checkpoint(path)
    rows = GPU_ROWS if wish.target == "exl3" and device != "cpu" else ROWS
    rows = wish.rows or (FAST_ROWS if wish.is_fast else rows)
    return Conversion(
        source=path,
        out=wish.out,
        bits=wish.bits,
        rows=rows,
        length=min(wish.length, config.max_seq_len),
        calibration=SELF if text is None else text.name,
        calibration_sha256=None if text is None else text.sha256,
        shard_bytes=wish.shard_bytes,
        stages=ConvertOptions(
            device=device,
            head_bits=int(wish.head_bits) if wish.head_bits.is_integer() else wish.head_bits,
            seed=wish.seed,
            fast=wish.is_fast,
            format=wish.target,
            codebook=wish.codebook or "mul1",
        ),
        measurement=wish.measurement,
        work=wish.work,
    )


def _taken_rows(wanted: Conversion, text: Text) -> CalibrationRows:
    """Calibration rows from a text. A text that is too short is reported before the job starts."""
    source, _, _ = open_checkpoint(wanted.source)
    tokenizer = load_tokenizer(wanted.source, gguf_fields(source))
    return rows_of_texts(
        text.documents, tokenizer, rows=wanted.rows, length=wanted.length, name=text.name
    )


def _written_rows(wanted: Conversion, step: Callable[[int, int], None]) -> CalibrationRows:
    """Calibration rows that the model generates.

    On a CPU, generation is limited to the memory that one layer of the conversion needs with one
    thread. The number of rows generated at the same time may influence the text; the number of
    threads must not, so the limit does not depend on it.
    """
    options = wanted.stages
    files = open_model(wanted.source)
    how, at_once = LoadOptions(device=options.device), AT_ONCE
    if options.device == "cpu":
        memory = memory_needed(files.config, wanted.rows, wanted.length, 1, target_of(options))
        at_once, cache_bytes = rows_at_once(files.config, wanted.length, memory)
        how = LoadOptions(device="cpu", held_bytes=max(0, memory - cache_bytes))
    loaded = load_model(files, how)
    return rows_of_model(
        loaded,
        rows=wanted.rows,
        length=wanted.length,
        seed=options.seed,
        at_once=at_once,
        on_progress=step,
    )


def _gate(wanted: Conversion, source: Path, candidate: Path, say: Say) -> GateOutcome:
    """Divergence of the converted model from its source. Both models stream their weights from
    disk, so that two models of any size fit into memory."""

    def on_window(done: int, total: int, kld: float) -> None:
        say(Event("step", Stage.GATE, done, total, {"kld": kld}))

    how = LoadOptions(device=wanted.stages.device, held_bytes=0)
    result = measure_gate(
        load_model(str(candidate), how),
        load_model(str(source), how),
        bits=wanted.bits,
        head_bits=wanted.stages.head_bits,
        on_window=on_window,
    )
    return GateOutcome(figures_of(result), result.fault)


@contextmanager
def _saying(*, is_json: bool, is_quiet: bool) -> Iterator[Say]:
    """Receiver of events: JSON lines on stdout, or a progress bar where stderr is a terminal."""
    started = time.monotonic()
    if is_json:
        last = -SECONDS_BETWEEN_STEPS

        def write(event: Event) -> None:
            nonlocal last
            now = time.monotonic()
            if event.kind == "step" and event.total > MANY_STEPS:
                if now - last < SECONDS_BETWEEN_STEPS:
                    return
                last = now
            _write_event(event.kind, started, _facts(event))

        yield write
        return
    with stages_progress(is_quiet=is_quiet) as show:

        def say(event: Event) -> None:
            if event.kind == "resume" and not is_quiet:
                is_published, work = event.facts["is_published"], event.facts["work"]
                found = (
                    "this conversion is finished"
                    if is_published
                    else "continuing the unfinished conversion"
                )
                print_note(f"{found}; its intermediate results are in {work}")
            if show is not None and event.kind in ("stage", "step"):
                number = list(Stage).index(event.stage) + 1
                show(f"{number}/{len(Stage)} {event.stage.value}", event.done, event.total)
            for incident in _incidents(event):
                if not is_quiet:
                    print_note(incident)

        yield say


def _incidents(event: Event) -> list[str]:
    found = event.facts.get("incidents", ())
    assert isinstance(found, list | tuple)
    return [f"{matrix}: {kind}: {detail}" for matrix, kind, detail in found]


def _facts(event: Event) -> dict[str, object]:
    progress = {"done": event.done, "total": event.total} if event.kind == "step" else {}
    return {"stage": event.stage.value, **progress, **event.facts}


def _write_event(kind: str, started: float, facts: Mapping[str, object]) -> None:
    seconds = round(time.monotonic() - started, 3)
    output.write_json(
        {"schema_version": SCHEMA_VERSION, "event": kind, "seconds": seconds, **facts}
    )


def _show(out: Path, record: Mapping[str, object], seconds: float) -> None:
    gate, options = record["gate"], record["options"]
    assert isinstance(gate, dict)
    assert isinstance(options, dict)
    figures = gate["figures"]
    size = sum(path.stat().st_size for path in out.iterdir())
    kld, ratio = figures["kld"], figures["ln_ppl_ratio"]
    incidents = sum(len(matrix["incidents"]) for matrix in _matrices(record))
    family = open_checkpoint(out)[1].arch.name
    is_known = family in EXLLAMAV2_FAMILIES or "format" in options  # only EXL2 does not name it
    print_answer(
        facts_table(
            {
                "model": f"{out}, {format_bytes(size)}",
                "bits": f"{record['bits_per_weight']:.4f} per weight of the layers, target "
                f"{record['bits']:g}; head {options['head_bits']}",
                "divergence": f"{kld['mean']:.5f} ± {kld['stderr']:.5f} nats per token from the "
                f"source (the limit is {figures['limit_nats']:.3g})",
                "same top": f"{figures['same_top']:.2%} ± {figures['same_top_stderr']:.2%}",
                "perplexity": f"{figures['perplexity']:.4f}, the source's "
                f"{figures['reference_perplexity']:.4f}; ln of the ratio {ratio:.5f} ± "
                f"{figures['ln_ppl_ratio_stderr']:.5f}",
                "held-out text": f"{figures['tokens']} tokens, sha256 {figures['text_sha256']}",
                **({"incidents": f"{incidents}, see {RECORD_NAME}"} if incidents else {}),
                **({} if is_known else {"loads in": _only_exl(family)}),
                "time": f"{seconds:.0f} s",
            }
        )
    )


def _only_exl(family: str) -> str:
    return f"exl; exllamav2 does not know models of the family {family}"


def _matrices(record: Mapping[str, object]) -> list[dict[str, list[object]]]:
    found = record["matrices"]
    assert isinstance(found, list)
    return found
