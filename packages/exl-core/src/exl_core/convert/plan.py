"""Decisions of a conversion as plain data: layouts, measured candidates, and the chosen layouts.

An EXL2 layout says how the stored rows of one matrix are cut into groups and how wide their codes
are. Its size in bits is counted as exllamav2's converter counts it, so that a bit rate means the
same for both. An EXL3 layout is the rate and the codebook of trellis codes. A round trip through
JSON changes nothing here. Knows neither tensors nor files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Self

from exl_core.errors import RequestError
from exl_core.formats.codecs.exl3.matrix import stored_size
from exl_core.ops.weights import CODEBOOKS, TRELLIS_RATES, Codebook

Format = Literal["exl2", "exl3"]

WIDTHS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
COLUMN_STEP = 32  # out_features are padded to a multiple of it
MAX_FIRST_WORD = 32767  # offsets of groups are stored as signed 16-bit numbers
_SCALE_MAX_BITS, _TABLE_BITS, _SCALE_BITS, _ROW_BITS, _BIAS_BITS = 16, 32, 4, 32, 16


class Section(NamedTuple):
    """Share of a matrix's stored rows, with codes of one width in groups of one size."""

    bits: int
    percent: int
    group_size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sections of falling width that together cover 100 per cent of the rows."""

    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        widths = [section.bits for section in self.sections]
        is_falling = all(wide > narrow for wide, narrow in itertools.pairwise(widths))
        known = all(s.bits in WIDTHS and s.group_size in GROUP_SIZES for s in self.sections)
        shares = [section.percent for section in self.sections]
        if not (known and is_falling and sum(shares) == 100 and min(shares) > 0):
            raise RequestError(
                "a layout that EXL2 does not have",
                expected="sections 'bits:per cent/group size' of falling width, such as "
                "'4:10/64 3:90/64'",
                got=str(self),
            )

    def __str__(self) -> str:
        return " ".join(f"{bits}:{percent}/{size}" for bits, percent, size in self.sections)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`."""
        sections = []
        for part in text.split():
            bits, _, rest = part.partition(":")
            percent, _, size = rest.partition("/")
            if not (bits.isdecimal() and percent.isdecimal() and size.isdecimal()):
                raise RequestError("not a layout", expected="such as '4:10/64 3:90/64'", got=text)
            sections.append(Section(int(bits), int(percent), int(size)))
        return cls(tuple(sections))

    def groups(self, in_features: int) -> list[tuple[int, int]]:
        """Pairs (bits, rows) that cover all rows. Only the last may have fewer rows than its
        section's group size."""
        groups: list[tuple[int, int]] = []
        remaining = in_features
        for bits, percent, size in self.sections:
            hundredths = min(in_features * percent, remaining * 100)  # in hundredths of a row
            for _ in range(-(-hundredths // (100 * size))):
                groups.append((bits, min(size, remaining)))
                remaining -= groups[-1][1]
        return groups

    def cost_bits(self, in_features: int, out_features: int, *, has_bias: bool = False) -> int:
        """Size of the stored matrix: codes of all columns (padded ones included), scales, group
        table, row order and bias."""
        columns = padded(out_features)
        groups = self.groups(in_features)
        codes = sum(bits * rows for bits, rows in groups) * columns
        scales = len(groups) * (_SCALE_MAX_BITS + _TABLE_BITS + _SCALE_BITS * columns)
        return codes + scales + _ROW_BITS * in_features + _BIAS_BITS * columns * has_bias

    def fits(self, in_features: int) -> bool:
        """Whether the group table can hold the offset of the last group."""
        words = [bits * rows // 32 for bits, rows in self.groups(in_features)]
        return sum(words[:-1]) <= MAX_FIRST_WORD


def padded(out_features: int) -> int:
    """Number of columns that EXL2 stores for a matrix."""
    return out_features + -out_features % COLUMN_STEP


def rates_of(codebook: Codebook) -> tuple[float, ...]:
    """Rates of EXL3 with a codebook."""
    return tuple(rate for rate in TRELLIS_RATES if codebook == "mul1" or rate % 1 == 0)


@dataclass(frozen=True, slots=True)
class TrellisCodes:
    """Layout of an EXL3 matrix. Every one fits a matrix of any size, which is padded to blocks."""

    rate: float
    codebook: Codebook

    def __post_init__(self) -> None:
        if self.codebook not in CODEBOOKS or self.rate not in rates_of(self.codebook):
            raise RequestError(
                "a layout that EXL3 does not have",
                expected="a rate and a codebook, such as '2.5 mul1'",
                got=str(self),
            )

    def __str__(self) -> str:
        return f"{self.rate:g} {self.codebook}"

    def cost_bits(self, in_features: int, out_features: int, *, has_bias: bool = False) -> int:
        """Size of the stored matrix, padding included: codes, scales and bias."""
        rows, columns = stored_size(in_features), stored_size(out_features)
        vectors = _SCALE_MAX_BITS * (rows + columns) + _BIAS_BITS * columns * has_bias
        return int(self.rate * rows * columns) + vectors

    def fits(self, in_features: int) -> bool:  # noqa: ARG002 - as of `Layout`
        return True


AnyLayout = Layout | TrellisCodes


def parse_layout(text: str) -> AnyLayout:
    """Inverse of `str` for layouts of both formats."""
    rate, _, codebook = text.partition(" ")
    for known in CODEBOOKS:
        if codebook == known and rate.replace(".", "", 1).isdecimal():
            return TrellisCodes(float(rate), known)
    return Layout.parse(text)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout of one matrix: its size in bits, and `error`, the expected increase of the mean
    loss in nats per token. Errors of different matrices and layers add up."""

    layout: str
    bits: int
    error: float


@dataclass(frozen=True, slots=True)
class MatrixMeasurement:
    """All candidates of one matrix (`name` ends with `.weight`), or of the same matrix of all
    experts of a layer (then * replaces their index). `numel` is what `Target.num_weights` counts.
    Bits and errors are sums over the experts."""

    name: str
    numel: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """Measured matrices of one decoder layer, in the order of the forward pass."""

    layer: int
    matrices: tuple[MatrixMeasurement, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError for a value that `to_json` did not write."""
        matrices = tuple(
            MatrixMeasurement(
                str(matrix["name"]),
                int(matrix["numel"]),
                tuple(
                    Candidate(str(parse_layout(c["layout"])), int(c["bits"]), float(c["error"]))
                    for c in matrix["candidates"]
                ),
            )
            for matrix in value["matrices"]
        )
        return cls(int(value["layer"]), matrices)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The chosen layout of every matrix, or of the same matrix of all experts. `budget_bits` is the
    upper limit of `bits`. `error` is the sum of the chosen candidates' errors."""

    layouts: Mapping[str, str]
    bits: int
    budget_bits: int
    numel: int
    error: float

    @property
    def bits_per_weight(self) -> float:
        return self.bits / self.numel

    def layout(self, name: str) -> AnyLayout:
        return parse_layout(self.layouts[name])


def budget(layers: Sequence[LayerMeasurement], bits: float) -> tuple[int, int]:
    """Most bits that the layers may take at `bits` per weight, and their number of weights."""
    numel = sum(matrix.numel for layer in layers for matrix in layer.matrices)
    return math.floor(Fraction(str(bits)) * numel), numel


class Incident(NamedTuple):
    """Problem with one matrix that is reported to the user. `kind` is `damped` for a Hessian that
    needed more damping than usual, `rounded` for a matrix that was rounded to nearest, or
    `few rows` for experts that also read rows which did not choose them."""

    matrix: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """Result of quantizing one matrix. `error` is the energy of the output errors on the matrix's
    inputs, relative to the energy of the outputs."""

    name: str
    layout: str
    bits: int
    error: float
    incidents: tuple[Incident, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


MAX_SEED = 2**62
"""The seed of a row is this one and the row's number, which must be below 2**63."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of all stages. `fast` shortens all steps that only improve the result.

    device       computing device: `cpu`, `cuda`, `cuda:1`
    head_bits    one of `Target.head_choices`
    seed         seed of all random choices, at most MAX_SEED
    codebook     of the trellis codes of EXL3
    """

    device: str = "cpu"
    head_bits: float = 6
    seed: int = 0
    fast: bool = False
    format: Format = "exl2"
    codebook: Codebook = "mul1"

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise RequestError("--seed is out of range", expected=f"0 to {MAX_SEED}", got=self.seed)


HEAD_LAYOUTS = {
    2: "4:30/32 2:70/32",
    3: "4:15/32 3:85/32",
    4: "6:15/32 4:85/32",
    5: "6:15/128 5:85/128",
    6: "8:15/128 6:85/128",
    8: "8:100/128",
}
"""Layout of the head for each value of `--head-bits`. The layers' bit budget excludes the head."""
