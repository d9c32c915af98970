"""llama.cpp's spellings of options: those that exl takes as its own, and answers to the others.

Works on the words of a command line, before they are parsed: `-ngl 99` would otherwise be `-n gl`.
"""

from __future__ import annotations

from collections.abc import Sequence

from exl_core.errors import RequestError

COMMANDS = ("generate", "chat", "run", "serve-lite")

_OURS = {
    "-t": "--threads",
    "-md": "--draft-model",
    "--model-draft": "--draft-model",
    "--draft": "--draft-tokens",
    "--draft-max": "--draft-tokens",
    "-ctk": "--cache-type",
    "-ctv": "--cache-type",
    "--cache-type-k": "--cache-type",
    "--cache-type-v": "--cache-type",
    "-sys": "--system",
    "--system-prompt": "--system",
    "-j": "--json-schema",
    "--grammar-file": "--grammar",
    "-s": "--seed",
    "--predict": "-n",
    "--n-predict": "-n",
    "-hf": "-m",
    "--hf-repo": "-m",
    "--repeat-last-n": "--repeat-range",
    "--top-nsigma": "--top-n-sigma",
    "--dry-penalty-last-n": "--dry-range",
    "-np": "--max-batch",
    "--parallel": "--max-batch",
}
_WITHOUT_EFFECT = {"-fa": "attention is always fused", "--flash-attn": "attention is always fused"}
_ON_OFF = ("on", "off", "auto", "0", "1")
_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
_ANSWERS = {
    "-ts": "--split has GB of weights for each GPU, as in --split 20,24",
    "--tensor-split": "--split has GB of weights for each GPU, as in --split 20,24",
    "--dry-sequence-breaker": "--dry-breakers has all characters in one value",
}
_ALL_LAYERS = 99


_WITH_TEXT = ("-p", "--prompt", "-f", "--file", "--system", "--stop", "--ban", "--regex")
"""Options whose value may look like an option."""


def translate(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line with exl's spellings, and notes on options that have no effect.

    Words after `--` stay. RequestError for an option that exl answers by another one.
    """
    if not args or args[0] not in COMMANDS:
        return list(args), []
    translated: list[str] = []
    notes: list[str] = []
    left = list(args)
    while left:
        word = left.pop(0)
        name, mark, value = word.partition("=")
        if word == "--":
            return [*translated, word, *left], notes
        if word in _WITH_TEXT:
            translated += [word, *left[:1]]
            del left[:1]
        elif name in _WITHOUT_EFFECT:
            notes.append(f"{name} has no effect: {_WITHOUT_EFFECT[name]}")
            if not mark and left and left[0] in _ON_OFF:
                del left[:1]
        elif name in _LAYERS:
            layers = value if mark else left.pop(0) if left else ""
            translated += ["--device", _device_for(name, layers)]
        elif name in _ANSWERS:
            raise RequestError(f"there is no option {name}", next_step=f"Here {_ANSWERS[name]}.")
        elif name in _OURS:
            translated += [_OURS[name], value] if mark else [_OURS[name]]
        else:
            translated.append(word)
    return translated, notes


def _device_for(name: str, layers: str) -> str:
    """Device for llama.cpp's number of layers on the GPU."""
    if layers == "0":
        return "cpu"
    if layers.removeprefix("-").isdecimal() and not 0 < int(layers) < _ALL_LAYERS:
        return "auto"
    raise RequestError(
        f"there is no option {name}",
        expected=f"0 for the CPU, or {_ALL_LAYERS} and more for all layers",
        got=layers,
        next_step="Here --cpu-layers has the number of layers that stay on the CPU.",
    )
