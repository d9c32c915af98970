"""Measure the overhead of the HTTP server over the engine alone.

    python scripts/measure_server.py [MODEL] [--rounds N] [--clients N] [--tokens N] [--threads N]

The server is a separate process. The clients and the engine that it is compared with run in this
process. Server and engine alternate; ratios are medians over the rounds. The last line is one JSON
object:

    throughput_ratio      tokens per second of all clients, divided by those of the engine alone at
                          the same batch size
    added_ms_per_token    time of one client from sending the request to the last token, minus the
                          engine's time for the same reply, per token
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from selectors import EVENT_READ, DefaultSelector
from statistics import median
from typing import cast

import torch

from exl_core.engine.engine import EngineOptions
from exl_core.generate.dynamic import DynamicGenerator
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, LoadOptions, load_model

CACHE_TOKENS = 32768


def prompts_of(count: int, number: int) -> list[str]:
    """Prompts of similar length that share no prefix."""
    return [f"{number} {i}: Here is a long story about the sea. " for i in range(count)]


def engine_s(generator: DynamicGenerator, prompts: list[str], tokens: int) -> float:
    started = time.perf_counter()
    generator.generate(prompts, max_tokens=tokens, sampler=SamplerParams(temperature=0))
    return time.perf_counter() - started


def clients_s(port: int, prompts: list[str], tokens: int) -> float:
    """Seconds until all clients, which stream concurrently, have their replies. Checks the length
    of each reply. The clients only read, because their processor time is lost to the server."""
    started = time.perf_counter()
    with DefaultSelector() as waiting:
        for prompt in prompts:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(request_for(prompt, tokens))
            waiting.register(connection, EVENT_READ, bytearray())
        while waiting.get_map():
            for key, _ in waiting.select():
                connection, last = cast(socket.socket, key.fileobj), key.data
                piece = connection.recv(65536)
                last += piece
                del last[:-2000]
                if not piece:
                    waiting.unregister(connection)
                    connection.close()
                    found = re.search(rb'"completion_tokens":(\d+)', last)
                    assert found and int(found[1]) == tokens, last
    return time.perf_counter() - started


def request_for(prompt: str, tokens: int) -> bytes:
    fields = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {str(i): -100 for i in (0, 2)},  # bans SmolLM2's end-of-text tokens
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def serving(arguments: argparse.Namespace) -> Iterator[int]:
    command = [sys.executable, "-m", "exl_cli", "serve-lite", "--port", "0", "--max-batch"]
    command += [str(arguments.clients), "--cache-tokens", str(CACHE_TOKENS)]
    command += [] if arguments.model is None else ["-m", arguments.model]
    command += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://[^:]+:(\d+)", line)
            if found is None:
                raise SystemExit(line + process.stderr.read())
            yield int(found[1])
        finally:
            process.terminate()


def measure(loaded: LoadedModel, port: int, arguments: argparse.Namespace) -> dict[str, object]:
    options = EngineOptions(cache_tokens=CACHE_TOKENS, max_batch=arguments.clients)
    generator = DynamicGenerator(loaded, options)
    tokens = arguments.tokens
    ratios, rates, added, clients_cpu_s = [], [], [], []
    for number in range(arguments.rounds + 1):
        many, one = prompts_of(arguments.clients, number), prompts_of(1, 1000 + number)
        alone_s = engine_s(generator, many, tokens)
        cpu_s = time.thread_time()
        served_s = clients_s(port, many, tokens)
        cpu_s = time.thread_time() - cpu_s
        single_s = engine_s(generator, one, tokens)
        served_single_s = clients_s(port, one, tokens)
        if number:  # the first round warms up
            ratios.append(alone_s / served_s)
            rates.append([arguments.clients * tokens / s for s in (alone_s, served_s)])
            clients_cpu_s.append(cpu_s / served_s)
            added.append(1000 * (served_single_s - single_s) / tokens)
    return {
        "model": loaded.name,
        "threads": loaded.model.ops.threads,
        "clients": arguments.clients,
        "tokens": tokens,
        "rounds": arguments.rounds,
        "throughput_ratio": round(median(ratios), 3),
        "throughput_ratios": [round(ratio, 3) for ratio in ratios],
        "clients_share_of_a_core": round(median(clients_cpu_s), 3),
        "engine_tok_s": round(median(rate for rate, _ in rates), 1),
        "server_tok_s": round(median(rate for _, rate in rates), 1),
        "added_ms_per_token": round(median(added), 3),
        "added_ms_of_rounds": [round(ms, 3) for ms in added],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(arguments.model, LoadOptions(threads=arguments.threads))
    with serving(arguments) as port:
        print(json.dumps(measure(loaded, port, arguments)))


if __name__ == "__main__":
    main()
