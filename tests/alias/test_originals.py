"""Original programs of exllamav2, from a folder that EXL_OLD_PROGRAMS names; not part of this tree.

The folder is a checkout of the original, or has its `examples`. The programs run as they are, in
processes of their own, on SmolLM2 with a vocabulary that has the marks of Llama 3.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.real_models import smollm2_gguf

pytestmark = pytest.mark.thorough

RENAMED = {
    "<gh_stars>": "<|eot_id|>",
    "<issue_start>": "<|start_header_id|>",
    "<issue_comment>": "<|end_header_id|>",
    "<issue_closed>": "<|begin_of_text|>",
}
PROGRAMS = {
    "inference": "speed, bsz 4:",
    "inference_stream": "'eos_reason': 'max_new_tokens'",
    "inference_async": "Output 2",
    "inference_banned_strings": "With banned strings",
    "inference_cfg": "Scale: 2.0",
    "inference_speculative": "speed, +SD:",
    "inference_tp": "speed, bsz 4:",
    "deprecated/inference": "Response generated in",
    "deprecated/streaming": "250 tokens,",
    "deprecated/batched_inference": "Q: How do I build a time machine?",
    "deprecated/cfg": "cfg_scale = 2.0",
    "deprecated/speculative": "N-gram decoding (preloaded):",
    "deprecated/banned_strings": "",
}


@pytest.fixture(scope="session")
def examples() -> Path:
    folder = os.environ.get("EXL_OLD_PROGRAMS")
    if folder is None:
        pytest.skip("EXL_OLD_PROGRAMS names no folder with the original programs")
    return Path(folder) / "examples"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as an EXL2 directory, with four unused special tokens renamed."""
    folder = tmp_path_factory.mktemp("exl2") / "model"
    script = Path(__file__).parents[2] / "scripts" / "write_rtn_exl2.py"
    command = [sys.executable, str(script), str(smollm2_gguf()), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    for path in folder.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        json.loads(text)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_original_program_runs(
    name: str, examples: Path, model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkout" / "examples"
    shutil.copytree(examples, folder)
    done = subprocess.run(
        [sys.executable, "-m", "exl_cli", "exec", "--model", f"*={model_dir}", f"{name}.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert PROGRAMS[name] in done.stdout
    assert len(done.stderr.splitlines()) <= (1 if name == "inference_tp" else 0), done.stderr
