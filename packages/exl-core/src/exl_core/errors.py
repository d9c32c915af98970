"""Typed errors. Each says where, what, expected, got and what to do next, as fields and as a line.

The command line turns an `ExlError` into one line on stderr and the class's exit code; any other
exception is a bug and shows its traceback.

Exit codes: 1 a failure while running, 2 a request that cannot be served as written, 3 a model that
cannot be found, read or trusted, 4 not enough memory, 5 no GPU that can be used, 6 no space on a
disk, 7 a result that is not good enough to be published. (130 is Ctrl-C, 141 a closed pipe and
143 a conversion that SIGTERM stopped; the command line owns those.)
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def printable(text: str) -> str:
    """`text` with its control characters written out, as in `\\x1b`.

    Names come from files that a stranger wrote; a terminal would obey what is hidden in them.
    """
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if unicodedata.category(char) == "Cc"
        else char
        for char in text
    )


class ExlError(Exception):
    """A failure that a user can act on. `what` alone is required; the rest sharpens it."""

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
        return printable(" ".join(line.split()))  # one line, whatever the parts held


class BackendError(ExlError):
    """The kernel library is missing, does not match, or lacks what was asked of it."""


class DeviceError(BackendError):
    """No GPU where one was asked for, one that cannot be used, or one that failed."""

    exit_code = 5


class RequestError(ExlError):
    """The request cannot be served as written: an empty or too long prompt, a bad value."""

    exit_code = 2


class ModelError(ExlError):
    """The model cannot be found, read or trusted."""

    exit_code = 3


class ModelNotFoundError(ModelError):
    """Nothing at the path, or no such alias or hub id."""


class ConfigError(ModelError):
    """`config.json`, or the metadata of a GGUF file, is missing a value or contradicts itself."""


class UnsupportedModelError(ModelError):
    """An architecture or a quantization method that is known not to work, or not known at all."""


class WeightFileError(ModelError):
    """A weight file is damaged: a truncated header, a tensor outside the file, a wrong size."""


class MissingTensorError(ModelError):
    """The architecture needs a tensor that no file holds."""


class WeightShapeError(ModelError):
    """A tensor has another shape than the configuration calls for."""


class WeightValueError(ModelError):
    """A tensor holds values that no model can use: NaN or infinity."""


class AdapterError(ModelError):
    """A LoRA adapter that is damaged, of a kind that is not supported, or not for this model."""


class TokenizerError(ModelError):
    """The tokenizer is missing, damaged, or does not belong to this model."""


class TemplateError(ModelError):
    """The chat template is missing, is not valid, or refused the conversation."""


class OutOfMemoryError(ExlError):
    """It does not fit; the message has the numbers."""

    exit_code = 4


class DiskFullError(ExlError):
    """A file does not fit its file system, or is longer than files may be here."""

    exit_code = 6


class QualityError(ExlError):
    """A converted model that is further from its source than conversions at its rate are."""

    exit_code = 7


class ProblemsError(ExlError):
    """Several failures that were found at once; the exit code is that of the first."""

    def __init__(self, problems: Sequence[ExlError]) -> None:
        self.problems = tuple(problems)
        self.exit_code = problems[0].exit_code
        super().__init__("; ".join(str(problem) for problem in problems))
