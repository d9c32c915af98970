"""Entry point of the process that compiles a constraint before the engine's process does.

The process handles one job at a time. A job and its answer are one line of JSON each. Standard
input and standard output are the same socket to the parent. A job compiles a grammar for a
vocabulary of single bytes and special tokens. This is the work that the engine's process does next,
except for its larger token trie. The module imports neither torch nor any other package that is
slow to import.

The compiler cannot be interrupted. The parent kills the process at the time limit. The address
space is limited, so that a compiler that needs more memory aborts. The main thread reads the socket
and another thread compiles, so that the process ends with its parent even while it compiles.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from exl_core.constrain.json_recursion import has_finite_document

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SYSTEM_STACK_BYTES = 2 * 2**20  # glibc's stack of a thread if the stack size is unlimited
_LEAST_STACK_BYTES = 256 * 2**10
_NICENESS = 5  # below the priority of the engine's threads


def main(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    os.nice(_NICENESS)
    # Half of a default stack: a grammar whose nesting passes here does not overflow the stack of
    # the engine's process.
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack_bytes = _SYSTEM_STACK_BYTES if soft == resource.RLIM_INFINITY else soft
    threading.stack_size(max(stack_bytes // 2 // 4096 * 4096, _LEAST_STACK_BYTES))
    jobs: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_work, args=(jobs,), daemon=True).start()
    for line in sys.stdin.buffer:
        jobs.put(line)
    os._exit(0)  # the parent has ended; the compiler may still run


def _work(jobs: SimpleQueue[bytes]) -> None:
    import llguidance  # noqa: F401 - imported before the process reports that it is ready

    _answer({"is_ready": True})
    while True:
        try:
            answer = _try(**json.loads(jobs.get()))
        except MemoryError:
            answer = {"error": "it takes too much memory"}
        except RecursionError:
            answer = {"error": "it nests too deeply"}
        _answer(answer)


def _try(
    grammar: str, special: list[str], limits: dict[str, int], schema: object = None
) -> dict[str, Any]:
    """Compile one grammar and return the fields of an `Answer` (`trial.py`)."""
    from llguidance import LLMatcher, LLParserLimits

    native = LLParserLimits(**limits)  # type: ignore[arg-type]
    matcher = LLMatcher(_tokenizer(special), grammar, log_level=0, limits=native)
    if matcher.is_error():
        return {"error": matcher.get_error()}
    matcher.compute_bitmask()
    return {"error": "", "is_endless": not has_finite_document(schema)}


def _tokenizer(special: list[str]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(special)))


class _Bytes:
    """Tokenizer for llguidance with one token for each byte, the special tokens, and EOS.

    There is always at least one special token. Without any, llguidance panics when it reports an
    unknown one.
    """

    bos_token_id = None

    def __init__(self, special: list[str]) -> None:
        names = [text.encode() for text in special] or [b"<|none|>"]
        self.tokens = [bytes([i]) for i in range(256)] + names + [b""]
        self.special_token_ids = list(range(256, 256 + len(names)))
        self.eos_token_id = len(self.tokens) - 1

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
