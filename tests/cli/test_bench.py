"""`exl bench`: options, table and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import tiny_models
from support.commands import Command

QUICK = ("--prefill", 24, "--decode", 4, "--repeat", 1)


def test_json_of_one_configuration(exl: Command, tiny_llama_dir: Path) -> None:
    done = exl("bench", "-m", tiny_llama_dir, *QUICK, "--batch", 2, "--threads", 1, "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert (result["prompt_tokens"], result["decode_tokens"], result["batch"]) == (24, 4, 2)
    assert (result["threads"], result["repeat"], result["model"]) == (1, 1, tiny_llama_dir.name)
    for key in ("prefill_tok_s", "decode_tok_s", "floor_share", "bytes_per_token", "load_s"):
        assert result[key] > 0
    assert result["decode_tok_s_per_sequence"] == pytest.approx(result["decode_tok_s"] / 2)
    assert result["peak_memory_bytes"] >= result["start_memory_bytes"] > 0
    assert len(result["runs"]) == 1


def test_a_grid_by_prompt_length_and_batch(exl: Command, tiny_llama_dir: Path) -> None:
    lists = ("--prefill", "8, 16,8", "--batch", "1,3", "--decode", 2, "--repeat", 1)
    done = exl("bench", tiny_llama_dir, *lists, "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    grid = [(run["prompt_tokens"], run["batch"]) for run in result["runs"]]
    assert grid == [(8, 1), (8, 3), (16, 1), (16, 3)]
    assert "decode_tok_s" not in result


def test_table(exl: Command, tiny_llama_dir: Path) -> None:
    done = exl("bench", tiny_llama_dir, *QUICK, "--batch", "1,2")
    assert (done.code, done.err) == (0, "")
    assert tiny_llama_dir.name in done.out
    rows = [line.split() for line in done.out.splitlines() if line.strip().startswith("24 ")]
    assert [row[:2] for row in rows] == [["24", "1"], ["24", "2"]]
    assert all(row[-1].endswith("%") for row in rows)
    assert "of them" not in done.out  # a token uses all parameters


def test_parameters_that_a_token_uses(exl: Command, tmp_path: Path) -> None:
    """3 of 16 experts in three of four layers. No size needs padding."""
    sizes = {"vocab_size": 320, "hidden_size": 96, "intermediate_size": 128, "head_dim": 32}
    model = tiny_models.tiny_qwen3_moe(**sizes, num_experts=16, moe_intermediate_size=48)
    folder = tiny_models.save(model, tmp_path / "moe")
    tensors = load_file(folder / "model.safetensors")
    total = sum(one.numel() for one in tensors.values())
    experts = sum(one.numel() for name, one in tensors.items() if ".experts." in name)
    assert experts == 3 * 16 * 3 * 96 * 48
    active = total - experts * 13 // 16
    read = 4 * (active - tensors["model.embed_tokens.weight"].numel())

    done = exl("bench", folder, *QUICK, "--device", "cpu", "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert (result["parameters"], result["active_parameters"]) == (total, active)
    assert result["weights_bytes"] == 4 * total
    assert result["decode_weight_bytes"] == read

    done = exl("bench", folder, *QUICK, "--device", "cpu")
    assert (done.code, done.err) == (0, "")
    (line,) = [line for line in done.out.splitlines() if line.lstrip().startswith("parameters")]
    expected = (
        f"{total / 1e3:.1f}k, {active / 1e3:.1f}k of them ({read / 1e6:.2f} MB) in each token"
    )
    assert " ".join(line.split()) == f"parameters {expected}"


@pytest.mark.thorough
def test_exact_weights_are_larger_in_memory(exl: Command, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType

    from support.gguf_models import write_gguf

    model = tiny_models.tiny_llama(hidden_size=96, intermediate_size=128, head_dim=32)
    path = write_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_0)
    sizes = {}
    for option in ((), ("--exact",)):
        done = exl("bench", path, *QUICK, *option, "--json")
        assert (done.code, done.err) == (0, "")
        sizes[option] = json.loads(done.out)["bytes_per_token"]
    assert sizes["--exact",] > 2 * sizes[()]


@pytest.mark.thorough
def test_ops_as_table_and_as_json(exl: Command, tiny_llama_dir: Path) -> None:
    asked = ("bench", tiny_llama_dir, *QUICK, "--kernels", "--batch", "1,2", "--depth", 9)
    done = exl(*asked)
    assert (done.code, done.err) == (0, "")
    titles = [line for line in done.out.splitlines() if " calls of ops" in line]
    assert [title.partition(":")[0] for title in titles] == [
        "a decode step of one token, 9 cached before",
        "a decode step of 2 tokens, 9 cached before",
        "a prompt of 24 tokens",
    ]
    assert done.out.count("norm_gated_linear") == 3

    done = exl(*asked, "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert result["bytes_per_s"] > 0
    for one in result["passes"]:
        assert one["calls"] == sum(run["calls"] for run in one["kernels"])
        for key in ("op", "shape", "bytes", "seconds", "share"):
            assert all(run[key] for run in one["kernels"])


def test_a_length_beyond_the_model_is_a_warning(exl: Command, tiny_llama_dir: Path) -> None:
    args = ("bench", tiny_llama_dir, "--prefill", 520, "--decode", 2, "--repeat", 1, "--json")
    done = exl(*args)
    assert done.code == 0
    assert "520 tokens is longer than the model's 512" in done.err
    stretched = exl(*args, "--rope-yarn", 2)
    assert (stretched.code, stretched.err) == (0, "")
    assert json.loads(stretched.out)["model"].endswith("(rope-yarn 2)")


@pytest.mark.thorough
def test_decode_at_a_depth_and_with_a_quantized_cache(exl: Command, tiny_llama_dir: Path) -> None:
    read = {}
    for options in ((), ("--depth", 100), ("--depth", 100, "--cache-type", "fp8")):
        done = exl("bench", tiny_llama_dir, *QUICK, *options, "--chunk", 7, "--json")
        assert (done.code, done.err) == (0, "")
        result = json.loads(done.out)
        read[options] = result["bytes_per_token"] - result["decode_weight_bytes"]
    short, long, packed = read.values()
    assert long > 10 * short
    assert packed == long / 2


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--prefill", ""), "--prefill is not a list"),
        (("--prefill", "16,"), "--prefill is not a list"),
        (("--prefill", "-3"), "--prefill is not a list"),
        (("--prefill", "9" * 5000), "--prefill is not a list"),
        (("--batch", 0), "--batch is not a list"),
        (("--batch", "two"), "--batch is not a list"),
        (("--decode", 0), "--decode"),
        (("--repeat", 0), "--repeat"),
        (("--depth", 0), "--depth"),
        (("--chunk", 0), "--chunk"),
        (("--cache-type", "fp7"), "no such cache type"),
    ],
)
def test_invalid_options(
    args: tuple[object, ...], expected: str, exl: Command, damaged_dir: Path
) -> None:
    """Bad options are reported before the weights are read: reading these would fail."""
    weights = damaged_dir / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x00\x00\x80\x7f")  # an infinity
    assert expected in exl("bench", damaged_dir, *args, "--json").error_line(2)


def test_missing_model(exl: Command) -> None:
    assert "no such model" in exl("bench", "-m", "nowhere", "--json").error_line(3)
