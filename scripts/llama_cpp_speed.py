"""Time llama.cpp on a GGUF file, or requantize it. Usage: llama_cpp_speed.py speed IN.gguf ...

`speed` times the same work as `exl bench`: a prompt in passes of at most 512 tokens, up to the
logits of its last token; then single tokens after a prompt of one token. One repetition runs
unmeasured first. The last line is JSON. `requantize IN.gguf OUT.gguf` writes Q4_0, which llama.cpp
repacks for its fastest kernels. This is a separate process so that two thread pools never share the
cores.

llama.cpp's AMX kernels have crashed on batches. This builds it with all instruction sets but AMX:

  CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
              -DGGML_AVX_VNNI=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON
              -DGGML_AVX512_BF16=ON"   (omit the sets that /proc/cpuinfo does not list)
  python -m pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp

PASS_TOKENS = 512


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("what", choices=("speed", "requantize"))
    parser.add_argument("model", metavar="IN.gguf", type=Path)
    parser.add_argument("out", metavar="OUT.gguf", type=Path, nargs="?")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if args.what == "speed":
        print(json.dumps(speed(args.model, args.prefill, args.decode, args.threads, args.repeat)))
        return 0
    if args.out is None:
        parser.error("requantize needs OUT.gguf")
    return requantize(args.model, args.out, args.threads)


def speed(path: Path, prefill: int, decode: int, threads: int, repeat: int) -> dict[str, object]:
    """Tokens per second, medians of `repeat` repetitions."""
    model: Any = llama_cpp.Llama(
        str(path),
        n_ctx=max(prefill, decode + 1) + PASS_TOKENS,
        n_batch=PASS_TOKENS,
        n_ubatch=PASS_TOKENS,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    ids = [100 + i % 20000 for i in range(max(prefill, decode))]
    prefill_rates, decode_rates = [], []
    for _ in range(repeat + 1):
        model.reset()
        started = time.perf_counter()
        model.eval(ids[:prefill])
        prefill_rates.append(prefill / (time.perf_counter() - started))
        model.reset()
        model.eval(ids[:1])
        started = time.perf_counter()
        for token_id in ids[:decode]:
            model.eval([token_id])
        decode_rates.append(decode / (time.perf_counter() - started))
    return {
        "version": llama_cpp.__version__,
        "features": " ".join(llama_cpp.llama_print_system_info().decode().split()),
        "prefill_tok_s": median(prefill_rates[1:]),
        "decode_tok_s": median(decode_rates[1:]),
    }


def requantize(source: Path, target: Path, threads: int) -> int:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    params.nthread = threads
    failed: int = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
