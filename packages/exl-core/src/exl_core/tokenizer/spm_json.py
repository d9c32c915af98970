"""`tokenizer.json` that is equivalent to a SentencePiece model, for programs that read only this.

SentencePiece joins the two neighbors whose joined piece has the highest score. The `tokenizers`
library joins the two that come first in a list of merges. The list has every piece, by falling
score, once for each division into two other pieces. A text is first divided at user-defined pieces
by both, so that these are no parts of merges.

Differences remain possible where two divisions of one piece overlap, as in a run of equal
characters: SentencePiece takes the left one, the library the one that is first in the list.
transformers converts Llama and Gemma models in the same way. User-defined pieces with spaces are
not found where a text has U+2581 in place of a space.

Knows neither GGUF nor the files beside the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from exl_core.tokenizer.base import ControlIds
from exl_core.tokenizer.decoders import META_SPACE
from exl_core.tokenizer.spm import SentencePieceTokenizer
from exl_core.tokenizer.spm_proto import PieceType, pieces_of, text_rules

_BYTES = 256
Json = Mapping[str, object]


def tokenizer_json(tokenizer: SentencePieceTokenizer) -> bytes | None:
    """Content of an equivalent `tokenizer.json`; None if the library has no equivalent.

    There is none for unigram models, tables of Unicode replacements, removal of spaces, spaces
    behind words, unused pieces and tokens outside the model. There is none for a model that adds a
    space before texts and has user-defined pieces, because the library would add one after each of
    them.
    """
    model = tokenizer.as_model()
    rules, pieces = text_rules(model), pieces_of(model)
    by_kind = {kind: [i for i, (_, _, k) in enumerate(pieces) if k is kind] for kind in PieceType}
    defined, unknown = by_kind[PieceType.USER_DEFINED], by_kind[PieceType.UNKNOWN]
    is_changed = rules.has_charsmap or rules.removes_extra_spaces or rules.puts_spaces_behind
    adds_space = tokenizer.adds_space
    if not rules.is_bpe or not rules.escapes_spaces or is_changed or by_kind[PieceType.UNUSED]:
        return None
    if adds_space is None or (adds_space and defined) or tokenizer.vocab_size != len(pieces):
        return None
    texts = [text for text, _, _ in pieces]
    for number in defined:  # the library looks for them before the normalizer changes spaces
        texts[number] = texts[number].replace(META_SPACE, " ")
    if len(set(texts)) != len(texts):
        return None
    special = [*unknown, *by_kind[PieceType.CONTROL]]
    scores = {texts[number]: pieces[number][1] for number in by_kind[PieceType.NORMAL]}
    return _json(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(texts, special, defined),
            "normalizer": _normalizer(adds_space=adds_space),
            "pre_tokenizer": None,
            "post_processor": _post_processor(texts, tokenizer.control),
            "decoder": _decoder(adds_space=adds_space),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": texts[unknown[0]],
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": len(by_kind[PieceType.BYTE]) == _BYTES,
                "ignore_merges": False,
                "vocab": {text: number for number, text in enumerate(texts)},
                "merges": merges_of(scores),
            },
        }
    )


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Pairs of pieces in the order in which they are joined. `scores` are those of all pieces."""
    numbers = {text: number for number, text in enumerate(scores)}
    found: list[tuple[str, str]] = []
    for piece in sorted(scores, key=lambda text: (-scores[text], numbers[text])):
        divided = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [pair for pair in divided if pair[0] in numbers and pair[1] in numbers]
        found += sorted(pairs, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
    return found


def _added_tokens(
    texts: Sequence[str], special: Sequence[int], defined: Sequence[int]
) -> list[Json]:
    kinds = {**dict.fromkeys(defined, False), **dict.fromkeys(special, True)}
    return [
        {
            "id": number,
            "content": texts[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[number],
        }
        for number in sorted(kinds)
    ]


def _normalizer(*, adds_space: bool) -> Json:
    marked = {"type": "Replace", "pattern": {"String": " "}, "content": META_SPACE}
    if not adds_space:
        return marked
    return _sequence("normalizers", [{"type": "Prepend", "prepend": META_SPACE}, marked])


def _decoder(*, adds_space: bool) -> Json:
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": META_SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _sequence("decoders", steps)


def _sequence(key: str, steps: Iterable[Json]) -> Json:
    return {"type": "Sequence", key: list(steps)}


def _post_processor(texts: Sequence[str], control: ControlIds) -> Json | None:
    """Adds BOS and EOS as the model wants them."""
    before = [control.bos_id] if control.adds_bos and control.bos_id is not None else []
    after = list(control.eos_ids[:1]) if control.adds_eos else []
    if not before and not after:
        return None

    def around(kind: int, name: str) -> list[Json]:
        text = {"Sequence": {"id": name, "type_id": kind}}
        return [
            *(_special(texts[i], kind) for i in before),
            text,
            *(_special(texts[i], kind) for i in after),
        ]

    return {
        "type": "TemplateProcessing",
        "single": around(0, "A"),
        "pair": [*around(0, "A"), *around(1, "B")],
        "special_tokens": {
            texts[i]: {"id": texts[i], "ids": [i], "tokens": [texts[i]]} for i in (*before, *after)
        },
    }


def _special(text: str, kind: int) -> Json:
    return {"SpecialToken": {"id": text, "type_id": kind}}


def _json(content: Json) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()
