"""One request's sampler: from a row of logits to a token, with a random stream of its own.

Knows neither text nor filters; tokens that must not come are given with the call. Nothing here
depends on what else is in the batch, so the same seed gives the same tokens from the same logits.
What a sample means is said by `steps_for` in `chain.py`; the sampler computes the same with the
kernel of `ops.sample`, or with the steps over the few tokens that it leaves. Where that kernel
needs nothing but settings, `begin` gives them, so that samples of many requests are drawn at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.errors import ExlError
from exl_core.ops.table import OpTable, RowSettings, Sampled
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


class LogitsError(ExlError):
    """The model's logits cannot be sampled from: NaN, infinite, or every token dropped."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A token; its final probability, if wanted; the likeliest tokens that were left, descending,
    with theirs: fewer than asked for if fewer were left."""

    token_id: int
    probability: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Final:
    """What is left in the end: ids, ascending, and their probabilities. No ids: all tokens."""

    ids: Tensor | None
    probability: Tensor

    def spread(self, vocab_size: int, skew: float) -> Tensor:
        """How likely each token is drawn: float32 [vocab_size]."""
        shares = self.probability if skew == 0.0 else skewed_shares(self.probability, skew)
        if self.ids is None:
            return shares.float()
        return torch.zeros(vocab_size).index_copy_(0, self.ids, shares.float())

    def id_at(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])

    def place_of(self, token_id: int) -> int:
        return token_id if self.ids is None else int(torch.searchsorted(self.ids, token_id))


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: away from what `negative` expects, by `scale`; 1 ignores it.

    A token that `positive` rules out stays out; one that only `negative` rules out is not pushed.
    """
    wanted, unwanted = positive.log_softmax(0), negative.log_softmax(0)
    unwanted = torch.where(unwanted.isinf(), wanted, unwanted)
    guided = scale * wanted + (1.0 - scale) * unwanted
    return guided.masked_fill_(wanted == -math.inf, -math.inf)


