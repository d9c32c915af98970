"""The five pages of `../shared/seeds`: their programs as printed, with replaced model paths.

Three pages have program text. Their fragments are joined in the order of the page, and run by
`exl exec` without a change. The pages on chat and on text generation have prose only: the original
chat.py (`test_original_scripts.py`) and `programs/text_generation.py` take its steps. One fragment
of the third page is a sketch with arguments that no version of exllamav2 had. It is left out.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from alias.originals import errors_of, run_exec

if TYPE_CHECKING:
    from alias.conftest import Run

pytestmark = pytest.mark.timeout(1800)

SEEDS = Path(__file__).parents[2].parent / "shared" / "seeds"

STREAMING = "002_16953e8eaf9d42d6.txt"
PRINCIPLE = "003_32a3c738a01c2864.txt"
BASE = "004_aa7c89b59a23a648.txt"


def fragment(page: str, first: str, end: str, after: str = "") -> str:
    """The program text between two lines of a page, after the line `after`. Skips without it."""
    path = SEEDS / page
    if not path.is_file():
        pytest.skip(f"{path} is not at hand")
    text = path.read_text(encoding="utf-8")
    if after:
        text = text.split(f"\n{after}\n", maxsplit=1)[1]
    start = text.index(f"\n{first}")
    return text[start : text.index(f"\n{end}\n", start)] + "\n"


def run_text(
    text: str, folder: Path, *models: str, may_fill_context: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a program. `may_fill_context`: its loop has no limit of tokens and samples at random, so
    a reply without an end token ends with the error for a full context, as in the old library."""
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    options = [word for model in models for word in ("--model", model)]
    done = run_exec(*options, str(program), folder=folder)
    if may_fill_context and done.returncode == 1:
        assert "the context is full" in done.stderr.rstrip().splitlines()[-1], done.stderr
        return done
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.thorough
def test_streaming_generator(brief_dir: Path, tmp_path: Path) -> None:
    """Initialization, then the chat loop."""
    text = fragment(
        STREAMING, "from exllamav2 import", "With Speculative Decoding", "Basic Initialization"
    )
    loop = fragment(
        STREAMING, "from exllamav2.gen", "Related Pages", "Complete Streaming Chat Loop"
    )
    model = f"/path/to/model={brief_dir}"
    done = run_text(text + loop, tmp_path, model, may_fill_context=True)
    assert len(done.stdout.strip()) > 1
    assert done.returncode or errors_of(done) == []


@pytest.mark.thorough
def test_streaming_generator_with_a_draft_model(brief_dir: Path, tmp_path: Path) -> None:
    text = fragment(
        STREAMING,
        "from exllamav2 import",
        "Complete Streaming Chat Loop",
        "With Speculative Decoding",
    )
    loop = fragment(
        STREAMING, "from exllamav2.gen", "Related Pages", "Complete Streaming Chat Loop"
    )
    models = (f"/path/to/model={brief_dir}", f"/path/to/draft_model={brief_dir}")
    done = run_text(text + loop, tmp_path, *models, may_fill_context=True)
    assert len(done.stdout.strip()) > 1
    assert done.returncode or errors_of(done) == []


@pytest.mark.thorough
def test_streaming_principle(brief_dir: Path, tmp_path: Path) -> None:
    """The loop of two phases; its names are defined before it. The stop strings end each reply
    early, because the text may meet no full stop before the context is full."""
    before = fragment(
        STREAMING, "from exllamav2 import", "With Speculative Decoding", "Basic Initialization"
    )
    defined = (
        "from exllamav2.generator import ExLlamaV2Sampler\n"
        "gen_settings = ExLlamaV2Sampler.Settings.greedy()\n"
        "input_ids = tokenizer.encode('The capital of France is')\n"
        "generator.set_stop_conditions([tokenizer.eos_token_id, 'e ', 's '])\n"
        "def display(text):\n    print(text, end='')\n"
    )
    loop = fragment(PRINCIPLE, "# Phase 1", "Speculative Decoding in Streaming")
    done = run_text(
        before + defined + loop + "assert full_text\n", tmp_path, f"/path/to/model={brief_dir}"
    )
    assert done.stdout.strip()
    assert errors_of(done) == []


@pytest.mark.thorough
def test_base_generator(model_dir: Path, lora_dir: Path, tmp_path: Path) -> None:
    """Basic use, a batch of three on a cache of one row, an adapter and an abort event."""
    text = fragment(BASE, "from exllamav2 import", "Batched Generation", "Basic Usage")
    text += fragment(BASE, "prompts = [", "Generation with LoRA and Abort", "Batched Generation")
    text += fragment(BASE, "import threading", "Key Methods", "Generation with LoRA and Abort")
    text += "print('adapter:', len(output))\n"
    done = run_text(text, tmp_path, f"/path/to/model={model_dir}", f"/path/to/lora={lora_dir}")
    for subject in ("mountains", "the ocean", "the stars"):
        assert f"Write a haiku about {subject}:" in done.stdout
    assert "adapter:" in done.stdout
    assert len(errors_of(done)) == 1  # the batch is larger than the cache


def test_text_generation(run_program: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_program("text_generation")
    total = len(found["model"].modules)
    assert found["reports"] == [(i, total) for i in range(total + 1)]
    assert found["single"].startswith("Once upon a time")
    assert found["single"] == found["drafted"] == found["on_parallel"]
    assert found["several"] == found["again"]
    assert len(found["several"]) == 4
    err = capsys.readouterr().err
    warnings = 0 if torch.cuda.device_count() > 1 else 1  # the program divides over three GPUs
    assert err.count("gpu_split:") == err.count("load_tp:") == warnings
