"""Measure a model on several hosts, all on this machine. Usage: time_hosts.py MODEL

Each host has GPUs of its own if there are enough, and `--device cpu` measures hosts without any.
Prints what `time_ranks.py` does: `ratio` is the median speed divided by that of one device in the
same run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from exl_core.session.follower import follow_job
from exl_core.session.hosts import load_on_hosts
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.open import open_model
from exl_core.settings import Launched, launched
from time_ranks import figures, report

ADDRESS = "127.0.0.1"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--hosts", default="2", help="numbers of hosts")
    parser.add_argument("--local", type=int, default=1, help="processes of a host")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--threads", type=int, default=2, help="threads of a host")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prefill", default="2048", help="lengths of prompts, or nothing")
    parser.add_argument("--decode", type=int, default=64, help="steps of decode")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of decode")
    parser.add_argument("--prompts", type=int, default=12, help="repetitions of prefill")
    parser.add_argument("--chunk", type=int, default=2048, help="rows of a pass of one process")
    parser.add_argument("--hosts-chunk", type=int, default=2048, help="the same of several hosts")
    args = parser.parse_args()
    options = LoadOptions(device=args.device, threads=args.threads, split="none")
    if launched() is not None:
        follow(args.model, options)
    base = figures(load_model(args.model, options), args)
    report("one process", base, base)
    for hosts in map(int, args.hosts.split(",")):
        store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        run = f"hosts{hosts}"
        others = [
            start(rank, hosts, args.local, store.port, run) for rank in range(1, hosts * args.local)
        ]
        job = Launched(0, hosts * args.local, 0, args.local, (ADDRESS, store.port), f"{run}/0")
        loaded = load_on_hosts(args.model, replace(options, job=job))
        own = argparse.Namespace(**{**vars(args), "chunk": args.hosts_chunk})
        report(f"{hosts} hosts of {args.local}", figures(loaded, own), base)
        for one in others:
            one.wait()
    return 0


def follow(model: Path, options: LoadOptions) -> None:
    """Follows rank 0, as a process that `start` has started. Does not return."""
    job = launched()
    assert job is not None, "the caller has checked it"
    follow_job(job, lambda: (open_model(model), options), (), print)


def start(rank: int, hosts: int, local: int, port: int, run: str) -> subprocess.Popen[bytes]:
    """This program as another rank, with torchrun's variables."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": hosts * local,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    gpus = torch.cuda.device_count()
    if gpus:
        first = rank // local * local
        own = (str((first + index) % gpus) for index in range(local))
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    environment = {name: str(value) for name, value in variables.items()}
    return subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **environment})


if __name__ == "__main__":
    raise SystemExit(main())
