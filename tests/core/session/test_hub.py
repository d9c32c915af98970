"""Downloads from a hub on this machine through the real client: choice, resume, verification."""

from __future__ import annotations

import json
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import constants

from exl_core.errors import DiskFullError, ModelNotFoundError, WeightFileError
from exl_core.session import hub as hub_module
from exl_core.session.hub import download
from exl_core.session.names import HubName
from exl_core.session.pulled import PART_SUFFIX, pulled_models, remove_model, repository_folder
from exl_core.session.resolve import resolve_model
from support.hub import Hub

GGUF = {f"tiny-{q}.gguf": q.encode() * 5000 for q in ("Q4_K_M", "Q8_0", "IQ2_XS")}
SPLIT = {f"Q6_K/tiny-Q6_K-0000{n}-of-00002.gguf": bytes([n]) * 5000 for n in (1, 2)}
EXL2 = {"config.json": b"{}", "output.safetensors": b"w" * 9000, "README.md": b"not needed"}
PICKLES = {"pytorch_model.bin": b"code", "modeling.py": b"code"}


def fetched(hub: Hub) -> list[str]:
    """Paths of the large files that were fetched, with their ranges."""
    return [one for one in hub.requests if one.startswith("GET /cdn")]


def test_a_repository_of_safetensors_becomes_a_folder_without_pickles_and_code(hub: Hub) -> None:
    hub.add("owner/name", EXL2 | PICKLES)
    folder = download(HubName("owner/name"))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "output.safetensors"]
    assert (folder / "output.safetensors").read_bytes() == EXL2["output.safetensors"]
    assert resolve_model("owner/name") == folder


def test_the_second_copy_of_mistral_is_not_fetched(hub: Hub) -> None:
    hub.add("owner/name", EXL2 | {"consolidated.safetensors": b"c" * 9000})
    folder = download(HubName("owner/name"))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "output.safetensors"]


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        (None, "tiny-Q4_K_M.gguf"),
        ("q8_0", "tiny-Q8_0.gguf"),
        ("tiny-IQ2_XS.gguf", "tiny-IQ2_XS.gguf"),
        ("Q6_K", "Q6_K/tiny-Q6_K-00001-of-00002.gguf"),
    ],
)
def test_a_tag_selects_one_quantization_of_a_gguf_repository(
    hub: Hub, tag: str | None, file: str
) -> None:
    hub.add("owner/tiny-GGUF", GGUF | SPLIT | {"mmproj-tiny-Q8_0.gguf": b"vision" * 1000})
    path = download(HubName("owner/tiny-GGUF", tag))
    assert path.as_posix().endswith(f"/{file}")
    assert len(fetched(hub)) == (2 if "of-00002" in file else 1)
    assert path.read_bytes() == (GGUF | SPLIT)[file]


@pytest.mark.parametrize("tag", ["4.0bpw", "4_0", "4.0"])
def test_a_tag_selects_a_branch_by_its_bit_rate(hub: Hub, tag: str) -> None:
    hub.add("owner/tiny-exl2", {"measurement.json": b"{}"})
    hub.add("owner/tiny-exl2", EXL2, branch="4.0bpw")
    folder = download(HubName("owner/tiny-exl2", tag))
    assert (folder / "output.safetensors").exists()
    assert [model.name for model in pulled_models()] == ["owner/tiny-exl2:4.0bpw"]
    hub.requests.clear()
    assert resolve_model(f"owner/tiny-exl2:{tag}") == folder
    assert hub.requests == []


def test_a_tag_that_does_not_exist_lists_those_that_do(hub: Hub) -> None:
    hub.add("owner/tiny-GGUF", GGUF)
    with pytest.raises(ModelNotFoundError, match=r"IQ2_XS, Q4_K_M, Q8_0.*mean 'owner/.*:Q4_K_M'"):
        download(HubName("owner/tiny-GGUF", "Q4_K_X"))


def test_a_repository_without_a_model_names_its_branches(hub: Hub) -> None:
    hub.add("owner/tiny-exl2", {"measurement.json": b"{}"})
    hub.add("owner/tiny-exl2", EXL2, branch="4.0bpw")
    with pytest.raises(ModelNotFoundError, match=r"branches 4\.0bpw.*as in owner/tiny-exl2:4\.0"):
        download(HubName("owner/tiny-exl2"))


