"""Constraint on parts of a reply: free text until a marker, then JSON that satisfies a schema.

Strict tools need it: the model chooses between an answer and a call, and the arguments of a call
follow the schema. Free text is not constrained at all, special tokens included. The marker is found
in the text of the tokens, so it may be one special token or several ordinary ones.

A token that holds the end of the marker and further text is not allowed, because that text would
escape the schema. White space may follow. A reply may begin with reasoning between two tags; the
marker has no meaning there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from exl_core.constrain.filter import Filter, check_text
from exl_core.constrain.guided import GuidedFilter, Source, guided_filter
from exl_core.constrain.json_schema import JsonSchema, checked_schema, text_of
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError

_NAME = "the JSON schema of the tools"
_OBJECT = b"{"
_SPACE = r"SPACE: /[ \n\r\t]{1,40}/"
_NAMED = re.compile(r"<[^<>\s]+>")
"""Texts of special tokens that a grammar of llguidance can name."""


@dataclass(frozen=True, init=False, slots=True)
class Triggered:
    """Free text, and JSON documents that satisfy `schema` after each `marker`.

    schema         JSON text
    marker         text before a document, at least two characters
    closing        text after a document; free text may follow it. "": the reply ends with the
                   document
    separator      text between documents that follow each other; "" if none do
    begins         a reply whose first character is `{` is such a document, without the marker
    reasoning      opening and closing tag of the reasoning that a reply may begin with
    begins_inside  the prompt ends inside the reasoning
    """

    schema: str
    marker: str
    closing: str
    separator: str
    begins: bool
    reasoning: tuple[str, str]
    begins_inside: bool

    def __init__(
        self,
        schema: str | Mapping[str, object],
        marker: str,
        *,
        closing: str = "",
        separator: str = "",
        begins: bool = False,
        reasoning: tuple[str, str] = ("<think>", "</think>"),
        begins_inside: bool = False,
    ) -> None:
        for text in (marker, closing, separator, *reasoning):
            check_text(text, "a marker")
        if min(map(len, (marker, *reasoning))) < 2:
            raise ConstraintError(
                "a marker is too short", expected="two characters", got=(marker, *reasoning)
            )
        values = {
            "schema": schema if isinstance(schema, str) else text_of(schema),
            "marker": marker,
            "closing": closing,
            "separator": separator,
            "begins": begins,
            "reasoning": reasoning,
            "begins_inside": begins_inside,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def filter(self, vocabulary: Vocabulary) -> Filter:
        schema = checked_schema(self.schema, vocabulary.limits, _NAME)
        source = Source(_NAME, schema=schema, special=_special((self.closing,), vocabulary))
        lark = f"start: {self.rule(vocabulary)}\n{_SPACE}\ncall: %json {text_of(schema)}"
        return _TriggeredFilter(self, guided_filter(lark, vocabulary, source), vocabulary)

    def rule(self, vocabulary: Vocabulary) -> str:
        """Right side of a grammar's rule for what follows a marker. `call` is a document."""
        rule = "SPACE? call"
        if self.separator:
            rule += f" (SPACE? {json.dumps(self.separator)} SPACE? call)*"
        if self.closing:
            rule += f" SPACE? {_spelled(self.closing, vocabulary)}"
        return rule


@dataclass(frozen=True, slots=True)
class AnswerOrCalls:
    """The reply is a JSON document that satisfies `answer`, or it is calls without other text.

    answer  schema of the document
    calls   marker, schema and layout of the calls; its reasoning does not count here
    """

    answer: JsonSchema
    calls: Triggered

    def filter(self, vocabulary: Vocabulary) -> Filter:
        calls = self.calls
        # Compiled alone first: the errors name the part, and endless recursion is found.
        _, answer = self.answer.compiled(vocabulary)
        calls.filter(vocabulary)
        part = calls.rule(vocabulary)
        marked = f"{_spelled(calls.marker, vocabulary)} {part}"
        rules = [f"{marked} (SPACE? {marked})*" if calls.closing else marked]
        rules += [part] if calls.begins else []
        schemas = [
            text_of(checked_schema(text, vocabulary.limits, _NAME))
            for text in (answer, calls.schema)
        ]
        lark = (
            f"start: answer | {' | '.join(rules)}\n{_SPACE}\n"
            f"answer: %json {schemas[0]}\ncall: %json {schemas[1]}"
        )
        special = _special((calls.marker, calls.closing), vocabulary)
        return guided_filter(lark, vocabulary, Source(_NAME, special=special))


def _special(texts: Sequence[str], vocabulary: Vocabulary) -> tuple[str, ...]:
    """Those of the texts that are special tokens which a grammar can name."""
    known = vocabulary.special_tokens
    return tuple(one for one in texts if one in known and _NAMED.fullmatch(one))


def _spelled(text: str, vocabulary: Vocabulary) -> str:
    """A text in a grammar: as ordinary tokens, or as the special token of this text."""
    if text in vocabulary.special_tokens and not _NAMED.fullmatch(text):
        raise ConstraintError(
            "a grammar cannot name this special token", expected="<...>", got=repr(text)
        )
    return f"({' | '.join([json.dumps(text), *_special((text,), vocabulary)])})"


class _Stage(Enum):
    START = auto()  # white space, or the beginning of the opening tag
    REASONING = auto()
    ANSWER = auto()  # white space after the reasoning
    FREE = auto()
    PART = auto()  # in a document