class Sampler:
    """`history` is prompt and reply; it grows at its end and is cut back only through `rewind`.
    Logits are float32 [vocab_size], on the CPU, and are left as they are; ids beyond them are
    ignored.

    The random stream gives one number for each token that is drawn, verified ones and those taken
    back later included, and none where the settings are greedy: so it depends only on how many
    tokens were drawn.
    """

    def __init__(self, params: SamplerParams, ops: OpTable) -> None:
        self.params = params
        self._ops = ops
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
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
    ) -> Sample:
        """Draw the next token. `mask`: packed bits, int32, of the tokens that may come."""
        self._length = len(history)
        if not self._is_common:
            final = self._final(logits, history, banned, mask)
            return self._sample(final, self._uniform(), num_top, want_probability)
        uniform = 0.0 if self.params.is_greedy else self._uniform()
        drawn = self._drawn(logits, history, banned, mask, uniform=uniform, num_top=num_top)
        return _sample_of(drawn, want_probability)

    @property
    def can_begin(self) -> bool:
        """Whether settings say all that the kernel has to know."""
        return self._is_common and not self._edits.read_logits

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
        """What draws the token that `sample` would give, from that row of logits; then `finish`.

        Only if it `can_begin`. The number of the random stream is taken here.
        """
        self._length = len(history)
        uniform = 0.0 if self.params.is_greedy else self._uniform()
        ids, values = self._edits.fixed(banned, vocab_size)
        mask = self._edits.allowed(mask, vocab_size)
        return self._settings(row, mask, ids, values, uniform=uniform, num_top=num_top)

    def finish(
        self, drawn: Sampled, read_logits: Callable[[], Tensor], *, want_probability: bool = False
    ) -> Sample:
        """The sample that `begin` began; the logits are read only to say why there is none."""
        if drawn.token_id < 0:
            raise _error(read_logits())
        return _sample_of(drawn, want_probability)

    def probabilities(
        self,
        logits: Tensor,
        history: Sequence[int],
        *,
        banned: Collection[int] = (),
        mask: Tensor | None = None,
    ) -> Tensor:
        """The distribution that `sample` draws from, skewed or not: float32 [vocab_size]."""
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
        """The next token, given one that another distribution proposed; accepted if it is that one.

        The token follows exactly the distribution that `sample` draws from. `drawn_from` is what
        the proposal was drawn from, float32 [about vocab_size]. None: the proposal is certain, and
        the token is the very one that `sample` would give.
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
        wanted = final.spread(len(logits), self.params.skew)
        shared = min(len(wanted), len(drawn_from))
        p, q = (float(x[proposal]) if proposal < len(x) else 0.0 for x in (wanted, drawn_from))
        uniform = self._uniform()
        if uniform * q < p:
            return self._result(final, proposal, num_top, want_probability)
        # Rejected: the number lies in [p / q, 1), evenly, and is stretched to be used again.
        share = p / q if q > 0.0 else 0.0
        uniform = min((uniform - share) / (1.0 - share), math.nextafter(1.0, 0.0))
        missing = wanted.clone()
        missing[:shared] -= drawn_from[:shared]
        missing.clamp_(min=0.0)
        # Only rounding leaves nothing missing: then both are the same distribution.
        token_id = draw(missing if bool(missing.any()) else wanted, uniform)
        return self._result(final, token_id, num_top, want_probability)

    def accept(self, sample: Sample) -> None:
        """This token was appended to the history that it was sampled for."""
        if self._mirostat is not None and sample.probability is not None:
            self._mirostat.accept(self._length + 1, sample.probability)

    def rewind(self, length: int) -> None:
        """The history was cut back to `length` tokens."""
        self._edits.rewind(length)
        if self._mirostat is not None:
            self._mirostat.rewind(length)

    def _drawn(
        self,
        logits: Tensor,
        history: Sequence[int],
        banned: Collection[int],
        mask: Tensor | None,
        *,
        uniform: float,
        num_top: int,
    ) -> Sampled:
        """The kernel's answer, where it knows the whole chain."""
        edited, ids, values = self._edits.sparse(logits, history, banned)
        mask = self._edits.allowed(mask, len(logits))
        settings = self._settings(0, mask, ids, values, uniform=uniform, num_top=num_top)
        drawn = settings.draw(self._ops.sample, edited)
        if drawn.token_id < 0:
            raise _error(logits)
        return drawn

    def _settings(
        self,
        row: int,
        mask: Tensor | None,
        ids: Tensor | None,
        values: Tensor | None,
        *,
        uniform: float,
        num_top: int,
    ) -> RowSettings:
        params = self.params
        if params.is_greedy:
            return RowSettings(row, top_k=1, num_top=num_top, mask=mask, ids=ids, values=values)
        return RowSettings(
            row,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            uniform,
            num_top,
            mask,
            ids,
            values,
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
            drawn = self._drawn(logits, history, banned, mask, uniform=0.0, num_top=vocab_size)
            ids, probability = zip(*sorted(drawn.top), strict=True)
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
        """Ids, ascending, and logits of what top-k and top-p leave."""
        top_k, top_p = self.params.top_k, self.params.top_p
        drawn = self._ops.sample(logits, top_k=top_k, top_p=top_p, num_top=len(logits))
        ids = torch.tensor(sorted(token_id for token_id, _ in drawn.top))
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
            probability = float(final.probability[final.place_of(token_id)])
        top: tuple[tuple[int, float], ...] = ()
        if num_top > 0:
            likely = likeliest(final.probability, num_top)
            top = tuple((final.id_at(i), float(final.probability[i])) for i in likely.tolist())
        return Sample(token_id, probability, top)

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def _sample_of(drawn: Sampled, want_probability: bool) -> Sample:
    return Sample(drawn.token_id, drawn.probability if want_probability else None, tuple(drawn.top))


def _error(logits: Tensor) -> LogitsError:
    """Why nothing can be drawn. A minus infinity is a token that the model itself rules out."""
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
