"""`exl inspect model`: sums in its JSON, the table with the same values, the plan of `--fit`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl_cli import placement
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.session.load import load_model
from exl_core.session.placement import CPU_OVERHEAD, GPU_OVERHEAD, DeviceMemory
from support.commands import Command, JsonCommand
from support.tiny_hybrids import tiny_granite_hybrid, tiny_lfm2
from support.tiny_models import save, tiny_llama, tiny_qwen3_moe

SetsMemory = Callable[..., None]
WIDE = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32, "max_position_embeddings": 512}
"""Sizes that need no padding: weights in memory are as large as in the file."""
KV_PAGE = 256 * 2 * 2 * 32 * 2
"""Bytes of a page in one layer: tokens, key and value, heads, head size, fp16."""


@pytest.fixture
def inspect_json(exl: Command) -> JsonCommand:
    def run(*args: object) -> dict[str, object]:
        done = exl("inspect", "model", *args, "--json")
        assert (done.code, done.err) == (0, "")
        return json.loads(done.out)

    return run


def test_default_model(inspect_json: JsonCommand, smollm2_path: Path) -> None:
    model = inspect_json("--tensors")
    assert model["schema_version"] == 1
    assert model["path"] == str(smollm2_path)
    assert (model["format"], model["architecture"]) == ("gguf", "llama")
    assert model["file_bytes"] == smollm2_path.stat().st_size
    assert model["parameters"] == pytest.approx(134.5e6, rel=0.01)
    assert 4.5 < model["bits_per_weight"] < 6.5
    assert model["config"]["num_layers"] == 30
    assert model["tokenizer"]["has_chat_template"]
    assert not model["tokenizer"]["adds_bos"]


def test_sizes_of_tensors_and_layers_agree(inspect_json: JsonCommand) -> None:
    model = inspect_json("--tensors")
    layers = model["layers"]
    assert sum(layer["parameters"] for layer in layers) == model["parameters"]
    assert sum(tensor["bytes"] for tensor in model["tensors"]) == sum(
        layer["bytes"] for layer in layers
    )
    assert sum(layer["name"].startswith("layer ") for layer in layers) == 30
    for layer in layers:
        bits = 8 * layer["bytes"] / layer["parameters"]
        assert layer["bits_per_weight"] == pytest.approx(bits)


def test_memory_at_a_context(inspect_json: JsonCommand) -> None:
    small = inspect_json("--ctx", 1000)["memory"]
    large = inspect_json("--ctx", 3000)["memory"]
    assert small["ctx"] == 1000
    assert large["total_bytes"] - small["total_bytes"] == 2000 * small["kv_bytes_per_token"]
    assert small["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 2  # layers, heads, K and V, fp16


def test_safetensors_directory(inspect_json: JsonCommand, tiny_llama_dir: Path) -> None:
    model = inspect_json(tiny_llama_dir)
    assert model["format"] == "safetensors"
    assert model["bits_per_weight"] == 32
    assert "tensors" not in model
    assert set(model["backends"]) == {"cpu", "reference", "cuda"}


def test_table(exl: Command, tiny_llama_dir: Path) -> None:
    done = exl("inspect", "model", tiny_llama_dir, "--tensors", "--ctx", 256)
    assert (done.code, done.err) == (0, "")
    for expected in ("llama", "layer 2", "32.00", "256", "model.layers.0.mlp.down_proj.weight"):
        assert expected in done.out
    assert "\x1b" not in done.out
    assert all(line == line.rstrip() for line in done.out.splitlines())


def test_names_in_a_file_cannot_control_the_terminal(exl: Command, damaged_dir: Path) -> None:
    path = damaged_dir / "model.safetensors"
    evil = "[/bold]\x1b]0;owned\x07\x9b2J"
    tensors = load_file(path)
    save_file({**tensors, evil: torch.zeros(2)}, path, metadata={"format": "pt"})
    done = exl("inspect", "model", damaged_dir, "--tensors")
    assert (done.code, done.err) == (0, "")
    assert r"[/bold]\x1b]0;owned\x07\x9b2J" in done.out
    assert not {"\x1b", "\x07", "\x9b"} & set(done.out)
    assert json.loads(exl("inspect", "model", damaged_dir, "--tensors", "--json").out)[
        "unused_tensors"
    ] == [{"name": evil, "shape": [2], "dtype": "F32", "bytes": 8}]


@pytest.fixture
def hybrid_dir(tmp_path: Path) -> Path:
    return save(tiny_granite_hybrid(), tmp_path / "hybrid")


def test_state_of_a_hybrid(inspect_json: JsonCommand, tmp_path: Path) -> None:
    """Convolutions of three taps keep two inputs in float32."""
    memory = inspect_json(save(tiny_lfm2(), tmp_path / "lfm2"), "--ctx", 512)["memory"]
    state = 3 * 2 * 120 * 4  # layers, inputs, channels
    assert memory["state_bytes_per_sequence"] == state
    kv = 2 * 2 * 20 * 2 * 2  # layers, heads, head size, key and value, fp16
    assert memory["kv_bytes_per_token"] == kv
    assert memory["most_snapshots"] == 2  # one for each page
    assert memory["state_bytes"] == 3 * state
    assert memory["total_bytes"] == memory["weights_bytes"] + 512 * kv + 3 * state


@pytest.mark.parametrize(
    ("pages", "snapshots"),
    [
        (10, 10),  # one for each page
        (20, 16),  # one for each sequence of a batch
        (41, 28),  # the memory of the cache: 41 pages of 24576 bytes
    ],
)
def test_snapshots_of_a_hybrid_are_those_of_an_engine(
    inspect_json: JsonCommand, hybrid_dir: Path, pages: int, snapshots: int
) -> None:
    ctx = 256 * pages - 255
    memory = inspect_json(hybrid_dir, "--ctx", ctx, "--max-batch", 16)["memory"]
    state = 3 * (3 * 208 + 6 * 24 * 16) * 4  # layers, inputs of the convolution, heads' matrices
    assert memory["state_bytes_per_sequence"] == state
    assert memory["most_snapshots"] == snapshots

    loaded = load_model(hybrid_dir, device="cpu", threads=1)
    options = EngineOptions(cache_tokens=256 * pages)
    states = Engine(loaded.model, loaded.tokenizer, options).store.states
    assert states is not None
    assert states.num_slots == options.max_batch + snapshots
    assert states.bytes_per_slot == state
    assert memory["state_bytes"] == states.size_bytes


def test_table_of_a_hybrid(exl: Command, hybrid_dir: Path) -> None:
    done = exl("inspect", hybrid_dir)
    assert (done.code, done.err) == (0, "")
    assert (
        "3 of 4 layers are recurrent, with a state of 35.1 kB a sequence and at most 5 snapshots "
        "of it"
    ) in " ".join(done.out.split())
    assert "context weights cache states total" in " ".join(done.out.split())


def test_fit_of_a_hybrid_counts_its_states(
    exl: Command, inspect_json: JsonCommand, hybrid_dir: Path, memory_is: SetsMemory
) -> None:
    """States of two layers are on one GPU, and those of the third on the other."""
    layer = (3 * 208 + 6 * 24 * 16) * 4
    slots = 40 + 8  # sequences, and a snapshot for each page
    cache = 8 * 24576
    memory_is(None, 10**12, 10**12)
    options = ("--fit", "--ctx", 2048, "--max-batch", 40)
    cpu, gpu, _ = inspect_json(hybrid_dir, *options)["fit"]
    assert cpu["state_bytes"] == 3 * layer * slots
    assert gpu["state_bytes"] == 3 * layer * (slots + 1)
    weights = size_of(hybrid_dir, "")
    assert gpu["needed_bytes"] == weights + cache + gpu["state_bytes"] + GPU_OVERHEAD
    (stage,) = inspect_json(hybrid_dir, *options)["split"]
    assert (stage["cache_bytes"], stage["state_bytes"]) == (cache, gpu["state_bytes"])

    room = gpu["needed_bytes"]
    memory_is(None, room - 1, room - 1)
    stages = inspect_json(hybrid_dir, *options)["split"]
    assert [one["device"] for one in stages] == ["cuda:0", "cuda:1"]
    assert sum(one["state_bytes"] for one in stages) == gpu["state_bytes"]
    assert len(inspect_json(hybrid_dir, "--fit", "--ctx", 2048)["split"]) == 1  # one sequence
    text = " ".join(exl("inspect", hybrid_dir, *options).out.split())
    assert "and recurrent states of 1.72 MB; contexts in tokens." in text
    assert "GB states)" in text


def test_fit_leaves_a_reserve(
    exl: Command, inspect_json: JsonCommand, wide_dir: Path, memory_is: SetsMemory
) -> None:
    memory_is(None, 10**10, 10**10)

    def devices(*options: object) -> list[str]:
        answer = inspect_json(wide_dir, "--fit", *options)
        return [stage["device"] for stage in answer["split"]]

    assert devices() == devices("--reserve", "9") == ["cuda:0"]
    assert devices("--reserve", "9.9,1") == ["cuda:1"]
    refused = exl("inspect", wide_dir, "--fit", "--reserve", "10")
    assert "do not fit" in refused.error_line(4) or "does not fit" in refused.error_line(4)
    refused = exl("inspect", wide_dir, "--fit", "--reserve", "1,2,3")
    assert "expected 1 number, or 2 for 2 GPUs" in refused.error_line(2)
    assert "needs --fit" in exl("inspect", wide_dir, "--reserve", "1").error_line(2)
    refused = exl("generate", wide_dir, "-p", "x", "--device", "cpu", "--reserve", "much")
    assert "not a reserve" in refused.error_line(2)


@pytest.fixture
def memory_is(monkeypatch: pytest.MonkeyPatch) -> SetsMemory:
    """`memory_is(cpu, *gpus)`: bytes free on the devices, None for unknown."""

    def run(cpu: int | None, *gpus: int | None) -> None:
        devices = [DeviceMemory("cpu", "this machine's memory", cpu)]
        devices += [DeviceMemory(f"cuda:{i}", "a GPU", free) for i, free in enumerate(gpus)]
        monkeypatch.setattr(placement, "device_memory", lambda: devices)

    return run


@pytest.fixture
def wide_dir(tmp_path: Path) -> Path:
    """A model that no command can load: a weight is infinite."""
    folder = save(tiny_llama(**WIDE), tmp_path / "wide")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def size_of(folder: Path, *parts: str) -> int:
    """Bytes of the tensors whose names begin with one of `parts`."""
    tensors = load_file(folder / "model.safetensors")
    return sum(one.nbytes for name, one in tensors.items() if name.startswith(parts))


def test_fit_on_the_cpu_reads_no_weights(
    exl: Command, inspect_json: JsonCommand, wide_dir: Path, memory_is: SetsMemory
) -> None:
    assert "infinite" in exl("generate", wide_dir, "-p", "x", "--device", "cpu").error_line(3)
    weights, cache = size_of(wide_dir, ""), 3 * 2 * KV_PAGE
    needed = weights + cache + CPU_OVERHEAD
    memory_is(needed)
    answer = inspect_json(wide_dir, "--fit")
    assert (answer["schema_version"], answer["name"]) == (1, "wide")
    contexts = dict.fromkeys(("fp16", "fp8", "q8", "q6", "q4"), 512)
    assert answer["fit"] == [
        {
            "device": "cpu",
            "device_name": "this machine's memory",
            "free_bytes": needed,
            "ctx": 512,
            "needed_bytes": needed,
            "state_bytes": 0,
            "fits": True,
            "max_ctx": contexts,
            "advice": "",
        }
    ]
    stage = {"device": "cpu", "first_layer": 0, "last_layer": 2}
    stage |= {"weights_bytes": weights, "cache_bytes": cache, "state_bytes": 0}
    assert answer["split"] == [
        {**stage, "layers_with_experts_on_cpu": [], "bytes_of_experts_on_cpu": 0}
    ]
    assert inspect_json(wide_dir, "--fit", "--ctx", 200)["fit"][0]["needed_bytes"] == (
        needed - 3 * KV_PAGE
    )

    memory_is(needed - 1)
    (fit,) = inspect_json(wide_dir, "--fit")["fit"]
    assert fit["fits"] is False
    assert fit["max_ctx"] == {**contexts, "fp16": 256}
    assert fit["advice"] == "--cache-type fp8 or q8 or q6 or q4 or --ctx-size 256"


def two_stages(folder: Path) -> tuple[int, int]:
    """Bytes of weights of layer 0 with the embedding, and of the others with norm and head."""
    first = size_of(folder, "model.embed_tokens", "model.layers.0.")
    return first, size_of(folder, "") - first


def test_fit_divides_the_layers_among_gpus(
    inspect_json: JsonCommand, wide_dir: Path, memory_is: SetsMemory
) -> None:
    first, rest = two_stages(wide_dir)
    room = 1000 + GPU_OVERHEAD
    memory_is(10**12, first + 2 * KV_PAGE + room, rest + 4 * KV_PAGE + room)

    def stages(*options: object) -> list[tuple[object, ...]]:
        answer = inspect_json(wide_dir, "--fit", *options)
        assert [one["fits"] for one in answer["fit"]] == [True, False, False]
        keys = ("device", "first_layer", "last_layer", "weights_bytes", "cache_bytes")
        return [tuple(stage[key] for key in keys) for stage in answer["split"]]

    divided = [
        ("cuda:0", 0, 0, first, 2 * KV_PAGE),
        ("cuda:1", 1, 2, rest, 4 * KV_PAGE),
    ]
    assert stages() == divided
    assert stages("--split", "0.0005,0.001") == divided
    whole = [("cuda:0", 0, 2, first + rest, 6 * KV_PAGE)]
    assert stages("--split", "none") == whole
    on_cpu = ("cpu", 0, 0, first, 2 * KV_PAGE)
    assert stages("--cpu-layers", 1) == [on_cpu, divided[1]]
    assert stages("--split", "cpu=1,cuda:0=2") == [on_cpu, ("cuda:0", *divided[1][1:])]


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_fit_plans_a_split_over_gpus_that_this_machine_lacks(
    num_gpus: int,
    exl: Command,
    inspect_json: JsonCommand,
    wide_dir: Path,
    memory_is: SetsMemory,
) -> None:
    memory_is(10**12, *[10**12] * num_gpus)
    stages = inspect_json(wide_dir, "--fit", "--split", "0.0005,0.001")["split"]
    assert [(one["device"], one["first_layer"], one["last_layer"]) for one in stages] == [
        ("cuda:0", 0, 0),
        ("cuda:1", 1, 2),
    ]
    text = exl("inspect", wide_dir, "--fit", "--split", "0.0005,0.001").out
    absent = "cuda:0, cuda:1" if num_gpus == 0 else "cuda:1"
    assert text.endswith(f"\nNot in this machine: {absent}.\n")
    refused = exl("inspect", wide_dir, "--fit", "--split", "0.0001,0.0002")
    assert "the layers do not fit into this split" in refused.error_line(4)
    assert "Not in" not in exl("inspect", wide_dir, "--fit", "--split", "none").out


def test_fit_plans_layers_on_the_cpu_beside_a_gpu_only(
    exl: Command, wide_dir: Path, memory_is: SetsMemory
) -> None:
    memory_is(10**12)
    refused = exl("inspect", wide_dir, "--fit", "--cpu-layers", 1).error_line(2)
    assert "no GPU to split the model over (got --cpu-layers 1)" in refused
    assert exl("inspect", wide_dir, "--fit", "--cpu-layers", 0).code == 0


def test_fit_leaves_experts_on_the_cpu(
    inspect_json: JsonCommand, tmp_path: Path, memory_is: SetsMemory
) -> None:
    folder = save(tiny_qwen3_moe(**WIDE, moe_intermediate_size=48), tmp_path / "moe")
    weights = size_of(folder, "")
    experts = 8 * 3 * 96 * 48 * 4  # of one of the layers 0, 2 and 3
    memory_is(10**12, weights - experts + 8 * KV_PAGE + GPU_OVERHEAD)
    for options, layers in (((), [0]), (("--experts-on", "cpu"), [0, 2, 3])):
        (stage,) = inspect_json(folder, "--fit", *options)["split"]
        assert stage["layers_with_experts_on_cpu"] == layers
        assert stage["bytes_of_experts_on_cpu"] == len(layers) * experts
        assert stage["weights_bytes"] == weights - len(layers) * experts


def test_table_of_a_fit(exl: Command, wide_dir: Path, memory_is: SetsMemory) -> None:
    first, rest = two_stages(wide_dir)
    memory_is(None, first + 2 * KV_PAGE + GPU_OVERHEAD, rest + 5 * KV_PAGE + GPU_OVERHEAD)
    done = exl("inspect", wide_dir, "--fit")
    assert (done.code, done.err) == (0, "")
    head, *lines = done.out.splitlines()
    assert head == "wide: weights of 1.27 MB; contexts in tokens."
    rows = {line.split(",")[0].strip(): line.split() for line in lines if "," in line}
    assert rows["cpu"][-7:] == ["MB", *["unknown"] * 6]
    assert rows["cuda:0"][-6:] == ["no", "0", "0", "0", "0", "0"]
    assert "cuda:0: nothing would fit." in lines
    text = " ".join(done.out.split())
    assert text.endswith(
        "Layers: cuda:0: layer 0 (0.00 GB weights, 0.00 GB cache); "
        "cuda:1: layers 1 to 2 (0.00 GB weights, 0.00 GB cache)."
    )


def test_a_model_that_fits_nowhere(
    exl: Command, inspect_json: JsonCommand, wide_dir: Path, memory_is: SetsMemory
) -> None:
    """A description says so. A split that the user chose is an error."""
    memory_is(CPU_OVERHEAD, GPU_OVERHEAD)
    answer = inspect_json(wide_dir, "--fit")
    assert answer["split"] == []
    assert [one["advice"] for one in answer["fit"]] == ["nothing", "nothing"]
    text = " ".join(exl("inspect", wide_dir, "--fit").out.split())
    assert "No split: the model does not fit into the memory of these devices" in text
    chosen = exl("inspect", wide_dir, "--fit", "--split", "0.0001")
    assert "the layers do not fit into this split" in chosen.error_line(4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--split", "20,24"), "needs --fit"),
        (("--cpu-layers", 1), "needs --fit"),
        (("--experts-on", "cpu"), "needs --fit"),
        (("--verify", "--fit"), "--verify stands alone (got --fit)"),
        (("--fit", "--experts-on", "cpu"), "the model has no experts"),
    ],
)
def test_options_that_contradict_each_other(
    options: tuple[object, ...], expected: str, exl: Command, tiny_llama_dir: Path
) -> None:
    assert expected in exl("inspect", tiny_llama_dir, *options).error_line(2)
