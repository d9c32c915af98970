"""Lower bound and cuts (`long_text.py`) for BPE tokenizers of the `tokenizers` library.

Both require proofs about the steps of a tokenizer. They are given only for known steps: those of
the model families that this package supports. Any other tokenizer gets neither, and tokenizes its
texts whole.

A cut is between a letter or digit and a space or newline that is followed by a letter or digit.
Two kinds of tokenizer allow it.
  * Byte-level BPE first splits into words. No match of a known pattern contains a letter or digit
    followed by a space or newline. Therefore a word ends at the cut, with or without more text. The
    next match begins at the cut and does not look behind it. NFC neither composes nor reorders
    across an ASCII character that is followed by a space.
  * BPE that encodes a space as U+2581 does not split into words. `cuts_of_marked_pieces` states the
    argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exl_core.tokenizer.decoders import byte_alphabet, byte_level_bytes
from exl_core.tokenizer.long_text import (
    Cuts,
    TokenLengths,
    bytes_of_marked,
    covered_bytes,
    cuts_of_marked_pieces,
)
from exl_core.tokenizer.pre_tokenizers import PRE_TOKENIZERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Patterns that split words between a letter or digit and a space or newline, and none of whose
# matches crosses such a position. The first belongs to models that use GPT-4's tokenizer.
_WORD_PATTERNS = frozenset(
    {
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        *(pre.patterns[-1] for pre in PRE_TOKENIZERS.values() if pre.patterns),
    }
)
# Patterns whose matches do not cross such a position, but that split no words there: those of
# digits, and of Chinese and Japanese characters.
_OTHER_PATTERNS = frozenset(
    pattern for pre in PRE_TOKENIZERS.values() for pattern in pre.patterns[:-1]
)
_SPACES = "\t\n\v\f\r\x85 \xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
_SPACES += "\u2028\u2029\u202f\u205f\u3000"
_SPACE_BYTES = frozenset(_SPACES.encode())


@dataclass(frozen=True, slots=True)
class BpeRules:
    """Rules of one tokenizer. None: not known."""

    lengths: TokenLengths | None = None
    cuts: Cuts | None = None


def bpe_rules(backend: Backend) -> BpeRules:
    model: Any = backend.model
    if type(model).__name__ != "BPE" or model.dropout:
        return BpeRules()
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return BpeRules()
    normalizer = _steps(backend.normalizer, "normalizers")
    words = _steps(backend.pre_tokenizer, "pretokenizers")
    added = list(backend.get_added_tokens_decoder().values())
    if words and words[-1].get("type") == "ByteLevel":
        return _byte_level(backend, normalizer, words, added)
    return _marked(backend, normalizer, words, added)


def _byte_level(
    backend: Backend,
    normalizer: Sequence[Mapping[str, object]],
    words: Sequence[Mapping[str, object]],
    added: Sequence[Any],
) -> BpeRules:
    kinds = [step.get("type") for step in normalizer]
    composes = kinds == ["NFC"]
    if (kinds and not composes) or not all(map(_keeps_text, words)):
        return BpeRules()
    vocab = backend.get_vocab(with_added_tokens=False)
    covered = {byte for char, byte in byte_alphabet().items() if char in vocab}
    texts = [str(token.content) for token in added]
    lengths = None
    if not composes or all(map(str.isascii, texts)):
        tokens = [byte_level_bytes(token) for token in vocab] + [text.encode() for text in texts]
        lengths = TokenLengths(tokens, covered - _absorbed(added), composes=composes)
    is_cuttable = (
        words[-1].get("add_prefix_space") is False
        and all(map(_is_local, words))
        and any(map(_separates_words, words))
        and _allow_cuts(added)
    )
    return BpeRules(lengths, Cuts(newlines=True) if is_cuttable else None)


def _marked(
    backend: Backend,
    normalizer: Sequence[Mapping[str, object]],
    words: Sequence[Mapping[str, object]],
    added: Sequence[Any],
) -> BpeRules:
    """Rules of BPE that encodes a space as U+2581, as in the vocabularies of Llama 2 and Gemma."""
    adds_space = marks_spaces = False
    for step in normalizer:
        match step:
            case {"type": "Prepend", "prepend": "\u2581"}:
                adds_space = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                marks_spaces = True
            case _:
                return BpeRules()
    for step in words:
        match step:
            case {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": str(scheme)}:
                marks_spaces = True
                adds_space = adds_space or scheme != "never"
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                pass  # the normalizer has replaced all spaces
            case _:
                return BpeRules()
    if not marks_spaces:
        return BpeRules()
    model: Any = backend.model
    vocab = backend.get_vocab(with_added_tokens=False)
    # `_without_special_texts` in `hf_json.py` renames special tokens, so they are not reliable.
    special = {str(token.content) for token in added if token.special}
    has_bytes = model.byte_fallback and not any(
        name not in vocab or name in special for name in map("<0x{:02X}>".format, range(256))
    )
    covered = covered_bytes(vocab, has_bytes=has_bytes)
    tokens = [bytes_of_marked(token) for token in vocab]
    # An added token that is matched after normalization may include the space that was added.
    tokens += [b" " + str(token.content).encode() for token in added]
    lengths = TokenLengths(tokens, covered - _absorbed(added))
    cuts = None
    if not model.ignore_merges and _allow_cuts(added):
        cuts = cuts_of_marked_pieces(vocab.keys(), adds_space=adds_space)
    return BpeRules(lengths, cuts)


def _steps(part: Any, key: str) -> list[Mapping[str, object]]:
    """Steps of a normalizer or pre-tokenizer, as JSON. [] for None."""
    if part is None:
        return []

    def flat(state: Any) -> list[Mapping[str, object]]:
        if state.get("type") != "Sequence":
            return [state]
        return [one for inner in state[key] for one in flat(inner)]

    return flat(json.loads(part.__getstate__()))


def _keeps_text(step: Mapping[str, object]) -> bool:
    """Whether the step removes no character."""
    kept = step.get("type") == "Split" and step.get("behavior") != "Removed"
    return kept or step.get("type") in ("ByteLevel", "Digits")


def _is_local(step: Mapping[str, object]) -> bool:
    if step.get("type") != "Split":
        return True
    match step:
        case {"pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern in _WORD_PATTERNS or pattern in _OTHER_PATTERNS
    return False


def _separates_words(step: Mapping[str, object]) -> bool:
    match step:
        case {"type": "ByteLevel", "use_regex": True}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(pattern)}}:
            return pattern in _WORD_PATTERNS
    return False


def _allow_cuts(added: Sequence[Any]) -> bool:
    """Whether no added token can match, or absorb spaces, across or directly beside a cut."""
    texts = [str(token.content) for token in added]
    return not any(_TOUCHES_CUT.search(text) for text in texts)


_TOUCHES_CUT = re.compile(r"^[A-Za-z0-9]|[A-Za-z0-9]$|[A-Za-z0-9][ \n]|[ \n][A-Za-z0-9]")


def _absorbed(added: Sequence[Any]) -> frozenset[int]:
    """Bytes of all space characters if an added token absorbs the spaces around it."""
    return _SPACE_BYTES if any(token.lstrip or token.rstrip for token in added) else frozenset()
