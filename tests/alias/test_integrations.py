"""Integrations of exllamav2 in other projects, by their own code, from `EXL_OLD_PROGRAMS`.

`originals.py` says which versions. The drivers in `programs/integrations/` call the original
classes. Where a project's other modules are not at hand, they are stubs, which the driver names.
The examples inference_lmfe and inference_formatron (`test_originals.py`) run the integrations of
lm-format-enforcer and formatron, which are in those packages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alias.originals import copy_checkout, run_exec

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

DRIVERS = Path(__file__).parent / "programs" / "integrations"
PROMPT = "One, two, three,"


@pytest.fixture(scope="module")
def prompt_ids(model_dir: Path) -> list[int]:
    from exl_core.session.load import load_model

    loaded = load_model(model_dir)
    return loaded.tokenizer.encode(PROMPT)


@pytest.fixture(scope="module")
def greedy_ids(model_dir: Path, prompt_ids: list[int]) -> list[int]:
    """The reply of exl's own generator to the prompt."""
    from exl_core.generate.dynamic import DynamicGenerator
    from exl_core.sampling.params import SamplerParams
    from exl_core.session.load import load_model

    loaded = load_model(model_dir)
    generator = DynamicGenerator(loaded)
    request = generator.request(
        PROMPT, max_tokens=12, sampler=SamplerParams(temperature=0.0), stop=[]
    )
    generator.enqueue(request)
    ids: list[int] = []
    while generator.num_remaining_jobs:
        for result in generator.iterate():
            ids += result.token_ids
    return ids


def drive(name: str, checkout: str, tmp_path: Path, *args: str) -> Any:
    """Run a driver in a copy of the checkout; returns the JSON of its last line."""
    folder = copy_checkout(checkout, tmp_path)
    done = run_exec(str(DRIVERS / f"{name}.py"), *args, folder=folder)
    missing = "No module named" in done.stderr and "exl" not in done.stderr.split("named")[-1]
    if missing:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_backend_of_tabby(model_dir: Path, tmp_path: Path) -> None:
    found = drive("tabby", "tabbyAPI", tmp_path, str(model_dir))
    assert found["steps"] > 60
    assert found["plain"]
    assert found["prompt_tokens"] > 1
    assert found["chunks"] <= 2
    assert found["logprobs"] > 1
    assert found["finish"] in ("length", "stop")
    answer = json.loads(found["schema"])
    assert isinstance(answer["sure"], bool)
    assert answer["who"] in ("man", "bird")
    assert found["regex"] in ("yesyes", "yesno", "noyes", "nono")
    assert found["penalized"]
    assert found["both"] == [found["plain"]] * 2
    assert found["decoded"] == "Superman is a"
    assert found["special"]["eos_token"] == "<|im_end|>"


def test_the_loader_of_the_web_interface(
    model_dir: Path, tmp_path: Path, greedy_ids: list[int]
) -> None:
    found = drive("webui", "text-generation-webui", tmp_path, str(model_dir))
    assert found["shape"] == [1, 1, 49152]
    assert found["dtype"] == "torch.float32"
    assert found["decoded"] == PROMPT
    assert found["greedy"] == greedy_ids[0]
    assert len(found["texts"]) == 12
    assert all(b.startswith(a) for a, b in zip(found["texts"], found["texts"][1:], strict=False))
    assert found["dry"]


def test_the_transformers_wrapper_of_the_web_interface(
    model_dir: Path, tmp_path: Path, prompt_ids: list[int], greedy_ids: list[int]
) -> None:
    listed = ",".join(map(str, prompt_ids))
    found = drive("webui_hf", "text-generation-webui", tmp_path, str(model_dir), listed)
    assert found["ids"] == [*prompt_ids, *greedy_ids[:8]]
    assert found["held"] == [len(prompt_ids) + i for i in range(8)]
    assert found["held_again"] == 5
    assert found["shape"] == [1, 1, 49152]
    assert found["whole"] == [1, len(prompt_ids) + 8, 49152]
    assert 0 < found["loss"] < 20
    assert found["negative_held"] == 4
    assert found["negative"] == [1, 1, 49152]


def test_the_model_of_outlines(
    model_dir: Path, tmp_path: Path, prompt_ids: list[int], greedy_ids: list[int]
) -> None:
    listed = ",".join(map(str, prompt_ids))
    found = drive("outlines_exl2", "outlines", tmp_path, str(model_dir), listed)
    assert found["chosen"] == greedy_ids[:6]
    assert found["held"] == [len(prompt_ids) + i for i in range(6)]
    assert found["again"] == greedy_ids[5]


def test_the_nodes_of_comfy(model_dir: Path, tmp_path: Path) -> None:
    found = drive("comfy_nodes", "ComfyUI-ExLlama-Nodes", tmp_path, str(model_dir))
    assert model_dir.name in found["names"]
    assert "Count to five." in found["text"]
    assert found["reply"]
    assert found["again"].startswith(found["reply"].rstrip())
    assert found["updates"] > found["modules"] == 63
    assert found["is_unloaded"]
