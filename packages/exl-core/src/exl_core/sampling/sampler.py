"""Sampler of one request: turns a row of logits into a token, with its own random stream.

It knows neither text nor filters; the caller passes excluded tokens with each call. Nothing depends
on the rest of the batch, so the same seed gives the same tokens from the same logits. `steps_for`
in `chain.py` defines the result. The sampler computes the same with the kernel `ops.sample`, or
with the kernel's first cuts and the remaining steps in torch. If the kernel needs settings only,
`begin` returns them for batched sampling of many requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.errors import ExlError, RequestError
from exl_core.ops.sampling import LogitEdits, RowSettings, Sampled, SampleSettings
from exl_core.ops.table import OpTable
from exl_core.sampling.chain import is_common, later_steps, scaling
from exl_core.sampling.edits import Edits
from exl_core.sampling.feedback import Mirostat
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.steps import (
    DROPPED,
    descending,
    draw,
    likeliest,
    skewed,
    skewed_shares,
    softmax,
)

UNIFORM_BLOCK = 16
"""Random numbers drawn at a time. The stream is that of single numbers, which cost more each."""


class LogitsError(ExlError):
    """The logits cannot be sampled: NaN, infinite, or every token is dropped."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled token, with details if requested.

    `probability` is that after all steps. `top` lists the likeliest remaining tokens with their
    probabilities, descending; it has fewer entries than requested if fewer tokens remain.
    """

    token_id: int
    probability: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Final:
    """Distribution after all steps: remaining ids, ascending, and their probabilities.

    `ids` None: all tokens remain.
    """

    ids: Tensor | None
    probability: Tensor

    def spread(self, vocab_size: int, skew: float) -> Tensor:
        """Probability that each token is sampled: float32 [vocab_size]."""
        shares = self.probability if skew == 0.0 else skewed_shares(self.probability, skew)
        if self.ids is None:
            return shares.float()
        return torch.zeros(vocab_size).index_copy_(0, self.ids, shares.float())

    def id_at(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])

    def index_of(self, token_id: int) -> int:
        return token_id if self.ids is None else int(torch.searchsorted(self.ids, token_id))


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: scale * positive + (1 - scale) * negative, of log probabilities.

    `scale` 1 ignores `negative`. A token that is impossible under `positive` stays impossible. One
    that is impossible only under `negative` keeps its log probability under `positive`.
    """
    positive, negative = positive.log_softmax(0), negative.log_softmax(0)
    negative = torch.where(negative.isinf(), positive, negative)
    guided = scale * positive + (1.0 - scale) * negative
    return guided.masked_fill_(positive == -math.inf, -math.inf)


