"""Typed errors: where, what, expected, got and the next step, as fields and as one line.

The command line turns an `ExlError` into one line on stderr and the class's exit code. Any other
exception is a bug and shows its traceback.

Exit codes: 1 a failure while running, 2 a request that cannot be served as written, 3 a model that
cannot be found, read or trusted, 4 not enough memory, 5 no usable GPU, 6 no space on a disk, 7 a
result that is not good enough to be published. (130 is Ctrl-C, 141 a closed pipe and 143 a
conversion that SIGTERM stopped; the command line owns those.)
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """`text` with control characters escaped, as in `\\x1b`.

    Names come from untrusted files, and a terminal would execute escape sequences in them.
    """
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if unicodedata.category(char) == "Cc"
        else char
        for char in text
    )


class ExlError(Exception):
    """A failure that a user can act on. Only `what` is required; the other fields add detail."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        got: object = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.expected = None if expected is None else str(expected)
        self.got = None if got is None else str(got)
        self.next_step = next_step
        super().__init__(self._line())

    def _line(self) -> str:
        line = self.what if self.where is None else f"{self.where}: {self.what}"
        facts = []
        if self.expected is not None:
            facts.append(f"expected {self.expected}")
        if self.got is not None:
            facts.append(f"got {self.got}")
        if facts:
            line += f" ({', '.join(facts)})"
        if self.next_step is not None:
            line = f"{line.rstrip('.')}. {self.next_step}"
        return printable(" ".join(line.split()))  # one line, even if a part contains line breaks


class BackendError(ExlError):
    """The kernel library is missing, does not match, or lacks a requested feature."""


class DeviceError(BackendError):
    """The requested GPU does not exist, cannot be used, or failed."""

    exit_code = 5


class RankError(BackendError):
    """A process of a model that is divided among several has failed, which ends all of them."""


class RequestError(ExlError):
    """The request cannot be served as written: an empty or too long prompt, an invalid value."""

    exit_code = 2


class ConstraintError(RequestError):
    """A constraint that is invalid, cannot be satisfied, or can no longer be by this reply."""


class ConstraintLimitError(ConstraintError):
    """A constraint whose compilation takes too much time or memory."""


def wrong_type(
    name: str,
    expected: object,
    got: object,
    *,
    where: object = None,
    next_step: str | None = None,
) -> RequestError:
    """Error for an argument or option `name` of the wrong type."""
    return RequestError(
        f"{name} has the wrong type",
        where=where,
        expected=expected,
        got=repr(got)[:100],
        next_step=next_step,
    )


def check_known(names: Iterable[str], known: Sequence[str], what: str, where: object) -> None:
    """Raises RequestError for a name that is not among `known`, with the nearest one that is.
    `what`: "setting" or "field"."""
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise RequestError(
                f"unknown {what} {name[:80]!r}",
                where=where,
                next_step=f"The nearest known one is {nearest}.",
            )


class ContextLengthError(RequestError):
    """A text has more tokens than the context can hold. `num_tokens` is a lower bound: counting
    stopped there."""

    def __init__(self, num_tokens: int, max_tokens: int, *, next_step: str | None = None) -> None:
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        super().__init__(
            "the text is too long for the context",
            expected=f"at most {max_tokens} tokens",
            got=f"at least {num_tokens}",
            next_step=next_step or "Shorten the text.",
        )


class ModelError(ExlError):
    """The model cannot be found, read or trusted."""

    exit_code = 3


class ModelNotFoundError(ModelError):
    """There is no such path, alias or hub id."""


class ConfigError(ModelError):
    """`config.json` or the metadata of a GGUF file lacks a value or is inconsistent."""


class UnsupportedModelError(ModelError):
    """The architecture or the quantization method is unsupported or unknown."""


class WeightFileError(ModelError):
    """A weight file is damaged: a truncated header, a tensor outside the file, a wrong size."""


class MissingTensorError(ModelError):
    """A tensor that the architecture needs is in none of the files."""


class WeightShapeError(ModelError):
    """A tensor's shape differs from the one that the configuration requires."""


class WeightValueError(ModelError):
    """A tensor contains NaN or infinity."""


class AdapterError(ModelError):
    """A LoRA adapter is damaged, of an unsupported kind, or does not fit the model."""


class TokenizerError(ModelError):
    """The tokenizer is missing, damaged, or does not belong to this model."""


class TemplateError(ModelError):
    """The chat template is missing, is not valid, or refused the conversation."""


class OutOfMemoryError(ExlError):
    """Not enough memory. The message states the needed and the available bytes."""

    exit_code = 4


class WriteError(ExlError):
    """A file cannot be written."""


class DiskFullError(WriteError):
    """A file does not fit on its file system, or exceeds the limit on file sizes."""

    exit_code = 6


class QualityError(ExlError):
    """A converted model differs more from its source than conversions at its bit rate should."""

    exit_code = 7


class ProblemsError(ExlError):
    """Several failures, reported together. The exit code is that of the first."""

    def __init__(self, problems: Sequence[ExlError]) -> None:
        self.problems = tuple(problems)
        self.exit_code = problems[0].exit_code
        super().__init__("; ".join(str(problem) for problem in problems))
