"""Other quantizers that `compare_exl3.py` compares with: exllamav3's converter, llama.cpp's.

exllamav3's converter runs in a process of its own. `pip install --no-deps exllamav3==1.6.5` (and
the packages that its import names) compiles its extension when it is first imported. How to build
the extension faster, and which line of exllamav3 hides the tensors of Gemma 3's text models from
it, is in docs/experiments/exl3-writer.md.

llama.cpp is called through llama-cpp-py-sync (`pip install llama-cpp-py-sync cffi`), which comes
with llama.cpp's libraries. Its quantizer takes an importance matrix from memory. The quantized file
is evaluated by llama.cpp on the CPU.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from torch import Tensor

from exl_core.arch.modules import Kind, module_table
from exl_core.convert import side_files
from exl_core.convert.layers import (
    embed_rows,
    in_file_order,
    read_layer,
    read_tensor,
    stored_vector,
)
from exl_core.convert.parallel import worker_pool
from exl_core.convert.passes import CapturingPass, LayerFunction
from exl_core.engine.score import TextPasses
from exl_core.errors import ExlError, RequestError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.session.load import load_model
from exl_core.session.open import open_checkpoint
from exl_core.settings import available_cpus

LLAMA_BINDINGS = "llama_cpp_py_sync._cffi_bindings"
LLAMA_TYPES = {
    **{"Q4_0": 2, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q4_K_S": 14, "Q4_K_M": 15},
    **{"IQ2_XS": 20, "IQ3_XXS": 23, "IQ4_NL": 25, "IQ3_M": 27, "IQ2_M": 29, "IQ4_XS": 30},
}
"""Numbers of `enum llama_ftype`."""

Q8_0 = 8  # of `enum ggml_type`, for the embedding and with it a tied head
LLAMA_ROWS = 512  # tokens per pass


def require_exllamav3() -> None:
    """Raises if exllamav3 cannot be imported, with the last line of the import's error."""
    command = [sys.executable, "-c", "import exllamav3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RequestError("exllamav3 cannot be imported", got=_last_line(done.stderr))


def convert_by_exllamav3(source: Path, out: Path, *, bits: float, head_bits: int) -> None:
    """Runs exllamav3's converter on a folder of safetensors with a `tokenizer.json`.

    What it prints goes to a file beside `out` that ends in `.log`.
    """
    if not (source / "tokenizer.json").is_file():
        raise RequestError("exllamav3 needs a tokenizer.json", where=source)
    partial, work, log = (out.with_name(out.name + end) for end in (".partial", ".work", ".log"))
    for folder in (partial, work):
        shutil.rmtree(folder, ignore_errors=True)
    options = {"-i": source, "-o": partial, "-w": work, "-b": bits, "-hb": head_bits}
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "exllamav3.conversion.convert_model", *words]
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not (partial / "config.json").is_file():
        last = _last_line(log.read_text(encoding="utf-8", errors="replace"))
        raise ExlError("exllamav3's converter failed", where=log, got=last)
    partial.rename(out)
    shutil.rmtree(work, ignore_errors=True)


def write_safetensors(path: Path, folder: Path) -> Path:
    """Writes the model of a GGUF file as float16 safetensors, with its configuration and tokenizer,
    under canonical names."""
    source, config, quantization = open_checkpoint(path)
    checkpoint = Checkpoint(source, config, quantization)
    folder.mkdir(parents=True, exist_ok=True)
    side_files.collect(path, source, config, {}).write(folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del settings["quantization_config"]
    text = json.dumps({**settings, "torch_dtype": "float16"}, indent=4)
    (folder / "config.json").write_text(text, encoding="utf-8")
    tensors = {}
    for row in module_table(config).rows:
        values = read_tensor(checkpoint, row.name)
        if row.is_matrix or row.kind is Kind.BIAS:
            tensors[row.name] = in_file_order(row, values).half().contiguous()
        else:
            tensors[row.name] = stored_vector(row, values, repeats_norms=False).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def compare_logits_in_exllamav3(
    folder: Path, token_ids: Sequence[int], device: str
) -> dict[str, object]:
    """Differences of the logits that exllamav3 and exl compute from the same EXL3 files."""
    if not device.startswith("cuda"):
        raise RequestError("exllamav3 needs a GPU", got=device)
    if not folder.is_dir():
        raise RequestError("there is no EXL3 to load", where=folder)
    exllamav3 = importlib.import_module("exllamav3")
    model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(folder)))
    model.load(device=device if ":" in device else f"{device}:0", progressbar=False)
    rows = torch.tensor([token_ids[:-1]])
    theirs = model.forward(rows, {"attn_mode": "flash_attn_nc"})[0].float().cpu()  # [T, vocab]
    model.unload()
    loaded = load_model(folder, device=device)
    passes = TextPasses(loaded.model, len(token_ids)).logits(token_ids)
    ours = torch.cat([logits.float().cpu() for _, logits in passes])  # [T, vocab]
    loaded.unload()
    width = min(ours.shape[1], theirs.shape[1])  # one of them may be padded
    ours, theirs = ours[:, :width], theirs[:, :width]
    log_p, log_q = ours.log_softmax(-1), theirs.log_softmax(-1)
    return {
        "largest_difference": float((ours - theirs).abs().max()),
        "largest_logit": float(ours.abs().max()),
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "same_top": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        "tokens": len(ours),
    }