class Sampler:
    """Sampler state of one request.

    `history` is the prompt and the reply; it only grows, or is cut with `rewind`. Logits are
    float32 [vocab_size] on the CPU and are not modified; ids beyond them are ignored.

    The random stream advances by one number per sampled token, including verified tokens and tokens
    that are taken back later. With greedy settings it does not advance. It therefore depends only
    on the number of sampled tokens.
    """

    def __init__(self, params: SamplerParams, ops: OpTable) -> None:
        self.params = params
        self._ops = ops
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._uniforms: deque[float] = deque()  # drawn, but not used yet
        self._edits = Edits(params)
        self._is_common = is_common(params)
        self._length = 0
        self._mirostat: Mirostat | None = None
        if params.mirostat_tau is not None and not params.is_greedy:
            self._mirostat = Mirostat(params.mirostat_tau, params.mirostat_eta)

    def sample(
        self,
        logits: Tensor,
        history: Sequence[int],
        *,
        banned: Collection[int] = (),
        mask: Tensor | None = None,
        num_top: int = 0,
        want_probability: bool = False,
        uniform: float | None = None,
    ) -> Sample:
        """Sample the next token.

        mask     packed bits, int32, of the allowed tokens
        uniform  number in [0, 1) that selects the token; None takes it from the random stream
        """
        self._length = len(history)
        if uniform is not None and not 0.0 <= uniform < 1.0:
            raise RequestError("uniform is out of range", expected="0 to below 1", got=uniform)
        if not self._is_common:
            final = self._final(logits, history, banned, mask)
            uniform = self._uniform() if uniform is None else uniform
            return self._sample(final, uniform, num_top, want_probability)
        if self.params.is_greedy:
            uniform = 0.0
        elif uniform is None:
            uniform = self._uniform()
        sampled = self._sampled(logits, history, banned, mask, uniform=uniform, num_top=num_top)
        return _sample_of(sampled, want_probability)

    @property
    def can_begin(self) -> bool:
        """The kernel needs settings only; no step in torch follows."""
        return self._is_common

    def begin(
        self,
        row: int,
        vocab_size: int,
        history: Sequence[int],
        *,
        banned: Collection[int] = (),
        mask: Tensor | None = None,
        num_top: int = 0,
    ) -> RowSettings:
        """Kernel settings that sample the same token as `sample`; `finish` takes the result.

        Requires `can_begin`. The random stream advances here.
        """
        self._length = len(history)
        uniform = 0.0 if self.params.is_greedy else self._uniform()
        edits = self._edits.edits(history, banned, vocab_size)
        mask = self._edits.allowed(mask, vocab_size)
        return self._settings(row, mask, edits, uniform=uniform, num_top=num_top)

    def finish(
        self, sampled: Sampled, read_logits: Callable[[], Tensor], *, want_probability: bool = False
    ) -> Sample:
        """Result of batched sampling with the settings from `begin`.

        LogitsError if no token could be sampled; only then the logits are read, for the reason.
        """
        if sampled.token_id < 0:
            raise _error(read_logits())
        return _sample_of(sampled, want_probability)

    def probabilities(
        self,
        logits: Tensor,
        history: Sequence[int],
        *,
        banned: Collection[int] = (),
        mask: Tensor | None = None,
    ) -> Tensor:
        """The distribution that `sample` draws from, with skew: float32 [vocab_size]."""
        self._length = len(history)
        return self._final(logits, history, banned, mask).spread(len(logits), self.params.skew)

    def verify(
        self,
        logits: Tensor,
        history: Sequence[int],
        proposal: int,
        drawn_from: Tensor | None,
        *,
        banned: Collection[int] = (),
        mask: Tensor | None = None,
        num_top: int = 0,
        want_probability: bool = False,
    ) -> Sample:
        """Rejection sampling: the next token, given a proposal from another distribution.

        The proposal is accepted if it is the returned token. The token follows exactly the
        distribution that `sample` draws from. `drawn_from` is the proposal's distribution, float32
        [about vocab_size]. None: the proposal is deterministic, and the token is the same as that
        of `sample`.
        """
        if drawn_from is None:
            return self.sample(
                logits,
                history,
                banned=banned,
                mask=mask,
                num_top=num_top,
                want_probability=want_probability,
            )
        self._length = len(history)
        final = self._final(logits, history, banned, mask)
        target = final.spread(len(logits), self.params.skew)
        shared = min(len(target), len(drawn_from))
        p, q = (float(x[proposal]) if proposal < len(x) else 0.0 for x in (target, drawn_from))
        uniform = self._uniform()
        if uniform * q < p:
            return self._result(final, proposal, num_top, want_probability)
        # Rejected: the number is uniform in [p / q, 1). It is rescaled to [0, 1) and used again.
        share = p / q if q > 0.0 else 0.0
        uniform = min((uniform - share) / (1.0 - share), math.nextafter(1.0, 0.0))
        residual = target.clone()
        residual[:shared] -= drawn_from[:shared]
        residual.clamp_(min=0.0)
        # The residual is zero only by rounding, if both distributions are equal.
        token_id = draw(residual if bool(residual.any()) else target, uniform)
        return self._result(final, token_id, num_top, want_probability)

    def accept(self, sample: Sample) -> None:
        """Record that this token was appended to the history that it was sampled for."""
        if self._mirostat is not None and sample.probability is not None:
            self._mirostat.accept(self._length + 1, sample.probability)

    def changed(self, params: SamplerParams) -> Sampler:
        """A sampler with other settings that continues this one's random stream.

        Mirostat goes on from its current cut, at the new rate, if its target stays the same.
        """
        other = Sampler(params, self._ops)
        other._generator, other._uniforms = self._generator, self._uniforms
        other._length = self._length
        has_same_target = params.mirostat_tau == self.params.mirostat_tau
        if self._mirostat is not None and other._mirostat is not None and has_same_target:
            self._mirostat.set_rate(params.mirostat_eta)
            other._mirostat = self._mirostat
        return other

    @property
    def mirostat_cut(self) -> float | None:
        """Largest surprise in bits that the next token may have; None without mirostat."""
        return None if self._mirostat is None else self._mirostat.mu

    def start_mirostat(self, cut: float) -> None:
        """Continue from the cut of another sampler. No effect without mirostat."""
        if self._mirostat is not None and self.params.mirostat_tau is not None:
            self._mirostat = Mirostat(self.params.mirostat_tau, self.params.mirostat_eta, cut)

    def rewind(self, length: int) -> None:
        """Record that the history was cut to `length` tokens."""
        self._edits.rewind(length)
        if self._mirostat is not None:
            self._mirostat.rewind(length)

    def _sampled(
        self,
        logits: Tensor,
        history: Sequence[int],
        banned: Collection[int],
        mask: Tensor | None,
        *,
        uniform: float,
        num_top: int,
    ) -> Sampled:
        """Sample with the kernel alone, for settings whose whole chain it implements."""
        edits = self._edits.edits(history, banned, len(logits))
        mask = self._edits.allowed(mask, len(logits))
        settings = self._settings(0, mask, edits, uniform=uniform, num_top=num_top)
        sampled = self._ops.sample(logits, settings)
        if sampled.token_id < 0:
            raise _error(logits)
        return sampled

    def _settings(
        self,
        row: int,
        mask: Tensor | None,
        edits: LogitEdits | None,
        *,
        uniform: float,
        num_top: int,
    ) -> RowSettings:
        params = self.params
        if params.is_greedy:
            return RowSettings(row, top_k=1, num_top=num_top, mask=mask, edits=edits)
        return RowSettings(
            row,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=uniform,
            num_top=num_top,
            mask=mask,
            edits=edits,
        )

    def _final(
        self,
        logits: Tensor,
        history: Sequence[int],
        banned: Collection[int],
        mask: Tensor | None,
    ) -> _Final:
        params, vocab_size = self.params, len(logits)
        is_cut = 0 < params.top_k < vocab_size or params.top_p < 1.0
        if self._is_common and (params.is_greedy or is_cut):
            sampled = self._sampled(logits, history, banned, mask, uniform=0.0, num_top=vocab_size)
            ids, probability = zip(*sorted(sampled.top), strict=True)
            return _Final(torch.tensor(ids), torch.tensor(probability, dtype=torch.float64))
        edited = self._edits.dense(logits, history, banned, mask)
        if not math.isfinite(edited.amax()) or not math.isfinite(logits.amax()):
            raise _error(logits)
        for step in scaling(params):
            edited = step(edited)
        kept, few = self._few(edited) if is_cut else (None, edited)
        protected = params.xtc_protected
        if kept is not None and protected:
            ids_left = kept.tolist()
            protected = frozenset(i for i, token in enumerate(ids_left) if token in protected)
        mu = None if self._mirostat is None else self._mirostat.mu
        steps = later_steps(params, mu, protected)
        if kept is None and not steps:
            return _Final(None, few.softmax(0))
        for step in steps:
            few = step(few)
        left = (few > DROPPED).nonzero().squeeze(1)
        return _Final(left if kept is None else kept[left], softmax(few)[left])

    def _few(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids, ascending, and logits of the tokens that top-k and top-p keep."""
        top_k, top_p = self.params.top_k, self.params.top_p
        settings = SampleSettings(top_k=top_k, top_p=top_p, num_top=len(logits))
        sampled = self._ops.sample(logits, settings)
        ids = torch.tensor(sorted(token_id for token_id, _ in sampled.top))
        return ids, logits[ids]

    def _sample(
        self, final: _Final, uniform: float, num_top: int, want_probability: bool
    ) -> Sample:
        skew = self.params.skew
        if skew == 0.0:
            index = draw(final.probability, uniform)
        else:
            order = descending(final.probability)
            index = int(order[draw(final.probability[order], skewed(uniform, skew))])
        return self._result(final, final.id_at(index), num_top, want_probability)

    def _result(self, final: _Final, token_id: int, num_top: int, want_probability: bool) -> Sample:
        probability: float | None = None
        if want_probability or self._mirostat is not None:
            probability = float(final.probability[final.index_of(token_id)])
        top: tuple[tuple[int, float], ...] = ()
        if num_top > 0:
            likely = likeliest(final.probability, num_top)
            top = tuple((final.id_at(i), float(final.probability[i])) for i in likely.tolist())
        return Sample(token_id, probability, top)

    def _uniform(self) -> float:
        if not self._uniforms:
            drawn = torch.rand(UNIFORM_BLOCK, generator=self._generator, dtype=torch.float64)
            self._uniforms += drawn.tolist()
        return self._uniforms.popleft()


def _sample_of(sampled: Sampled, want_probability: bool) -> Sample:
    return Sample(
        sampled.token_id, sampled.probability if want_probability else None, tuple(sampled.top)
    )


def _error(logits: Tensor) -> LogitsError:
    """Reason why no token can be sampled. A logit of minus infinity is valid (impossible token)."""
    largest = float(logits.amax())
    if math.isfinite(largest):
        return LogitsError(
            "penalties, bans and mask leave no token to sample",
            where="sampler",
            expected="a finite largest logit",
        )
    if math.isnan(largest):
        got, cause = "NaN", "A weight is damaged, or activations overflowed"
    elif largest > 0:
        got, cause = "infinity", "Activations overflowed"
    else:
        got, cause = "minus infinity everywhere", "A weight of the output layer is damaged"
    return LogitsError(
        "the model's logits are not numbers that can be sampled",
        where="sampler",
        expected="finite values",
        got=got,
        next_step=f"{cause}: 'exl inspect model MODEL --tensors' shows the file's tensors, "
        "'exl doctor' tests the kernels of this machine.",
    )
