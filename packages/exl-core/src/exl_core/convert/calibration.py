"""Token ids that a conversion measures on: a text that is given, or one that the model writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from exl_core.load import LoadedModel
from exl_core.tokenizer.base import Tokenizer

OnRow = Callable[[int, int], None]
"""Called with rows (or tokens) done and all of them."""


class CalibrationRows(NamedTuple):
    """`token_ids` int64 [rows, length]; `sha256` of their little-endian bytes, in hexadecimal."""

    token_ids: Tensor
    sha256: str
    description: str


def rows_of_texts(
    texts: Iterable[str], tokenizer: Tokenizer, *, rows: int, length: int, name: str
) -> CalibrationRows:
    """The first `rows * length` tokens of the texts, one after the other.

    A RequestError says how many tokens are missing where the texts are too short.
    """
    raise NotImplementedError


def rows_of_model(
    loaded: LoadedModel, *, rows: int, length: int, seed: int, on_progress: OnRow | None = None
) -> CalibrationRows:
    """What the model writes by itself at temperature 1: half of the rows from BOS, half of them
    through its chat template where it has one. The same for the same model, sizes and seed."""
    raise NotImplementedError
