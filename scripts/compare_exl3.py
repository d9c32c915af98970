"""Compare EXL3 with other quantizers on a whole model. Usage: compare_exl3.py MODEL TEXT ...

MODEL is a GGUF file or a folder of safetensors that is not quantized. For each of --rates, exl
converts it to EXL3, unless --no-exl3. Every result is compared with MODEL on the same windows of
TEXT, each of which begins with BOS if the tokenizer adds it to texts. Special tokens that TEXT
spells out are read as text.

  --exl2             exl's conversion to EXL2, whose least rate is about 2.1
  --exllamav3        exllamav3's converter, a process of its own; needs a GPU
  --llama TYPES      llama.cpp's quantizer with an importance matrix, on the CPU; needs a GGUF file
  --load-in-exllamav3  exllamav3 loads exl's EXL3, and computes logits of one window

  compare_exl3.py gemma.gguf wiki.txt --rates 2.0,2.5,3.0,4.0 --device cuda --exl2 --exllamav3
      --llama IQ4_XS,IQ3_XXS,Q2_K --load-in-exllamav3 --work DIR

exl's conversions and the importance matrix share rows of text that the model generates; conversions
to one format share one measurement. exllamav3 calibrates on its own text. `quantizer_peers.py` says
what to install.

Prints one JSON object per line. `bits` are stored bits of the layers' matrices per weight of the
model, with scales and padding. `ppl_ratio` is the perplexity over the source's, `kl` the mean
divergence from the source in nats; errors are standard errors over tokens. `seconds` are those of
the conversion, `stages` its parts. The line of a result that failed has an `error`, and the exit
code is then 1.

With --work, results and calibration rows stay in DIR. After an interruption the same command goes
on: a finished result is only evaluated again, and has no `seconds`. Other rates and quantizers can
be added later, by several processes at once too. DIR is for one model and one set of rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from exl_core.arch.modules import module_table
from exl_core.convert.calibration import AT_ONCE, CalibrationRows, rows_of_model
from exl_core.convert.events import Event
from exl_core.convert.job import MEASUREMENT_NAME, Conversion, GateOutcome, Hooks, convert_model
from exl_core.convert.plan import ConvertOptions, Format
from exl_core.engine.score import TextPasses
from exl_core.errors import ExlError, RequestError
from exl_core.ops.backends.cuda.device import parse_device
from exl_core.session.load import LoadedModel, load_model
from exl_core.session.open import open_checkpoint
from exl_core.session.resolve import resolve_model
from exl_eval.distributions import Positions
from exl_eval.divergence import RunningReference, longest_of
from exl_eval.estimates import mean_and_error
from exl_eval.styles import Layout, WindowOptions, lay_out
from exl_eval.texts import read_text
from quantizer_peers import (
    LLAMA_TYPES,
    LlamaPasses,
    compare_logits_in_exllamav3,
    convert_by_exllamav3,
    gguf_bits_per_weight,
    importance_matrix,
    quantize_by_llama_cpp,
    require_exllamav3,
    require_llama_cpp,
    write_safetensors,
)

HEAD_BITS = 6
RESULT = re.compile(r"exl[23]-[\d.]+")  # without the endings of unfinished ones
SHARD_BYTES = 8 << 30
Figures = dict[str, object]


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)  # kernels and stages have threads of their own
    try:
        check_peers(args)
        if args.work is not None:
            return compare(args, args.work)
        with tempfile.TemporaryDirectory(prefix="exl-compare-") as folder:
            return compare(args, Path(folder))
    except ExlError as error:
        print(f"compare_exl3: error: {error}", file=sys.stderr)
        return error.exit_code


def parse_arguments() -> argparse.Namespace:
    def rates(text: str) -> list[float]:
        return [float(rate) for rate in text.split(",")]

    def types(text: str) -> list[str]:
        return [name.upper() for name in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("text", metavar="TEXT", type=Path, help="file of the evaluation's text")
    parser.add_argument("--rates", type=rates, default=[2.0, 2.5, 3.0, 4.0], metavar="B,B")
    parser.add_argument("--device", default="auto", help="device of exl's work")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--ctx", type=int, default=2048, help="tokens per window")
    parser.add_argument("--rows", type=int, default=64, help="calibration rows")
    parser.add_argument("--length", type=int, default=1024, help="tokens per calibration row")
    parser.add_argument("--work", type=Path, metavar="DIR", help="default: a temporary folder")
    parser.add_argument("--no-exl3", action="store_true", help="no conversion to EXL3")
    parser.add_argument("--exl2", action="store_true")
    parser.add_argument("--exllamav3", action="store_true")
    parser.add_argument("--load-in-exllamav3", action="store_true")
    parser.add_argument(
        "--llama", type=types, default=[], metavar="TYPES", help=", ".join(LLAMA_TYPES)
    )
    return parser.parse_args()


def check_peers(args: argparse.Namespace) -> None:
    """Raises before any work if a program that the options name is missing."""
    if args.exllamav3 or args.load_in_exllamav3:
        require_exllamav3()
    if args.llama:
        require_llama_cpp(args.llama)
        if resolve_model(args.model).is_dir():
            raise RequestError("--llama needs a GGUF file", got=args.model)


def compare(args: argparse.Namespace, work: Path) -> int:
    """Makes and evaluates every result, prints its line, and returns the exit code."""
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench.open(args, work)
    has_failed = False
    for name, run in jobs(args, bench):
        try:
            figures = run()
        except ExlError as error:
            figures, has_failed = {"error": str(error)}, True
        say(name, figures)
    return int(has_failed)


def jobs(args: argparse.Namespace, bench: Bench) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Work that yields one line each, by name of the line."""
    for bits in () if args.no_exl3 else args.rates:
        yield f"exl3 {bits:g}", partial(bench.convert, "exl3", bits)
    for bits in args.rates if args.exl2 else ():
        yield f"exl2 {bits:g}", partial(bench.convert, "exl2", bits)
    for bits in args.rates if args.exllamav3 else ():
        yield f"exllamav3 {bits:g}", partial(bench.convert_by_exllamav3, bits)
    for kind in args.llama:
        yield f"llama.cpp {kind}", partial(bench.quantize_by_llama_cpp, kind)
    for bits in args.rates if args.load_in_exllamav3 else ():
        folder, ids = bench.result("exl3", bits), bench.layout.windows[0].token_ids
        load = partial(compare_logits_in_exllamav3, folder, ids, bench.device)
        yield f"exl3 {bits:g} in exllamav3", load


