"""The programs of docs/python.md run and print the output that their comments show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from exl_core.session.load import LoadedModel
from support.adapters import stored, write_adapter

pytestmark = pytest.mark.thorough

GUIDE = Path(__file__).resolve().parents[3] / "docs/python.md"


def test_the_programs_of_the_guide_run(
    smollm2: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("exl_core.session.load.load_model", lambda _: smollm2)
    pair = torch.full((4, 576), 0.01), torch.full((576, 4), 0.5)
    write_adapter(tmp_path / "my-adapter", stored({"model.layers.0.self_attn.q_proj": pair}))
    programs = re.findall(r"^```python\n(.+?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(programs) > 8
    names: dict[str, object] = {}
    for program in programs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "docs/python.md", "exec"), names)
        expected = re.findall(r"^ *print\(.*\)  # (.+)$", program, re.M)
        lines = printed.getvalue().splitlines()
        assert [line for line in lines if line in expected] == expected, (program, lines)
