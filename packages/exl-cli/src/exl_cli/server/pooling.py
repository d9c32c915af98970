"""How the vector of a text is made from its hidden states, as an embedding model was trained.

sentence-transformers writes the pooling of a model to `1_Pooling/config.json`. The tokenizer's own
rule says which tokens end a text (`tokenizer.json`, or `add_eos_token` of a GGUF file).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exl_core.errors import ModelError
from exl_core.files import read_json_object
from exl_core.session.load import LoadedModel
from exl_core.tokenizer import hf_json

Kind = Literal["mean", "last"]
_MODES: dict[str, Kind] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class Pooling:
    """kind    mean of the normed states of all tokens, or the state of the last token
    ending  tokens that end each text
    """

    kind: Kind
    ending: tuple[int, ...] = ()


def pooling_of(loaded: LoadedModel, wanted: Literal["auto", "mean", "last"]) -> Pooling:
    """The pooling of a model. `auto`: that of its files, by default the mean. Raises ModelError for
    a pooling that is neither."""
    path = loaded.path / "1_Pooling/config.json"
    kind: Kind = "mean" if wanted == "auto" else wanted
    if wanted == "auto" and path.is_file():
        config = read_json_object(path, ModelError)
        modes = [name for name, on in config.items() if name.startswith("pooling_") and on is True]
        if len(modes) != 1 or modes[0] not in _MODES:
            raise ModelError(
                "this pooling is not supported",
                where=path,
                expected=" or ".join(_MODES),
                got=", ".join(modes) or "none",
            )
        kind = _MODES[modes[0]]
    return Pooling(kind, _ending(loaded))


def _ending(loaded: LoadedModel) -> tuple[int, ...]:
    path = loaded.path / "tokenizer.json"
    if path.is_file():
        return tuple(_added_after(path))
    tokenizer = loaded.tokenizer
    return tokenizer.eos_ids[:1] if tokenizer.adds_eos else ()


def _added_after(path: Path) -> list[int]:
    _, after = hf_json.probe_added_around(hf_json.open_backend(path), path)
    return list(after)
