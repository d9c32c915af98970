"""Filters of the old kind: the base class of programs' own filters, and the two built-in ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from exl_core.constrain.filter import Constraint
from exl_core.constrain.foreign import Foreign
from exl_core.tokenizer.pieces import CharTrie
from exl_exllamav2.errors import OldValueError
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

Allowed = tuple[set[int] | list[int] | None, set[int] | list[int]]


class ExLlamaV2Filter:
    """Base class. Subclasses override `begin`, `feed` and `next`, or the methods for masks."""

    allow_return_type_list = True

    def __init__(self, model: Any, tokenizer: ExLlamaV2Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.sequence_str = ""
        self.background_result: Future[Any] | None = None

    def clone(self, c: Any = None) -> Any:
        """A copy with the same state. Subclasses make `c` and add their own attributes."""
        if c is None:
            c = copy.copy(self)
        c.model, c.tokenizer = self.model, self.tokenizer
        c.sequence_str, c.background_result = self.sequence_str, None
        return c

    def begin(self, prefix_str: Any) -> None:
        raise NotImplementedError

    def feed(self, token: Tensor) -> None:
        raise NotImplementedError

    def next(self) -> Allowed:
        raise NotImplementedError

    def use_background_worker(self) -> bool:
        return False

    def can_mask_logits(self) -> bool:
        return False

    def prepare_logit_mask(self) -> bool:
        raise NotImplementedError

    def mask_logits(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def background_next(self, pool: ThreadPoolExecutor) -> None:
        self.background_result = pool.submit(self.next)

    def background_prepare_logit_mask(self, pool: ThreadPoolExecutor) -> None:
        self.background_result = pool.submit(self.prepare_logit_mask)

    def background_drop(self) -> None:
        if self.background_result is not None:
            self.background_result.result()
            self.background_result = None

    def get_next(self, mask: bool = False) -> Any:
        pending, self.background_result = self.background_result, None
        if pending is not None:
            return pending.result()
        return self.prepare_logit_mask() if mask else self.next()


class ExLlamaV2SelectFilter(ExLlamaV2Filter):
    """The reply is exactly one of `options`."""

    def __init__(
        self,
        model: Any,
        tokenizer: ExLlamaV2Tokenizer,
        options: list[str],
        case_insensitive: bool = False,
    ) -> None:
        super().__init__(model, tokenizer)
        self.options = [text.lower() if case_insensitive else text for text in options]
        self.case_insensitive = case_insensitive
        self.offset = 0
        self.prefix = ""
        self.sequence_str_cmp = ""

    def clone(self, c: Any = None) -> ExLlamaV2SelectFilter:
        found: ExLlamaV2SelectFilter = super().clone(c)
        for name in ("options", "case_insensitive", "offset", "prefix", "sequence_str_cmp"):
            setattr(found, name, getattr(self, name))
        return found

    def begin(self, prefix_str: Any) -> None:
        self.sequence_str = self.sequence_str_cmp = ""
        self.prefix = _text_of_prefix(prefix_str)
        self.offset = 0

    def feed(self, token: Tensor) -> None:
        piece = self.tokenizer.get_id_to_piece_list()[int(token.view(-1)[0])]
        self.sequence_str += piece
        cased = max(0, len(self.prefix) - self.offset)
        self.offset += len(piece)
        if self.case_insensitive:
            piece = piece[:cased] + piece[cased:].lower()
        self.sequence_str_cmp += piece

    def next(self) -> Allowed:
        """Tokens that are prefixes of the rest of an option; ends are those that complete one.

        An option follows the text that `begin` was given, which is fed as well: it is the text of
        the last prompt token, which the first token of a healed stream repeats.
        """
        pieces = self.tokenizer.get_id_to_piece_list()
        trie = self.tokenizer.get_char_trie()
        if self.case_insensitive:
            trie = self.tokenizer.get_char_trie_ci()
        passed: set[int] = set()
        ends: set[int] = set()
        for option in self.options:
            whole = self.prefix + option
            if not whole.startswith(self.sequence_str_cmp):
                continue
            node: CharTrie | None = trie
            rest = whole[self.offset :]
            cased = self.prefix[self.offset :]  # in its own case, even if the options are not
            for position, char in enumerate(rest.lower() if self.case_insensitive else rest):
                node = None if node is None else node.children.get(char)
                if node is None:
                    break
                leaf = [i for i in node.leaf if cased.startswith(pieces[i][: len(cased)])]
                passed.update(leaf)
                if position + 1 == len(rest):
                    ends.update(leaf)
        return passed, ends


class ExLlamaV2PrefixFilter(ExLlamaV2Filter):
    """The reply begins with one of the strings; any text may follow. In a healed stream, the token
    that replaces the last one of the prompt counts as the first of the reply."""

    def __init__(
        self, model: Any, tokenizer: ExLlamaV2Tokenizer, prefix_strings: str | Iterable[str]
    ) -> None:
        super().__init__(model, tokenizer)
        given = [prefix_strings] if isinstance(prefix_strings, str) else list(prefix_strings)
        if not given:
            raise OldValueError("a prefix filter needs a string")
        self.prefix_strings = given
        self.current_prefixes = set(given)
        self.current_str = ""
        self.prefix_string = given[0]

    def clone(self, c: Any = None) -> ExLlamaV2PrefixFilter:
        found: ExLlamaV2PrefixFilter = super().clone(c)
        for name in ("prefix_strings", "current_str", "prefix_string"):
            setattr(found, name, getattr(self, name))
        found.current_prefixes = set(self.current_prefixes)
        return found

    def begin(self, prefix_str: Any) -> None:
        self.current_str = ""
        self.current_prefixes = set(self.prefix_strings)

    def feed(self, token: Tensor) -> None:
        self.current_str += self.tokenizer.get_id_to_piece_list()[int(token.view(-1)[0])]

    def next(self) -> Allowed:
        """Tokens that continue a prefix or go beyond its end; None once one is complete."""
        written = self.current_str
        if any(written.startswith(prefix) for prefix in self.prefix_strings):
            return None, set()
        passed: set[int] = set()
        for prefix in self.prefix_strings:
            if not prefix.startswith(written):
                continue
            node: CharTrie | None = self.tokenizer.get_char_trie()
            for char in prefix[len(written) :]:
                node = None if node is None else node.children.get(char)
                if node is None:
                    break
                passed.update(node.leaf)
            if node is not None:
                passed.update(_leaves(node))
        return passed, set()


def constraints_of(
    filters: Iterable[Any] | None, busy: Iterable[Any] = (), healed: str | None = None
) -> tuple[Constraint, ...]:
    """Constraints for a request. Each object follows the reply itself, unless it is `busy` with
    another one: then a copy does. With `healed`, the text of the last prompt token, it also follows
    the token that replaces that one."""
    taken = {id(one) for one in busy}
    return tuple(
        Foreign(one, in_place=id(one) not in taken, healed=healed)
        for one in filters or ()
        if one is not None
    )


def healed_text(prompt_ids: Sequence[int], tokenizer: ExLlamaV2Tokenizer) -> str | None:
    """Text of the prompt token that token healing replaces; None if it replaces none."""
    last = prompt_ids[-1]
    if len(prompt_ids) < 2 or last >= tokenizer.exl.vocab_size:
        return None
    if not tokenizer.exl.token_bytes(last):
        return None
    return tokenizer.get_id_to_piece_list()[last]


def _leaves(node: CharTrie) -> Iterable[int]:
    """Tokens of all nodes below this one."""
    open_ = [node]
    while open_:
        one = open_.pop()
        yield from one.leaf
        open_ += one.children.values()


def _text_of_prefix(prefix: Any) -> str:
    """`begin` gets a text, None, or a list with one text per row."""
    if isinstance(prefix, list):
        return str(prefix[0]) if prefix else ""
    return prefix or ""
