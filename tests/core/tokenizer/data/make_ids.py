"""Write `smollm2_ids.json` and `gemma3_ids.json` with the tokenizers of other projects.

Run by hand: `python make_ids.py smollm2 MODEL.gguf`. README.md lists the packages to install.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llama_cpp import Llama
from transformers import AutoTokenizer

HERE = Path(__file__).parent
# Texts on which llama.cpp differs from the original of a SentencePiece vocabulary. It matches runs
# of spaces before it replaces spaces by U+2581, and treats '</s>' as a control token.
WHERE_LLAMA_CPP_DIFFERS = ("\u2581", "</s>")


def main() -> None:
    name, model = sys.argv[1], Path(sys.argv[2])
    texts = json.loads((HERE / "awkward_texts.json").read_bytes())
    llama = Llama(str(model), vocab_only=True, verbose=False)
    backend = AutoTokenizer.from_pretrained(
        str(model.parent), gguf_file=model.name
    ).backend_tokenizer

    def ids(text: str, *, special: bool) -> list[int]:
        if name == "gemma3" and any(part in text for part in WHERE_LLAMA_CPP_DIFFERS):
            backend.encode_special_tokens = not special
            found: list[int] = backend.encode(text, add_special_tokens=False).ids
            return found
        return list(llama.tokenize(text.encode(), add_bos=False, special=special))

    rows = []
    for text in texts:
        plain, special = ids(text, special=False), ids(text, special=True)
        rows.append([plain] if plain == special else [plain, special])
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (HERE / f"{name}_ids.json").write_text(f"[\n{body}\n]\n", encoding="ascii")


if __name__ == "__main__":
    main()
