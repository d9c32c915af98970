"""Reference for replies of the engine: a decoding loop without pages, chunks, batches or drafts.

The loop recomputes everything for every token, to be simple. It shares only the tokenizer and the
sampling steps with the engine; other tests compare those steps with their formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.constrain.filter import Filter
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.engine.events import FinishReason
from exl_core.engine.request import Request
from exl_core.sampling.chain import steps_for
from exl_core.sampling.sampler import guide
from exl_core.sampling.steps import draw, greedy, weights
from exl_core.tokenizer.base import Tokenizer
from support.scripted import Rule


@dataclass(frozen=True)
class Reply:
    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    cause: object = None
    healed_id: int | None = None


@dataclass(frozen=True)
class Changing:
    """Constraint: some tokens, none twice in a row, an even number of them, at most `most`."""

    token_ids: tuple[int, ...]
    most: int

    def allowed(self, reply: Sequence[int]) -> set[int]:
        return set(self.token_ids) - set(reply[-1:])

    def filter(self, vocabulary: Vocabulary) -> _Changing:
        return _Changing(self, vocabulary)


class _Changing(Filter):
    def __init__(self, constraint: Changing, vocabulary: Vocabulary) -> None:
        self._constraint = constraint
        self._vocabulary = vocabulary
        self._reply: list[int] = []

    def mask(self) -> Tensor:
        return self._vocabulary.mask_of(self._constraint.allowed(self._reply))

    def accept(self, token_id: int) -> None:
        assert token_id in self._constraint.allowed(self._reply)
        self._reply.append(token_id)

    def rewind(self, count: int) -> None:
        assert 0 < count <= len(self._reply)
        del self._reply[-count:]

    @property
    def is_complete(self) -> bool:
        return len(self._reply) % 2 == 0

    @property
    def is_finished(self) -> bool:
        return len(self._reply) == self._constraint.most


class ReferenceLoop:
    """Decoding loop of one model, given by its rule, tokenizer and context length."""

    def __init__(self, rule: Rule, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self.rule = rule
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len

    def __call__(self, request: Request) -> Reply | None:
        """The reply; None if the request fails because no token is allowed."""
        pick = self._picker(request)
        lengths = [len(request.prompt_ids), len(request.negative_prompt_ids or ())]
        limit = self.max_seq_len - max(lengths)
        if request.max_tokens is not None:
            limit = min(limit, request.max_tokens)
        if limit == 0:
            return Reply((), "", FinishReason.LENGTH)
        healed_id, head = None, ""
        if request.token_healing and len(request.prompt_ids) > 1:
            piece = self.tokenizer.token_bytes(request.prompt_ids[-1])
            fitting = {i for i in self._all() if self.tokenizer.token_bytes(i).startswith(piece)}
            healed_id = pick((), self._all() - fitting, None)
            assert healed_id is not None
            head = self.tokenizer.token_bytes(healed_id)[len(piece) :].decode()
            text, cause = leftmost_stop(head, request.stop_strings)
            if cause is not None:
                return Reply((), text, FinishReason.STOP, cause, healed_id)
        ended = self._loop(request, pick, limit, head, healed_id)
        return None if ended is None else Reply(*ended, healed_id)

    def _loop(
        self, request: Request, pick: _Picker, limit: int, head: str, healed_id: int | None
    ) -> tuple[tuple[int, ...], str, FinishReason, object] | None:
        reply: list[int] = []
        tried: dict[int, set[int]] = {}
        while True:
            excluded = self._excluded(request, reply) | tried.get(len(reply), set())
            token = pick(reply, excluded, healed_id)
            if token is None:
                return None
            reply.append(token)
            if token in request.stop_ids:
                text, cause = last_stop(
                    head + self.tokenizer.decode(reply[:-1]), request.stop_strings
                )
                return tuple(reply), text, FinishReason.STOP, token if cause is None else cause
            decoder = self.tokenizer.stream_decoder()
            pieces = [decoder.feed(token_id) for token_id in reply]
            first = first_banned(pieces, request.banned_strings)
            if first is not None:
                tried = {at: ids for at, ids in tried.items() if at <= first}
                tried.setdefault(first, set()).add(reply[first])
                del reply[first:]
                continue
            shown = head + "".join(pieces[: num_safe(pieces, request.banned_strings)])
            text, cause = leftmost_stop(shown, request.stop_strings)
            if cause is not None:
                return tuple(reply), text, FinishReason.STOP, cause
            is_finished = any(len(reply) == c.most for c in constraints_of(request))
            if is_finished or len(reply) == limit:
                text, cause = last_stop(head + self.tokenizer.decode(reply), request.stop_strings)
                reason = FinishReason.CONSTRAINT if is_finished else FinishReason.LENGTH
                return tuple(reply), text, reason if cause is None else FinishReason.STOP, cause

    def _all(self) -> set[int]:
        return set(range(self.tokenizer.vocab_size))

    def _excluded(self, request: Request, reply: Sequence[int]) -> set[int]:
        may_stop = len(reply) >= request.min_tokens
        out = set() if may_stop else set(request.stop_ids)
        for constraint in constraints_of(request):
            out |= self._all() - constraint.allowed(reply) - request.stop_ids
            is_complete = len(reply) % 2 == 0
            if not is_complete:
                out |= request.stop_ids
            elif request.prefer_eos and may_stop:
                out = self._all() - request.stop_ids
        return out

    def _picker(self, request: Request) -> _Picker:
        """Function that samples the next token, with the random stream of the request."""
        params = request.sampler
        generator = torch.Generator().manual_seed(params.seed or 0)
        negative = request.negative_prompt_ids

        def pick(reply: Sequence[int], out: Collection[int], healed_id: int | None) -> int | None:
            if len(out) == self.tokenizer.vocab_size:
                return None
            prompt = list(request.prompt_ids)
            if request.token_healing and len(prompt) > 1:
                prompt[-1:] = [] if healed_id is None else [healed_id]
            history = [*prompt, *reply]
            logits = self.rule(history)
            if negative is not None and params.cfg_scale is not None:
                logits = guide(logits, self.rule([*negative, *reply]), params.cfg_scale)
            for step in steps_for(params, history, out):
                logits = step(logits)
            if params.is_greedy:
                return greedy(logits)
            uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            return draw(weights(logits), uniform)

        return pick


_Picker = Callable[[Sequence[int], Collection[int], int | None], int | None]
"""Maps reply, excluded ids and healed token to the next token; None if none is allowed."""


def constraints_of(request: Request) -> list[Changing]:
    return [c for c in request.constraints if isinstance(c, Changing)]


def leftmost_stop(text: str, strings: tuple[str, ...]) -> tuple[str, str | None]:
    """Emitted text and stop string of a text that may continue."""
    for start in range(len(text)):
        here = sorted((s for s in strings if text.startswith(s, start)), key=len)
        if here:
            return text[:start], here[0]
        if any(s.startswith(text[start:]) for s in strings):
            break  # may still become a stop string
    return text, None


def last_stop(text: str, strings: tuple[str, ...]) -> tuple[str, str | None]:
    """Emitted text and stop string of a complete text."""
    hits = [(text.find(s), len(s), s) for s in strings if s in text]
    return (text[: min(hits)[0]], min(hits)[2]) if hits else (text, None)


def first_banned(pieces: Sequence[str], strings: tuple[str, ...]) -> int | None:
    """Index of the piece in which the first banned string begins."""
    text = "".join(pieces).lower()
    hits = [text.find(s.lower()) for s in strings if s.lower() in text]
    if not hits:
        return None
    return next(i for i in range(len(pieces)) if len("".join(pieces[: i + 1])) > min(hits))


def num_safe(pieces: Sequence[str], strings: tuple[str, ...]) -> int:
    """Largest number of pieces that do not end with the beginning of a banned string."""
    for count in range(len(pieces), 0, -1):
        text = "".join(pieces[:count]).lower()
        tails = [text[start:] for start in range(len(text))]
        if not any(s.lower().startswith(tail) for tail in tails for s in strings):
            return count
    return 0