def require_llama_cpp(kinds: Sequence[str]) -> None:
    """Raises for unknown types, or if llama.cpp's library cannot be loaded."""
    for kind in kinds:
        if kind not in LLAMA_TYPES:
            raise RequestError("no such type", expected=", ".join(LLAMA_TYPES), got=kind)
    command = [sys.executable, "-c", f"import {LLAMA_BINDINGS} as b; b.get_lib()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RequestError(
            "llama.cpp cannot be loaded",
            got=_last_line(done.stderr),
            next_step="python -m pip install llama-cpp-py-sync cffi",
        )


def importance_matrix(path: Path, token_ids: Tensor, device_name: str) -> dict[str, Tensor]:
    """Mean square of each input feature of the layers' matrices, float32 [in_features] by name in
    GGUF files, over token_ids int64 [rows, length]. Experts are left out."""
    source, config, quantization = open_checkpoint(path)
    checkpoint = Checkpoint(source, config, quantization)
    device = torch.device(device_name)
    found: dict[str, Tensor] = {}
    with torch.no_grad(), worker_pool(device, lambda: False) as workers:
        states = embed_rows(checkpoint, config, token_ids).to(device)
        for layer in range(config.num_layers):
            weights = read_layer(checkpoint, config, layer, device)
            function = LayerFunction(config, layer, weights.vectors(), weights.products())
            run = CapturingPass(function, states, device, workers)
            for keys in run.groups():
                squares = [x.flatten(0, 1).float().square().sum(0) for x in run.inputs]
                mean = torch.stack(squares).sum(0) / token_ids.numel()
                found |= {weights.rows[key].own_name("gguf"): mean.cpu() for key in keys}
    return found


def quantize_by_llama_cpp(
    source: Path, out: Path, kind: str, importance: Mapping[str, Tensor]
) -> None:
    """Writes `out`. The embedding, which is the head of a tied model, becomes Q8_0."""
    ffi, lib = _llama_cpp()
    values = ffi.new("struct llama_model_imatrix_data[]", len(importance) + 1)  # the last is empty
    held = []  # memory that `values` points to
    for entry, (name, means) in zip(values, importance.items(), strict=False):
        held.append((ffi.new("char[]", name.encode()), ffi.new("float[]", means.tolist())))
        entry.name, entry.data = held[-1]
        entry.size = len(means)
    params = ffi.new("llama_model_quantize_params *", lib.llama_model_quantize_default_params())
    params.nthread, params.ftype = available_cpus(), LLAMA_TYPES[kind]
    params.allow_requantize, params.token_embedding_type = True, Q8_0
    params.imatrix = values
    code = lib.llama_model_quantize(str(source).encode(), str(out).encode(), params)
    if code:
        raise ExlError("llama.cpp's quantizer failed", where=kind, got=f"code {code}")


def gguf_bits_per_weight(path: Path) -> float:
    """Stored bits of the matrices of the layers, per weight."""
    named = [one for one in GGUFReader(path).tensors if one.name.startswith("blk.")]
    matrices = [one for one in named if len(one.shape) > 1]
    weights = sum(prod(int(size) for size in one.shape) for one in matrices)
    return round(sum(int(one.n_bytes) for one in matrices) * 8 / weights, 4)


class LlamaPasses:
    """Predictions of llama.cpp along texts, with the method `logits` of exl's `TextPasses`."""

    def __init__(self, path: Path, longest: int, device: str) -> None:
        """Loads a file, for texts of at most `longest` tokens. Computes on the CPU; the logits are
        moved to `device`."""
        self._device = device
        self._ffi, self._lib = ffi, lib = _llama_cpp()
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        if self._model == ffi.NULL:
            raise ExlError("llama.cpp cannot load the file", where=path)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = longest, LLAMA_ROWS, LLAMA_ROWS
        params.n_threads = params.n_threads_batch = available_cpus()
        self._context = lib.llama_init_from_model(self._model, params)
        if self._context == ffi.NULL:
            raise ExlError("llama.cpp cannot make a context", where=path, got=f"{longest} tokens")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(LLAMA_ROWS, 0, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def logits(self, token_ids: Sequence[int], first: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yields `start` and logits float32 [n, vocab_size]: row i predicts token start + i. The
        next pass overwrites the logits."""
        lib, batch, rows = self._lib, self._batch, len(token_ids) - 1
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        for start in range(0, rows, LLAMA_ROWS):
            count = min(LLAMA_ROWS, rows - start)
            batch.n_tokens = count
            for row in range(count):
                batch.token[row], batch.pos[row] = token_ids[start + row], start + row
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, 1
            code = lib.llama_decode(self._context, batch)
            if code:
                raise ExlError("llama.cpp's pass failed", got=f"code {code}")
            size = count * self._vocab_size * 4
            memory = self._ffi.buffer(lib.llama_get_logits(self._context), size)
            found = torch.frombuffer(memory, dtype=torch.float32).view(count, self._vocab_size)
            skipped = max(0, first - 1 - start)
            if skipped < count:
                yield start + 1 + skipped, found[skipped:].to(self._device)


def _llama_cpp() -> tuple[Any, Any]:
    """The interface and the library, which then prints nothing."""
    bindings = importlib.import_module(LLAMA_BINDINGS)
    ffi, lib = bindings.get_ffi(), bindings.get_lib()
    lib.llama_log_set(_silence(ffi), ffi.NULL)
    return ffi, lib


_held: list[Any] = []  # the library calls it as long as the process lives


def _silence(ffi: Any) -> Any:
    if not _held:
        _held.append(
            ffi.callback("void(enum ggml_log_level, const char *, void *)", lambda *_: None)
        )
    return _held[0]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines() or ["no output"]
    return lines[-1][:300]
