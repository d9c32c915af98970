"""Ops on logits: sampling a token, and the normalizer of log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor, inference_mode, tensor
from torch.cuda import Stream


class Sampled(NamedTuple):
    """Result of `sample`; token_id is -1 if no token can be sampled."""

    token_id: int
    probability: float
    top: list[tuple[int, float]]


NOTHING_SAMPLED = Sampled(-1, 0.0, [])


class NextStep(NamedTuple):
    """Continuation of `sample_rows`: launches the next forward pass with the sampled tokens.

    `sample_rows` writes the tokens to `token_ids` too, int64 [rows] on the table's device, 0 where
    there is none. Then it calls `launch`. On a GPU this happens before the host synchronizes with
    the sampling kernels.

    `parts`: the same for each part of a pass that is divided, in order; otherwise empty. `launch`
    launches all of them.
    """

    token_ids: Tensor
    launch: Callable[[], None]
    parts: tuple[NextStep, ...] = ()

    def launch_after(self, sampled: Sequence[Sampled]) -> None:
        """Copies tokens that are already on the host, then calls `launch`."""
        with inference_mode():
            self.token_ids.copy_(tensor([max(one.token_id, 0) for one in sampled]))
        self.launch()


class PartLogits(NamedTuple):
    """Logits of some rows of a pass, from `first_row` on.

    `stream`: GPU stream that follows these logits, but not the parts that are computed after them;
    None for the stream that computes them.
    """

    logits: Tensor  # [n, vocab], strided rows on the device of the last layers
    stream: Stream | None = None
    first_row: int = 0


class LogitEdits(NamedTuple):
    """Changes of single logits: penalties, biases and bans.

    A logit above 0 is divided by its factor, any other is multiplied by it; then its offset is
    added. Both operations are rounded to float32. Minus infinity as offset drops the token.
    """

    ids: Tensor  # int64 [n], distinct
    factors: Tensor  # float32 [n], above 0
    offsets: Tensor  # float32 [n]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleSettings:
    """Settings of `sample`; mask and edits are on the CPU. A token's settings are built once.

    temperature  divisor of the logits, above 0
    top_k        number of tokens that are kept; 0: all
    top_p        share of probability that is kept, in (0, 1]; 1: all
    min_p        least probability of a kept token, as a share of the largest; in [0, 1], 0: off
    uniform      random number in [0, 1)
    num_top      number of likeliest tokens to return
    mask         int32 words, bit i % 32 of word i // 32 is 0 for a token that is dropped
    edits        changes of single logits, before anything else
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0
    num_top: int = 0
    mask: Tensor | None = None
    edits: LogitEdits | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowSettings(SampleSettings):
    """Settings of one row of logits in `sample_rows`."""

    row: int


class SamplingOps(Protocol):
    """Samples tokens from rows of logits."""

    def log_sum_exp(self, x: Tensor) -> Tensor:
        """log(sum(exp(x))) of each row of x [m, n] (strided rows) -> float32 [m].

        NaN for a row with a NaN or plus infinity, or of minus infinities only.
        """
        ...

    def sample(self, logits: Tensor, settings: SampleSettings) -> Sampled:
        """Samples a token from logits float32 [vocab].

        Steps, in this order:

        1. apply the edits
        2. drop tokens whose bit in mask is 0
        3. divide by temperature
        4. keep the top_k likeliest tokens
        5. keep the longest descending run that sums to at most top_p and has no token below 1e-6
        6. keep the tokens that are at least min_p times as likely as the likeliest one
        7. return the first token at which the running sum by id exceeds uniform

        The likeliest token is always kept; ties are ordered by id. `top` lists the num_top
        likeliest of the kept tokens with their probabilities. A token that is at most e^-87.3 times
        as likely as the likeliest one counts as impossible. Returns NOTHING_SAMPLED if logits hold
        a NaN or plus infinity, or if no finite logit is left.

        All operands are on the CPU, whatever the table's device. `sample_rows` samples there.
        """
        ...

    def sample_rows(
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        """`sample` of the given rows of logits [n, vocab], strided rows on the table's device.

        Rows are independent. On a GPU the host synchronizes once for all of them. Probabilities are
        rounded differently there, so that the same random number may select another token. With
        `next_step`, the next forward pass starts from the sampled tokens; the caller passes it if
        that pass depends on nothing else.
        """
        ...

    def sample_parts(
        self,
        parts: Sequence[PartLogits],
        rows: Sequence[Sequence[RowSettings]],
        next_steps: Sequence[NextStep],
    ) -> list[Sampled]:
        """`sample_rows` of the given rows of each part, which launches the part's next step. Rows
        are numbered in the pass.

        On a GPU each part is sampled on its stream, and the host synchronizes once for all of them.
        """
        ...


class SamplesInTurn:
    """`sample_parts` where the host waits for the tokens of each part."""

    def sample_parts(
        self: SamplingOps,
        parts: Sequence[PartLogits],
        rows: Sequence[Sequence[RowSettings]],
        next_steps: Sequence[NextStep],
    ) -> list[Sampled]:
        sampled: list[Sampled] = []
        for part, own, next_step in zip(parts, rows, next_steps, strict=True):
            shifted = [replace(one, row=one.row - part.first_row) for one in own]
            sampled += self.sample_rows(part.logits, shifted, next_step)
        return sampled