def test_several_quantizations_without_the_usual_one_must_be_chosen(hub: Hub) -> None:
    hub.add(
        "owner/tiny-GGUF", {name: GGUF[name] for name in ("tiny-Q8_0.gguf", "tiny-IQ2_XS.gguf")}
    )
    with pytest.raises(ModelNotFoundError, match=r"none is Q4_K_M.*owner/tiny-GGUF:IQ2_XS"):
        download(HubName("owner/tiny-GGUF"))


def test_a_link_of_the_hub_names_a_file(hub: Hub) -> None:
    hub.add("owner/tiny-GGUF", GGUF)
    link = "https://huggingface.co/owner/tiny-GGUF/blob/main/tiny-Q8_0.gguf?download=true"
    assert resolve_model(link).name == "tiny-Q8_0.gguf"
    assert resolve_model("hf.co/owner/tiny-GGUF:Q8_0").name == "tiny-Q8_0.gguf"


def test_a_dropped_connection_is_continued_where_it_ended(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client waits before it tries again
    hub.add("owner/name", EXL2)
    hub.drop_after, hub.drops = 4000, 1
    folder = download(HubName("owner/name"))
    assert (folder / "output.safetensors").read_bytes() == EXL2["output.safetensors"]
    assert fetched(hub)[-1].endswith("bytes=4000-")


def test_a_killed_download_is_continued_by_the_next_one(hub: Hub) -> None:
    hub.add("owner/name", EXL2)
    blobs = repository_folder("owner/name") / "blobs"
    blobs.mkdir(parents=True)
    weights = hub.repos["owner/name"]["main"]["output.safetensors"]
    (blobs / f"{weights.etag}{PART_SUFFIX}").write_bytes(weights.data[:7000])
    seen: list[tuple[int, int]] = []
    download(HubName("owner/name"), lambda done, total: seen.append((done, total)))
    assert [one.rpartition(" ")[2] for one in fetched(hub)] == ["bytes=7000-"]
    assert seen[-1] == (9002, 9002)
    assert not list(blobs.glob(f"*{PART_SUFFIX}"))


def test_damaged_contents_are_refused_and_not_kept(hub: Hub) -> None:
    hub.add("owner/name", EXL2)
    hub.damage = True
    with pytest.raises(WeightFileError, match=r"output\.safetensors: .*differ from the hub's hash"):
        download(HubName("owner/name"))
    hub.damage = False
    folder = download(HubName("owner/name"))
    assert (folder / "output.safetensors").read_bytes() == EXL2["output.safetensors"]


def test_a_second_download_fetches_nothing_and_an_update_what_changed(hub: Hub) -> None:
    hub.add("owner/name", EXL2)
    before = download(HubName("owner/name"))
    hub.requests.clear()
    assert download(HubName("owner/name")) == before
    assert fetched(hub) == []
    hub.add("owner/name", EXL2 | {"output.safetensors": b"v" * 9000})
    after = download(HubName("owner/name"))
    assert after != before
    assert resolve_model("owner/name") == after


def test_a_disk_that_is_too_small_is_reported_before_the_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 8999))
    hub.add("owner/name", EXL2)
    with pytest.raises(DiskFullError, match=r"does not fit on the disk.*'exl rm'"):
        download(HubName("owner/name"))
    assert fetched(hub) == []


def test_a_disk_that_fills_up_is_reported_and_the_part_is_kept(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: hub_module._Counted, data: bytes) -> int:
        self._file.write(data[:100])
        raise OSError(28, "No space left on device")

    hub.add("owner/name", {"config.json": b"{}", "model.safetensors": b"w" * 9000})
    monkeypatch.setattr(hub_module._Counted, "write", write)
    with pytest.raises(DiskFullError, match="no space left"):
        download(HubName("owner/name"))
    assert list((repository_folder("owner/name") / "blobs").glob(f"*{PART_SUFFIX}"))


def test_offline_uses_the_cache_and_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/name", EXL2)
    folder = download(HubName("owner/name"))
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("owner/name") == folder
    with pytest.raises(ModelNotFoundError, match=r"owner/other: is not on this machine.*offline"):
        resolve_model("owner/other")
    assert hub.requests == []


def test_an_unknown_repository_lists_near_ones_of_its_owner(hub: Hub) -> None:
    hub.add("owner/tiny-llama", EXL2)
    with pytest.raises(ModelNotFoundError, match=r"no such model.*mean 'owner/tiny-llama'\?"):
        resolve_model("owner/tiny-lama")


