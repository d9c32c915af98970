"""A configuration that contradicts its tensors is refused by one line, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exl_core.errors import ModelError
from exl_core.session import weights
from exl_core.session.load import load_model
from support.families import FAMILIES, save_family
from support.profiles import first_by_default

WIDTHS = ("intermediate_size", "shared_intermediate_size")


@pytest.mark.parametrize("family", first_by_default(FAMILIES, 6))
def test_a_wrong_width_is_refused_before_weights_are_packed(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_family(family, FAMILIES[family](), tmp_path)
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    text = config.get("text_config", config)
    text |= {key: text[key] + 32 for key in WIDTHS if key in text}
    path.write_text(json.dumps(config))

    def no_weights(*_: object, **__: object) -> None:
        raise AssertionError("weights are packed before the headers are compared")

    monkeypatch.setattr(weights, "build_weights", no_weights)
    with pytest.raises(
        ModelError, match=r"shape.*expected \[\d+, \d+\], got \[\d+, \d+\]"
    ) as found:
        load_model(str(folder))

    assert "\n" not in str(found.value)
    assert found.value.exit_code == 3