@dataclass(frozen=True, slots=True)
class _State:
    """State after a token.

    tail  latest text that may belong to a tag or a marker
    part  filter of the document
    fed   filter that accepted the token
    """

    stage: _Stage
    tail: bytes = b""
    part: GuidedFilter | None = None
    fed: GuidedFilter | None = None


class _TriggeredFilter(Filter):
    def __init__(self, rule: Triggered, part: GuidedFilter, vocabulary: Vocabulary) -> None:
        self._rule = rule
        self._part = part  # accepts nothing; copies of it do
        self._vocabulary = vocabulary
        self._opening, self._closing = (tag.encode() for tag in rule.reasoning)
        self._marker = _Mark(rule.marker.encode(), vocabulary)
        self._end_of_reasoning = _Mark(self._closing, vocabulary)
        self._states = [_State(_Stage.REASONING if rule.begins_inside else _Stage.START)]
        self._first_mask: Tensor | None = None

    @property
    def _state(self) -> _State:
        return self._states[-1]

    def mask(self) -> Tensor | None:
        state = self._state
        if state.part is not None:
            return state.part.mask()
        if state.stage is _Stage.REASONING:
            return self._end_of_reasoning.mask(state.tail)
        if self._rule.begins and state.stage is not _Stage.FREE and not state.tail:
            return self._mask_of_start()
        return self._marker.mask(state.tail)

    def accept(self, token_id: int) -> None:
        self._states.append(self._after(token_id))

    def rewind(self, count: int) -> None:
        for _ in range(count):
            fed = self._states.pop().fed
            if fed is not None:
                fed.rewind(1)

    @property
    def is_complete(self) -> bool:
        part = self._state.part
        return part is None or (not self._rule.closing and part.is_complete)

    @property
    def is_finished(self) -> bool:
        part = self._state.part
        return part is not None and not self._rule.closing and part.is_finished

    def _after(self, token_id: int) -> _State:
        state = self._state
        if state.part is not None:
            return self._fed(state.part, token_id)
        said = state.tail + self._vocabulary.tokenizer.token_bytes(token_id, skip_special=False)
        if state.stage in (_Stage.FREE, _Stage.REASONING):
            return self._scan(state.stage, said)
        said = said.lstrip()
        if state.stage is _Stage.START and said.startswith(self._opening):
            return self._scan(_Stage.REASONING, said.removeprefix(self._opening))
        if not said or (state.stage is _Stage.START and self._opening.startswith(said)):
            return _State(state.stage, said)
        if self._begins_part(said):
            return self._fed(self._part.copy(), token_id)
        return self._scan(_Stage.FREE, said)

    def _fed(self, part: GuidedFilter, token_id: int) -> _State:
        part.accept(token_id)
        if self._rule.closing and part.is_complete:
            return _State(_Stage.FREE, fed=part)
        return _State(_Stage.PART, part=part, fed=part)

    def _scan(self, stage: _Stage, said: bytes) -> _State:
        """State after text that may hold the tag or the marker that ends this stage."""
        mark = self._end_of_reasoning if stage is _Stage.REASONING else self._marker
        _, found, rest = said.partition(mark.text)
        if not found:
            return _State(stage, said[1 - len(mark.text) :])
        if rest.strip():
            raise ConstraintError(
                "the token does not fit the constraint",
                where=f"token {len(self._states) - 1} of the reply",
                expected=f"nothing after {mark.text.decode()!r} in the same token",
                got=repr(said),
            )
        if stage is _Stage.REASONING:
            return _State(_Stage.ANSWER)
        return _State(_Stage.PART, part=self._part.copy())

    def _begins_part(self, said: bytes) -> bool:
        return self._rule.begins and said.lstrip().startswith(_OBJECT)

    def _mask_of_start(self) -> Tensor:
        """Tokens that begin a document correctly, or begin none."""
        if self._first_mask is None:
            texts = enumerate(self._vocabulary.token_bytes)
            wrong = self._vocabulary.mask_of(i for i, text in texts if self._begins_part(text))
            free = self._marker.mask(b"")
            free = self._vocabulary.everything() if free is None else free
            self._first_mask = (free & ~wrong) | (self._part.mask() & wrong)
        return self._first_mask


class _Mark:
    """A text that ends a stage, and the tokens that would pass its end."""

    def __init__(self, text: bytes, vocabulary: Vocabulary) -> None:
        self.text = text
        self._vocabulary = vocabulary
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        # Tokens that hold the whole text and go on.
        self._holding = frozenset(
            i
            for i, token in enumerate(vocabulary.token_bytes)
            if text in token and token.partition(text)[2].strip()
        )

    def mask(self, tail: bytes) -> Tensor | None:
        """Mask of the tokens after `tail`. None allows all."""
        sizes = range(1, min(len(self.text), len(tail) + 1))
        begun = tuple(size for size in sizes if tail.endswith(self.text[:size]))
        if begun not in self._masks:
            passing = self._holding.union(*map(self._passing, begun))
            everything = self._vocabulary.everything
            mask = everything() & ~self._vocabulary.mask_of(passing) if passing else None
            self._masks[begun] = mask
        return self._masks[begun]

    def _passing(self, begun: int) -> Iterator[int]:
        """Tokens that complete the text, of which `begun` bytes are written, and go on."""
        rest = self.text[begun:]
        texts = self._vocabulary.token_bytes
        for i in self._vocabulary.sorted_tokens.starting_with(rest):
            if texts[i][len(rest) :].strip():
                yield i
