"""Choice of a backend, self-test, threads, forks, and a missing kernel library."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_support import normal, packed
from paged_support import paged_batch

from exl_core.errors import BackendError, RequestError
from exl_core.ops.attention import Scoring
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.moe import Routed
from exl_core.ops.open import available_isas, get_table
from exl_core.ops.sampling import Sampled
from exl_core.ops.selftest import CASES, run_selftest
from exl_core.ops.table import OpTable


def test_the_best_set_is_the_default() -> None:
    isas = available_isas()
    assert isas[0] == "scalar"
    assert get_table("cpu", threads=1).name == f"cpu-{isas[-1]}"
    assert get_table("cpu", isa="scalar", threads=3).threads == 3
    assert get_table("reference", threads=1).name == "reference"


@pytest.mark.parametrize(
    ("name", "isa", "threads", "says"),
    [
        ("metal", None, 1, "expected cpu, cuda or reference, got metal"),
        ("cpu", "avx9", 1, "scalar.*got avx9"),
        ("reference", "avx2", 1, "no instruction sets"),
    ],
)
def test_unknown_backends_are_refused(name: str, isa: str | None, threads: int, says: str) -> None:
    with pytest.raises(BackendError, match=says):
        get_table(name, isa=isa, threads=threads)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("threads", [-1, 0, 1025, 2**40])
def test_a_thread_count_out_of_range_is_refused(name: str, threads: int) -> None:
    with pytest.raises(RequestError, match=f"expected 1 to 1024, got {threads}"):
        get_table(name, threads=threads)


def run_python(code: str, tmp_path: Path, path: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("library", "says"),
    [
        ("raise ImportError('no such file')", "cannot be loaded: no such file"),
        (
            "__version__ = '0.0.9'",
            "does not match this exl-core (expected version 0.1.0, got 0.0.9",
        ),
    ],
    ids=["missing", "other-version"],
)
def test_a_missing_or_other_kernel_library_names_the_command_that_installs_it(
    tmp_path: Path, library: str, says: str
) -> None:
    (tmp_path / "exl_kernels").mkdir()
    (tmp_path / "exl_kernels" / "__init__.py").write_text(library)
    code = (
        "from exl_core.errors import BackendError\n"
        "from exl_core.ops.open import get_table\n"
        "try:\n    get_table('cpu', threads=1)\n"
        "except BackendError as error:\n    print(error)\n"
    )

    done = run_python(code, tmp_path, [str(tmp_path), *sys.path])

    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert "python -m pip install ./csrc" in done.stdout


def test_the_kernel_library_needs_no_torch(tmp_path: Path) -> None:
    code = "import exl_kernels\nprint(exl_kernels.available_isas(), 'torch' in sys.modules)"
    done = run_python(code, tmp_path, sys.path)
    assert done.stdout.strip() == f"{available_isas()} False", done.stderr


def test_selftest_passes(cpu_table: OpTable) -> None:
    results = run_selftest(cpu_table)
    assert {result.op for result in results} == set(CASES)
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize("op", sorted(CASES))
def test_selftest_detects_a_broken_op(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 1e-4 in one value of the output or of the first operand."""
    table, case, op = get_table("cpu", threads=1), op, op.partition(" ")[0]
    working = getattr(table, op)

    def broken(_: OpTable, *operands: Any, **options: Any) -> object:
        result = working(*operands, **options)
        if isinstance(result, Sampled):
            return result._replace(probability=result.probability * 1.0001)
        if isinstance(result, Routed):
            return Routed(result.ids, result.weights * 1.0001)
        if op == "write_kv":
            spoiled = operands[2].keys
        elif op == "linear_add_":
            spoiled = operands[2]
        else:
            spoiled = operands[0] if result is None else result
        first = (0,) * spoiled.ndim
        if spoiled.element_size() == 1:  # rows of a cache: any bit
            spoiled.view(torch.uint8)[first] ^= 64
        elif not spoiled.is_floating_point():
            spoiled[first] ^= 1
        else:
            spoiled[first] += 0.0001 if spoiled.dtype == torch.float32 else 0.1
        return result

    monkeypatch.setattr(type(table), op, broken)
    failed = {result.op for result in run_selftest(table) if not result.passed}
    assert case in failed
    assert {name.partition(" ")[0] for name in failed} == {op}


def test_selftest_detects_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    table = get_table("cpu", threads=1)
    monkeypatch.setattr(type(table), "rms_norm", lambda *_: torch.full((5, 99), torch.nan))
    assert [r.op for r in run_selftest(table) if not r.passed] == ["rms_norm"]


