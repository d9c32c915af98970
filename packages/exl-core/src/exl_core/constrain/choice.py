"""Constraints on replies that are one of several texts, or that start with one of them.

The given texts form an automaton over bytes. A position is a place in one of the texts. A state is
the set of all positions that the reply so far can have reached. The mask is found by stepping from
the state, byte by byte, along the paths that are prefixes of tokens. Its cost therefore depends on
the texts that still match, not on the size of the vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from exl_core.constrain.filter import Filter, check_text
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError

Text = tuple[tuple[bytes, ...], ...]
"""Spellings of each character, in the order of the text."""
Position = tuple[int, int, bytes]
"""Index of the text, number of its characters begun, remaining bytes of the last one's spelling."""
State = frozenset[Position]


@dataclass(frozen=True, init=False, slots=True)
class OneOf:
    """The reply is exactly one of `options`; with `ignore_case`, in any mix of cases.

    If one option is a prefix of another, the model may end the reply there or continue.
    """

    options: tuple[str, ...]
    ignore_case: bool

    def __init__(self, options: Iterable[str], *, ignore_case: bool = False) -> None:
        object.__setattr__(self, "options", _checked(options, "options"))
        object.__setattr__(self, "ignore_case", ignore_case)

    def filter(self, vocabulary: Vocabulary) -> Filter:
        texts = _Texts(tuple(_spellings(text, self.ignore_case) for text in self.options))
        return _checked_filter(_OneOfFilter(texts, vocabulary), "options")


@dataclass(frozen=True, init=False, slots=True)
class StartsWith:
    """The reply starts with one of `prefixes`; any text may follow.

    The token that completes the prefix may extend beyond it. This constraint never ends a reply,
    and does not allow the reply to end within the prefix.
    """

    prefixes: tuple[str, ...]

    def __init__(self, prefixes: str | Iterable[str]) -> None:
        given = (prefixes,) if isinstance(prefixes, str) else prefixes
        object.__setattr__(self, "prefixes", _checked(given, "prefixes"))

    def filter(self, vocabulary: Vocabulary) -> Filter:
        texts = _Texts(tuple(_spellings(text, ignore_case=False) for text in self.prefixes))
        return _checked_filter(_StartsWithFilter(texts, vocabulary), "prefixes")


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts as an automaton over bytes."""

    texts: tuple[Text, ...]
    start: State = field(init=False)

    def __post_init__(self) -> None:
        start = frozenset((number, 0, b"") for number in range(len(self.texts)))
        object.__setattr__(self, "start", start)

    def steps(self, state: State) -> dict[int, State]:
        """Next state for each allowed byte."""
        found: dict[int, set[Position]] = {}
        for number, written, rest in state:
            for byte, position in self._steps_of(number, written, rest):
                found.setdefault(byte, set()).add(position)
        return {byte: frozenset(positions) for byte, positions in found.items()}

    def _steps_of(self, number: int, written: int, rest: bytes) -> Iterator[tuple[int, Position]]:
        if rest:
            yield rest[0], (number, written, rest[1:])
        elif written < len(self.texts[number]):
            for way in self.texts[number][written]:
                yield way[0], (number, written + 1, way[1:])

    def walk(self, state: State, text: bytes) -> State:
        for byte in text:
            state = self.steps(state).get(byte, frozenset())
        return state

    def is_whole(self, state: State) -> bool:
        """Whether one of the texts is complete in this state."""
        return any(not rest and written == len(self.texts[n]) for n, written, rest in state)


class _TextFilter(Filter):
    def __init__(self, texts: _Texts, vocabulary: Vocabulary) -> None:
        self._texts = texts
        self._vocabulary = vocabulary
        self._states = [texts.start]  # initial state, then one after each token

    @property
    def _state(self) -> State:
        return self._states[-1]

    @property
    def is_complete(self) -> bool:
        return self._texts.is_whole(self._state)

    def accept(self, token_id: int) -> None:
        token = b""
        if 0 <= token_id < self._vocabulary.num_tokens:
            token = self._vocabulary.token_bytes[token_id]
        state = self._after(token) if token or self._is_unconstrained else frozenset()
        if not state:
            raise ConstraintError(
                "the token does not fit the texts that the reply may be",
                where=f"token {len(self._states) - 1} of the reply",
                got=f"{token_id} ({token!r})",
            )
        self._states.append(state)

    def rewind(self, count: int) -> None:
        if count:
            del self._states[-count:]

    @property
    def _is_unconstrained(self) -> bool:
        """Whether every token is allowed, special tokens included."""
        return False

    @abstractmethod
    def _after(self, token: bytes) -> State:
        """State after a token; empty if no text allows it."""

    def _allowed(self, *, allow_overshoot: bool) -> Tensor:
        tokens = self._vocabulary.sorted_tokens
        found: list[int] = []
        open_paths = [(b"", self._state)]
        while open_paths:
            path, state = open_paths.pop()
            for byte, reached in self._texts.steps(state).items():
                longer = path + bytes([byte])
                if allow_overshoot and self._texts.is_whole(reached):
                    found += tokens.starting_with(longer)
                elif tokens.has_prefix(longer):
                    found += tokens.exactly(longer)
                    open_paths.append((longer, reached))
        return self._vocabulary.mask_of(found)


class _OneOfFilter(_TextFilter):
    def mask(self) -> Tensor:
        return self._allowed(allow_overshoot=False)

    @property
    def is_finished(self) -> bool:
        return self.is_complete and not self._texts.steps(self._state)

    def _after(self, token: bytes) -> State:
        return self._texts.walk(self._state, token)


class _StartsWithFilter(_TextFilter):
    is_finished = False

    def mask(self) -> Tensor | None:
        return None if self.is_complete else self._allowed(allow_overshoot=True)

    @property
    def _is_unconstrained(self) -> bool:
        return self.is_complete

    def _after(self, token: bytes) -> State:
        state = self._state
        for byte in token:
            if self._texts.is_whole(state):
                break
            state = self._texts.steps(state).get(byte, frozenset())
        return state


def _checked(texts: object, what: str) -> tuple[str, ...]:
    found: tuple[object, ...] = ()
    if isinstance(texts, Iterable) and not isinstance(texts, str):
        found = tuple(texts)
    checked = [text for text in found if isinstance(text, str)]
    if not checked or len(checked) != len(found):
        raise ConstraintError(
            f"the {what} are no texts", expected="a list of at least one", got=repr(texts)[:100]
        )
    for text in checked:
        check_text(text, f"one of the {what}")
    return tuple(dict.fromkeys(checked))


def _spellings(text: str, ignore_case: bool) -> Text:
    if not ignore_case:
        return tuple((char.encode(),) for char in text)
    return tuple(
        tuple(dict.fromkeys(way.encode() for way in (char, char.lower(), char.upper())))
        for char in text
    )


def _checked_filter(made: _TextFilter, what: str) -> Filter:
    mask = made.mask()
    if not made.is_complete and mask is not None and not bool(mask.any()):
        raise ConstraintError(f"no token of this model can begin one of the {what}")
    return made
