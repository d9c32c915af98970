"""Environment variables. Only this module reads them; all others take their options as
arguments."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from exl_core.errors import RequestError

INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "avx512vnni", "amx")
MAX_THREADS = 1024
MIN_COLUMNS, MAX_COLUMNS = 20, 10_000  # below 20, the frames of help pages leave no room for words


@dataclass(frozen=True, slots=True)
class Settings:
    """`EXL_ISA`: instruction set to use (default: the best that the CPU supports). `EXL_THREADS`:
    number of CPU threads (default: all cores that this process may use)."""

    isa: str | None
    threads: int


def read_settings() -> Settings:
    isa = os.environ.get("EXL_ISA") or None
    if isa is not None and isa not in INSTRUCTION_SETS:
        raise RequestError(
            "EXL_ISA names no instruction set",
            expected=" or ".join(INSTRUCTION_SETS),
            got=isa,
            next_step="Without it the best that the CPU has is taken.",
        )
    text = os.environ.get("EXL_THREADS")
    threads = _as_thread_count(text) if text else min(available_cpus(), MAX_THREADS)
    return Settings(isa=isa, threads=threads)


@dataclass(frozen=True, slots=True)
class Launched:
    """This process among those that torchrun has started, by torchrun's variables.

    rank         `RANK`, from 0 to `world_size` - 1 (`WORLD_SIZE`)
    local_rank   `LOCAL_RANK`, from 0 to `local_size` - 1 (`LOCAL_WORLD_SIZE`): the processes of
                 one host
    address      `MASTER_ADDR` and `MASTER_PORT`: the store of torchrun, where the processes meet
    run          `TORCHELASTIC_RUN_ID` and the number of the attempt
    trusts_network  the processes may listen where other machines reach them; chosen by the user
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: tuple[str, int]
    run: str
    trusts_network: bool = False


def launched() -> Launched | None:
    """This process among those of torchrun; None if it was not started by torchrun.

    RequestError if the variables contradict each other.
    """
    if os.environ.get("TORCHELASTIC_RUN_ID") is None:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    texts = [os.environ.get(name, "") for name in names]
    numbers = [int(text) if text.isascii() and text.isdecimal() else -1 for text in texts]
    rank, world_size, local_rank, local_size, port = numbers
    are_ranks = 0 <= rank < world_size and 0 <= local_rank < local_size <= world_size
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and 0 < port < 1 << 16
    if not are_ranks or not has_store or world_size % local_size or rank % local_size != local_rank:
        raise RequestError(
            "the processes cannot form a group",
            expected="torchrun's variables, with the same number of processes on every host",
            got=", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True)),
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run = f"{os.environ['TORCHELASTIC_RUN_ID']}/{attempt}"
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), port
    return Launched(rank, world_size, local_rank, local_size, address, run)


def visible_gpus() -> int:
    """Upper bound on the number of GPUs that this process can use, by their device files and
    `CUDA_VISIBLE_DEVICES`; 0 if unknown."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if named is None else min(gpus, len([one for one in named.split(",") if one]))


def server_key() -> str | None:
    """`EXL_API_KEY`: API key that clients of the server must send, unless an option sets one."""
    return os.environ.get("EXL_API_KEY") or None


def default_model() -> str | None:
    """`EXL_MODEL`: the model of commands and functions that name none."""
    return os.environ.get("EXL_MODEL") or None


def set_default_model(spec: str, *, replaces: bool = False) -> None:
    """Sets `EXL_MODEL` for this process. With `replaces` also if it is set already."""
    if replaces or "EXL_MODEL" not in os.environ:
        os.environ["EXL_MODEL"] = spec


def is_offline() -> bool:
    """`HF_HUB_OFFLINE`: use no network. The variable is that of huggingface_hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def switch_off_multicast() -> None:
    """Switches NVLink multicast off in NCCL and in torch's symmetric memory, for this process and
    for those that it starts. Unlike other settings, the user's values do not stay."""
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")


def drop_odd_width() -> None:
    """Removes `COLUMNS` unless it is a width that a page can be laid out for.

    Rich takes it literally: it prints empty lines for 0, and fills every line up to the width. The
    width is then that of the terminal.
    """
    text = os.environ.get("COLUMNS", "")
    is_short_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_COLUMNS))
    if not (is_short_number and MIN_COLUMNS <= int(text) <= MAX_COLUMNS):
        os.environ.pop("COLUMNS", None)


def set_for_libraries(**values: str) -> None:
    """Sets environment variables that a library reads when it is imported. The user's values
    stay."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_offline() -> None:
    """Sets `HF_HUB_OFFLINE` for this process and its children, before huggingface_hub is
    imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def config_file() -> Path:
    """`EXL_CONFIG`: the file of `exl config`; by default below `XDG_CONFIG_HOME` or the platform's
    folder for configurations."""
    chosen = os.environ.get("EXL_CONFIG")
    if chosen:
        return Path(chosen)
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    if not base.is_absolute():
        home = "~/Library/Application Support" if sys.platform == "darwin" else "~/.config"
        base = Path(os.path.expanduser(home))  # noqa: PTH111 - never raises
    return base / "exl" / "config.toml"


def preset_file(name: str) -> Path:
    """File of one preset, in the folder `presets` beside `config_file`."""
    return config_file().parent / "presets" / f"{name}.toml"


def state_folder() -> Path:
    """Folder for the program's state files: below `XDG_STATE_HOME`, or else below the home
    directory."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "")
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.local/state"))  # noqa: PTH111 - never raises
    return base / "exl"


def available_cpus() -> int:
    """Number of cores that this process may use (Linux), or of all cores on other systems."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _as_thread_count(text: str) -> int:
    is_short_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_THREADS))
    if is_short_number and 1 <= int(text) <= MAX_THREADS:
        return int(text)
    raise RequestError(
        "EXL_THREADS is not a thread count",
        expected=f"1 to {MAX_THREADS}",
        got=text,
        next_step="Without it all cores that this process may use are taken.",
    )
