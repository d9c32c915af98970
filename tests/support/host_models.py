"""Models divided among several hosts, of which the test's process is rank 0.

The other ranks are processes as torchrun starts them, all on this machine. Each host has its own
GPUs if there are enough of them; otherwise the hosts share GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from exl_core.cache.format import KVFormat
from exl_core.model.cuda_graphs import PASSES_BEFORE_CAPTURE
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.session.hosts import load_on_hosts
from exl_core.session.load import LoadedModel, LoadOptions
from exl_core.settings import Launched
from support.launched_jobs import variables_of

FOLLOW = """
import json, sys
from exl_core.session.follower import follow_job
from exl_core.session.load import LoadOptions
from exl_core.session.open import open_model
from exl_core.settings import launched
fields = json.loads(sys.argv[2])
follow_job(launched(), lambda: (open_model(sys.argv[1]), LoadOptions(**fields)), (), print)
"""
PROMPT, CHUNK, STEPS = 45, 30, 6
END_S = 10.0


def gpus_of_hosts(hosts: int, local: int) -> list[str]:
    """`CUDA_VISIBLE_DEVICES` of each host, of the GPUs that this process may use."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if named is None else named.split(",")
    return [
        ",".join(names[(host * local + index) % count] for index in range(local))
        for host in range(hosts)
    ]


@contextmanager
def on_hosts(path: Path, hosts: int, local: int, **fields: Any) -> Iterator[LoadedModel]:
    """The model on `hosts` hosts of `local` ranks each. `fields` are those of `LoadOptions`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = uuid.uuid4().hex
    gpus = gpus_of_hosts(hosts, local) if fields.get("device") == "cuda" else [""] * hosts
    others: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, hosts * local):
            variables = variables_of(rank, hosts, local, store.port, run)
            variables["CUDA_VISIBLE_DEVICES"] = gpus[rank // local]
            others.append(_follower(path, fields, variables))
        address = "127.0.0.1", store.port
        job = Launched(0, hosts * local, 0, local, address, f"{run}/0")
        loaded = load_on_hosts(path, LoadOptions(job=job, **fields))
        try:
            yield loaded
        finally:
            loaded.unload()
        assert [one.wait(END_S) for one in others] == [0] * len(others)
    finally:
        for one in others:
            one.kill()
            one.wait()


def _follower(
    path: Path, fields: Mapping[str, Any], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    given = [sys.executable, "-c", FOLLOW, str(path), json.dumps(fields)]
    return subprocess.Popen(given, stdin=subprocess.DEVNULL, env={**os.environ, **variables})


def logits_of_passes(model: Transformer, kv_format: KVFormat = KVFormat.FP16) -> Tensor:
    """Logits of the same passes several times: prompts in chunks, and decode steps of one and of
    two sequences. On a GPU they are computed eagerly, are captured, and are replayed."""
    has_states = bool(model.config.state_bytes)
    store = store_for(model, kv_format, 2, num_states=2 if has_states else 0)
    runner = Runner(model, store)
    found: list[Tensor] = []

    def run(*parts: tuple[int, int, int], rows: LogitRows) -> None:
        segments = [
            Segment(
                *(ids[one][first:last], first, (one,), rows),
                state_slot=one if has_states else None,
            )
            for one, first, last in parts
        ]
        found.append(runner.run(segments).cpu().clone())

    generator = torch.Generator().manual_seed(5)
    most = min(model.config.vocab_size, 259)
    for _ in range(PASSES_BEFORE_CAPTURE + 1):
        drawn = torch.randint(3, most, (2, PROMPT + STEPS), generator=generator)
        ids = [tuple(one) for one in drawn.tolist()]
        run((0, 0, 1), rows=LogitRows.LAST)
        run((0, 1, CHUNK), rows=LogitRows.NONE)
        run((0, CHUNK, PROMPT), rows=LogitRows.ALL)
        run((0, PROMPT, PROMPT + 1), (1, 0, PROMPT), rows=LogitRows.LAST)
        for at in range(PROMPT, PROMPT + STEPS - 1):
            run((0, at + 1, at + 2), (1, at, at + 1), rows=LogitRows.LAST)
        run((0, PROMPT + STEPS - 1, PROMPT + STEPS), rows=LogitRows.LAST)
    return torch.cat(found)
