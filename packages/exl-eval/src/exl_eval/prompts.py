"""Prompts for the measurement of drafts, by category; written for this project.

Plain data of this package (`data/prompts.json`). Accept rates depend on the kind of text, so
figures are reported per category. No torch.
"""

from __future__ import annotations

import json
from importlib.resources import files

CATEGORIES = ("code", "chat", "translation", "repetition")


def prompt_set() -> dict[str, tuple[str, ...]]:
    """The prompts of each category, in the order of `CATEGORIES`."""
    data = files("exl_eval").joinpath("data/prompts.json").read_text(encoding="utf-8")
    listed: dict[str, list[str]] = json.loads(data)
    return {category: tuple(listed[category]) for category in CATEGORIES}