@dataclass
class Bench:
    """The source model, and what all results share: windows, calibration rows, measurements."""

    path: Path
    device: str
    work: Path
    source: LoadedModel
    layout: Layout
    running: RunningReference
    num_rows: int
    length: int

    @classmethod
    def open(cls, args: argparse.Namespace, work: Path) -> Bench:
        path, device = resolve_model(args.model), parse_device(args.device)
        source = load_model(path, device=device)
        # Some models, such as Gemma, are lost in a text that does not begin with BOS, and after
        # tokens that no text has, such as the <unk> that WikiText spells out.
        bos = "each" if source.tokenizer.adds_bos else "none"
        options = WindowOptions(ctx=args.ctx, windows=args.windows, bos=bos, special_text=False)
        longest = source.config.max_seq_len
        layout = lay_out(read_text(args.text), source.tokenizer, options, longest)
        running = RunningReference(source, layout, source.config.vocab_size)
        length = min(args.length, longest)
        return cls(path, device, work, source, layout, running, args.rows, length)

    def result(self, kind: str, bits: float) -> Path:
        return self.work / f"{kind}-{bits:g}"

    @cached_property
    def rows(self) -> CalibrationRows:
        """Rows that the source generates; prints how long that took. Kept in a file."""
        path = self.work / "rows.safetensors"
        if path.is_file():
            with safe_open(path, "pt") as file:
                return CalibrationRows(file.get_tensor("token_ids"), **file.metadata())
        started = time.monotonic()
        rows = rows_of_model(
            self.source, rows=self.num_rows, length=self.length, seed=0, at_once=AT_ONCE
        )
        facts = {"sha256": rows.sha256, "description": rows.description}
        unfinished = path.with_suffix(f".{os.getpid()}")  # other processes see whole files only
        save_file({"token_ids": rows.token_ids}, unfinished, metadata=facts)
        unfinished.replace(path)
        say("calibration rows", {"tokens": rows.token_ids.numel(), **since(started)})
        return rows

    def measurement(self, format_: Format) -> Path | None:
        """That of any finished conversion to the format."""
        found = self.work.glob(f"{format_}-*/{MEASUREMENT_NAME}")
        return next((path for path in found if RESULT.fullmatch(path.parent.name)), None)

    @cached_property
    def safetensors(self) -> Path:
        """Folder with the source for exllamav3."""
        if self.path.is_dir():
            return self.path
        return write_safetensors(self.path, self.work / "source")

    @cached_property
    def importance(self) -> dict[str, torch.Tensor]:
        started = time.monotonic()
        found = importance_matrix(self.path, self.rows.token_ids[:AT_ONCE], self.device)
        say("importance matrix", {"matrices": len(found), **since(started)})
        return found

    def convert(self, format_: Format, bits: float) -> Figures:
        """Converts by exl, and evaluates."""
        out, facts = self.result(format_, bits), Figures()
        if not out.is_dir():
            rows, clock = self.rows, Clock()
            task = Conversion(
                source=self.path,
                out=out,
                bits=bits,
                rows=self.num_rows,
                length=self.length,
                calibration=rows.description,
                calibration_sha256=rows.sha256,
                shard_bytes=SHARD_BYTES,
                stages=ConvertOptions(device=self.device, head_bits=HEAD_BITS, format=format_),
                measurement=self.measurement(format_),
            )
            hooks = Hooks(
                make_rows=lambda _: rows,
                gate=lambda *_: GateOutcome({}, None),  # the evaluation takes its place
                on_event=clock.on_event,
                should_stop=lambda: False,
                command=" ".join(sys.argv),
            )
            convert_model(task, hooks)
            facts = clock.figures()
        return {"bits": bits_per_weight(out), **facts, **self.evaluate_folder(out)}

    def convert_by_exllamav3(self, bits: float) -> Figures:
        out, facts = self.result("exllamav3", bits), Figures()
        if not out.is_dir():
            source, started = self.safetensors, time.monotonic()
            convert_by_exllamav3(source, out, bits=bits, head_bits=HEAD_BITS)
            facts = since(started)
        return {"bits": bits_per_weight(out), **facts, **self.evaluate_folder(out)}

    def quantize_by_llama_cpp(self, kind: str) -> Figures:
        out, values, started = self.work / f"llama-{kind}.gguf", self.importance, time.monotonic()
        quantize_by_llama_cpp(self.path, out, kind, values)
        facts = since(started)
        with LlamaPasses(out, longest_of(self.layout), self.device) as passes:
            found = self.evaluate(cast(TextPasses, passes))  # has the method that is called
        return {"bits": gguf_bits_per_weight(out), **facts, **found}

    def evaluate_folder(self, folder: Path) -> Figures:
        loaded = load_model(folder, device=self.device)
        found = self.evaluate(TextPasses(loaded.model, longest_of(self.layout)))
        loaded.unload()
        return found

    def evaluate(self, passes: TextPasses) -> Figures:
        """Figures of all scored tokens of the windows."""
        windows = range(len(self.layout.windows))
        found = Positions.join(self.running.compare(number, passes) for number in windows)
        loss, loss_error = mean_and_error(found.nll - found.reference_nll)
        divergence, divergence_error = mean_and_error(found.kld)
        assert loss_error is not None, "windows have more than one token"
        assert divergence_error is not None, "windows have more than one token"
        return {
            "ppl_ratio": round(math.exp(loss), 5),
            "ppl_ratio_stderr": round(math.exp(loss) * loss_error, 5),
            "kl": round(divergence, 6),
            "kl_stderr": round(divergence_error, 6),
            "same_top": round(float(found.same_top.mean()), 5),
            "source_ppl": round(math.exp(float(found.reference_nll.mean())), 4),
            "tokens": len(found.kld),
        }


