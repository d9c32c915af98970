"""Formats that a conversion writes: what depends on the format in planning and in the output.

EXL2 counts weights and bits as its own converter does, with columns padded to 32. EXL3 counts the
weights of the model, and all bits that it stores for them, those of padding included. A bit rate
thus says how large the layers of the output are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exl_core.convert.candidates import layouts_for
from exl_core.convert.plan import (
    COLUMN_STEP,
    HEAD_LAYOUTS,
    AnyLayout,
    ConvertOptions,
    Format,
    Layout,
    TrellisCodes,
    padded,
    rates_of,
)
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.ops.weights import HADAMARD, Codebook

UNQUANTIZED = 16
"""Bits per weight of a head that is stored in float16."""

MAX_WIDTH = 55_296
"""exllamav3 cuts wider matrices into slices, which are not written here."""


@dataclass(frozen=True, slots=True)
class Target:
    """A format to write. EXL2 has no codebook."""

    codebook: Codebook | None = None

    def __str__(self) -> str:
        return "EXL2" if self.codebook is None else f"EXL3 with the codebook {self.codebook}"

    @property
    def name(self) -> Format:
        return "exl2" if self.codebook is None else "exl3"

    @property
    def weights_stem(self) -> str:
        """Start of the names of weight files."""
        return "output" if self.codebook is None else "model"

    @property
    def repeats_norms(self) -> bool:
        """Whether a norm that all heads share is stored once for each of them."""
        return self.codebook is None

    @property
    def has_untied_config(self) -> bool:
        """Whether the configuration says that the head is stored, as it always is."""
        return self.codebook is not None

    @property
    def bias_step(self) -> int:
        """Biases of quantized matrices are padded to a multiple of it."""
        return COLUMN_STEP if self.codebook is None else HADAMARD

    def width_problem(self, width: int) -> str | None:
        """Expected number of input features of a matrix, if this one is impossible."""
        if self.codebook is not None:
            return f"at most {MAX_WIDTH}" if width > MAX_WIDTH else None
        step, most = exl2.ROW_STEP, exl2.MAX_IN_FEATURES
        return f"a multiple of {step}, at most {most}" if width % step or width > most else None

    def num_weights(self, in_features: int, out_features: int) -> int:
        """Weights of a matrix that a bit rate refers to."""
        return in_features * (padded(out_features) if self.codebook is None else out_features)

    def has(self, layout: AnyLayout) -> bool:
        """Whether it is a layout of this format, with its codebook."""
        found = layout.codebook if isinstance(layout, TrellisCodes) else None
        return found == self.codebook

    def layouts_for(self, in_features: int) -> Sequence[AnyLayout]:
        """Candidate layouts of a matrix."""
        return layouts_for(in_features) if self.codebook is None else self.trellis_layouts

    @property
    def trellis_layouts(self) -> list[TrellisCodes]:
        """Candidate layouts of EXL3, for matrices of any size."""
        codebook = self.codebook
        return [] if codebook is None else [TrellisCodes(r, codebook) for r in rates_of(codebook)]

    @property
    def head_choices(self) -> tuple[float, ...]:
        """Values of `--head-bits`."""
        if self.codebook is None:
            return tuple(HEAD_LAYOUTS)
        return (*rates_of(self.codebook), UNQUANTIZED)

    def head_layout(self, head_bits: float) -> AnyLayout | None:
        """Layout of the head; None if it is not quantized."""
        if self.codebook is None:
            return Layout.parse(HEAD_LAYOUTS[int(head_bits)])
        return None if head_bits == UNQUANTIZED else TrellisCodes(head_bits, self.codebook)


def target_of(options: ConvertOptions) -> Target:
    return Target(None if options.format == "exl2" else options.codebook)
