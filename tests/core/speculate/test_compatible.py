"""Compatibility of draft models: vocabulary check and extension of a short context."""

from __future__ import annotations

import pytest

from exl_core.errors import RequestError
from exl_core.speculate.compatible import check_same_vocabulary, draft_rope_alpha
from exl_core.tokenizer.base import ControlIds, Tokenizer


class Words(Tokenizer):
    kind = "words"

    def __init__(self, words: list[str | None], special: dict[str, int]) -> None:
        super().__init__(ControlIds(), special, "Words")
        self.words = words

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def _piece(self, token_id: int) -> bytes | None:
        word = self.words[token_id] if token_id < len(self.words) else None
        return None if word is None else word.encode()


WORDS: list[str | None] = [f"w{i}" for i in range(3000)]
SPECIAL = {"<s>": 0, "</s>": 2999}


def changed(token_id: int, word: str | None) -> list[str | None]:
    return [*WORDS[:token_id], word, *WORDS[token_id + 1 :]]


def test_equal_vocabularies_are_accepted_with_padding() -> None:
    target = Words(WORDS, SPECIAL)
    check_same_vocabulary(target, Words(WORDS, SPECIAL))
    longer = Words([*WORDS, "<pad>", None], {**SPECIAL, "<pad>": 3000})
    check_same_vocabulary(target, longer)
    check_same_vocabulary(longer, target)
    check_same_vocabulary(target, Words(changed(40, None), SPECIAL))


def test_a_different_vocabulary_is_refused_with_its_first_difference() -> None:
    target = Words(WORDS, SPECIAL)
    with pytest.raises(RequestError, match=r"token 17 differs.*b'w17'.*b'other'"):
        check_same_vocabulary(target, Words(changed(17, "other"), SPECIAL))
    shifted = Words([*WORDS[:500], "new", *WORDS[500:]], {"<s>": 0, "</s>": 3000})
    with pytest.raises(RequestError, match=r"token 5\d\d differs"):
        check_same_vocabulary(target, shifted)


def test_every_special_token_is_compared() -> None:
    target = Words(WORDS, {**SPECIAL, "<tool>": 1999})
    with pytest.raises(RequestError, match="token 1999 differs"):
        check_same_vocabulary(target, Words(WORDS, SPECIAL))
    with pytest.raises(RequestError, match="token 1999 differs"):
        check_same_vocabulary(Words(WORDS, SPECIAL), target)


def test_alpha_extends_a_shorter_context() -> None:
    assert draft_rope_alpha(2048, 2048) == draft_rope_alpha(2048, 4096) == 1.0
    assert draft_rope_alpha(4096, 2048) == pytest.approx(2.62978)
    assert draft_rope_alpha(8192, 2048) == pytest.approx(7.70056)
    assert draft_rope_alpha(2049, 2048) >= 1.0