class Clock:
    """Seconds of a conversion and of its stages, from its events."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._begins: list[tuple[str, float]] = []

    def on_event(self, event: Event) -> None:
        if event.kind == "stage":
            self._begins.append((event.stage.value, time.monotonic()))

    def figures(self) -> Figures:
        now = time.monotonic()
        ends = [*(begin for _, begin in self._begins[1:]), now]
        begins = zip(self._begins, ends, strict=True)
        stages = {stage: round(end - begin, 1) for (stage, begin), end in begins}
        return {"seconds": round(now - self._started, 1), "stages": stages}


def bits_per_weight(folder: Path) -> float:
    """Stored bits of the matrices of the layers of a quantized model, per weight of the model."""
    source, config, _ = open_checkpoint(folder)
    rows = [row for row in module_table(config).rows if row.is_converted and row.layer is not None]
    stems = {row.stem for row in rows}
    size = sum(
        tensor.size_bytes
        for name, tensor in source.tensors.items()
        if name.rpartition(".")[0] in stems and not name.endswith(".bias")
    )
    return round(size * 8 / sum(math.prod(row.shape) for row in rows), 4)


def since(started: float) -> Figures:
    return {"seconds": round(time.monotonic() - started, 1)}


def say(name: str, figures: Figures) -> None:
    print(json.dumps({"result": name, **figures}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