def test_an_unknown_revision_and_a_gated_model_are_explained(hub: Hub) -> None:
    hub.add("owner/name", EXL2)
    with pytest.raises(ModelNotFoundError, match="no such branch, tag or commit"):
        resolve_model("owner/name@v9")
    hub.gated.add("owner/name")
    with pytest.raises(ModelNotFoundError, match=r"accepted its terms.*hf auth login"):
        resolve_model("owner/name")


def test_a_hub_that_does_not_answer_gives_one_error(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match=r"owner/name: the hub did not give.*network"):
        resolve_model("owner/name")


def test_pulled_models_are_listed_and_removed_one_by_one(hub: Hub) -> None:
    hub.add("owner/tiny-GGUF", GGUF | SPLIT)
    hub.add("owner/name", EXL2)
    for name in ("owner/tiny-GGUF:Q8_0", "owner/tiny-GGUF:Q6_K", "owner/name"):
        resolve_model(name)
    assert [(model.name, model.size_bytes, model.format) for model in pulled_models()] == [
        ("owner/name", 9002, "safetensors"),
        ("owner/tiny-GGUF:Q6_K", 10000, "gguf"),
        ("owner/tiny-GGUF:Q8_0", 20000, "gguf"),
    ]
    q6 = pulled_models()[1]
    assert remove_model(q6) == 10000
    assert [model.name for model in pulled_models()] == ["owner/name", "owner/tiny-GGUF:Q8_0"]
    for model in pulled_models():
        remove_model(model)
    assert not repository_folder("owner/name").exists()
    assert not repository_folder("owner/tiny-GGUF").exists()


def test_contents_that_another_branch_uses_stay(hub: Hub) -> None:
    hub.add("owner/name", EXL2)
    hub.add("owner/name", EXL2, branch="4.0bpw")
    resolve_model("owner/name")
    kept = resolve_model("owner/name:4.0bpw")
    remove_model(next(model for model in pulled_models() if model.name == "owner/name"))
    assert (kept / "output.safetensors").read_bytes() == EXL2["output.safetensors"]


def test_files_of_other_programs_in_the_repository_stay(hub: Hub) -> None:
    hub.add("owner/name", EXL2)
    folder = resolve_model("owner/name")
    (folder / "pytorch_model.bin").write_bytes(b"theirs")
    remove_model(pulled_models()[0])
    assert (folder / "pytorch_model.bin").read_bytes() == b"theirs"


def test_an_incomplete_model_is_not_used_and_is_fetched_again(hub: Hub) -> None:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1-of-2.safetensors": b"1" * 5000,
        "model-2-of-2.safetensors": b"2" * 5000,
    }
    hub.add("owner/name", files)
    folder = resolve_model("owner/name")
    blob = (folder / "model-2-of-2.safetensors").resolve()
    (folder / "model-2-of-2.safetensors").unlink()
    blob.unlink()
    assert [model.is_complete for model in pulled_models()] == [False]
    assert (resolve_model("owner/name") / "model-2-of-2.safetensors").exists()


def test_a_unique_prefix_names_a_pulled_model(hub: Hub) -> None:
    hub.add("owner/tiny-GGUF", GGUF)
    hub.add("other/timid", EXL2)
    path = resolve_model("owner/tiny-GGUF:Q8_0")
    resolve_model("other/timid")
    hub.requests.clear()
    for prefix in ("tiny", "TINY-gguf:q8_0", "tiny-GGUF:Q"):
        assert resolve_model(prefix) == path
    with pytest.raises(ModelNotFoundError, match=r"several models.*other/timid, owner/tiny"):
        resolve_model("ti")
    assert hub.requests == []


def test_a_typo_in_a_name_lists_near_ones(hub: Hub) -> None:
    hub.add("owner/tiny-GGUF", GGUF)
    resolve_model("owner/tiny-GGUF:Q8_0")
    with pytest.raises(ModelNotFoundError, match="Did you mean 'owner/tiny-GGUF:Q8_0'"):
        resolve_model("tinny-GGUF:Q8_0")
    with pytest.raises(ModelNotFoundError, match="Did you mean 'smollm2'"):
        resolve_model("smolm2")


def test_a_typo_in_a_path_lists_near_ones(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "llama-4bit").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"Did you mean '.*/llama-4bit'"):
        resolve_model(str(tmp_path / "lama-4bit"))