def outputs(table: OpTable, seed: int) -> list[torch.Tensor]:
    """Results of all ops that use several threads, in sizes where they do."""
    rng = torch.Generator().manual_seed(seed)
    w = packed(table, normal(rng, 300, 500).half())
    results = [table.linear(normal(rng, m, 500), w) for m in (1, 9, 200)]
    results.append(table.rms_norm(normal(rng, 300, 400), RmsNorm(normal(rng, 400), 1e-5)))
    results.append(table.gated_activation(normal(rng, 90, 4000), "silu"))
    results.append(table.log_sum_exp(normal(rng, 90, 4000)))
    batch = paged_batch(
        rng, [(900, 1), (0, 100)], kv_heads=2, head_dim=32, page_size=64, dtype=torch.float16
    )
    q = normal(rng, batch.rows, 4, 32)
    results.append(table.paged_attention(q, batch.cache, batch.attention_rows, Scoring(0.2)))
    return results


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    for isa in available_isas():
        one, two, five = (
            outputs(get_table("cpu", isa=isa, threads=threads), 7) for threads in (1, 2, 5)
        )
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one, five, strict=True))


def test_two_python_threads_may_share_a_table() -> None:
    table = get_table("cpu", threads=2)
    expected = [outputs(table, seed) for seed in range(4)]
    got: dict[int, list[torch.Tensor]] = {}

    def work(seed: int) -> None:
        for _ in range(5):
            got[seed] = outputs(table, seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for seed, wanted in enumerate(expected):
        assert all(torch.equal(a, b) for a, b in zip(got[seed], wanted, strict=True))


@pytest.mark.thorough
def test_a_forked_child_gets_threads_of_its_own(tmp_path: Path) -> None:
    # From Python 3.12 on, os.fork() warns if there are threads.
    code = """
import os, warnings, torch
warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
from exl_core.ops.open import get_table
from exl_core.ops.weights import DenseColumns, DenseLayout
table = get_table("cpu", threads=2)
w = table.new_linear(DenseLayout(2000, 300, torch.float32))
table.fill_linear(w, 0, DenseColumns(torch.randn(2000, 300)))
x = torch.randn(1, 300)
expected = table.linear(x, w)
child = os.fork()
if child == 0:
    good = all(torch.equal(table.linear(x, w), expected) for _ in range(50))
    threads = len(os.listdir("/proc/self/task"))
    os._exit(0 if good and threads == 2 else 1)
_, status = os.waitpid(child, 0)
assert torch.equal(table.linear(x, w), expected)
print(os.waitstatus_to_exitcode(status))
"""
    done = run_python(code, tmp_path, sys.path)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space")
@pytest.mark.parametrize("room_mb", [4, 400], ids=["for-none", "for-some"])
def test_a_table_works_with_the_threads_that_could_start(tmp_path: Path, room_mb: int) -> None:
    code = f"""
import os, resource, torch
from exl_core.ops.open import get_table
from exl_core.ops.weights import DenseColumns, DenseLayout
torch.set_num_threads(1)
one, many = get_table("cpu", threads=1), get_table("cpu", threads=1000)
w = one.new_linear(DenseLayout(2000, 300, torch.float32))
one.fill_linear(w, 0, DenseColumns(torch.randn(2000, 300)))
x = torch.randn(1, 300)
expected = one.linear(x, w)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {room_mb} * 2**20, resource.RLIM_INFINITY))
good = all(torch.equal(many.linear(x, w), expected) for _ in range(20))
kept = many.threads
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
fresh = get_table("cpu", threads=2)  # the failure must not keep other pools from starting
before = len(os.listdir("/proc/self/task"))
good = good and torch.equal(fresh.linear(x, w), expected)
print(good, kept, before, len(os.listdir("/proc/self/task")) - before)
"""
    done = run_python(code, tmp_path, sys.path)

    assert done.returncode == 0, done.stderr
    good, kept, running, added = done.stdout.split()
    assert good == "True"
    assert 1 <= int(kept) < 999
    assert int(running) >= int(kept)
    assert added == "1"
    assert "of 999 worker threads could start" in done.stderr


@pytest.mark.thorough
def test_idle_workers_sleep(tmp_path: Path) -> None:
    code = """
import time, torch
from exl_core.ops.open import get_table
from exl_core.ops.weights import DenseColumns, DenseLayout
table = get_table("cpu", threads=2)
w = table.new_linear(DenseLayout(2000, 300, torch.float32))
table.linear(torch.randn(1, 300), w)
time.sleep(0.05)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before < 0.02)
"""
    done = run_python(code, tmp_path, sys.path)
    assert done.stdout.strip() == "True", done.stderr


def test_no_instruction_set_leaks_into_shared_functions() -> None:
    """The linker merges inline functions of equal name, and must not keep one built for AVX-512."""
    build = Path(__file__).parents[2] / "csrc" / "build"
    builds = sorted(build.glob("temp.*/flags-*/avx2"), key=lambda path: path.stat().st_mtime)
    if not builds:
        pytest.skip("needs a build in place (csrc/build)")
    objects = [*builds[-1].parent.glob("avx*/src/cpu/**/*.o")]
    listed = subprocess.run(
        ["nm", "--defined-only", "-C", *map(str, objects)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    weak = [line for line in listed.splitlines() if re.match(r"[0-9a-f]* [WVu] ", line)]
    assert "exl::avx2::linear" in listed
    assert [line for line in weak if "exl::avx" not in line and "DW.ref" not in line] == []
