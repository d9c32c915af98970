"""Process of one rank of tensor parallelism, started by `session/ranks.py`.

Loads the rank's part of the model, and then runs the passes that rank 0 describes until it ends.
Reads everything from two inherited sockets, whose numbers are its arguments, and prints nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from exl_core.errors import ExlError
from exl_core.parallel.follower import LOST_LEADER, Follower, Reports, receive

if TYPE_CHECKING:
    from exl_core.parallel.model import RankTransformer


def main(arguments: list[str]) -> None:
    messages, reports = Connection(int(arguments[0])), Reports(Connection(int(arguments[1])))
    try:
        _follow(messages, reports)
    except EOFError:
        os._exit(LOST_LEADER)
    except ExlError as error:
        reports.failed(str(error), error.exit_code)
        os._exit(error.exit_code)
    except BaseException as error:  # noqa: BLE001 - the process ends, and rank 0 reports it
        reports.failed(f"{type(error).__name__}: {error}", ExlError.exit_code)
        os._exit(ExlError.exit_code)
    os._exit(0)  # without waiting for threads of the exchange


def _follow(messages: Connection, reports: Reports) -> None:
    settings = json.loads(messages.recv_bytes())
    from exl_core.parallel.wire import Operation

    part = _load(settings)
    reports.loaded(part.digest)
    if receive(messages, sequence=0).header.operation == Operation.END:
        return
    from exl_core.lora.adapter import load_adapter

    follower = Follower(part.join(Path(settings["folder"])), load_adapter)
    for sequence in count(1):
        message = receive(messages, sequence)
        if message.header.operation == Operation.END:
            return
        follower.run(message)


class _Part(NamedTuple):
    """A loaded part of a model. `join` waits for the other ranks."""

    digest: str
    join: Callable[[Path], RankTransformer]


def _load(settings: Mapping[str, Any]) -> _Part:
    import torch

    from exl_core.ops.open import get_table
    from exl_core.parallel.exchange import GlooExchange
    from exl_core.parallel.model import RankTransformer
    from exl_core.parallel.plan import Rank
    from exl_core.session.load import checkpoint_of, options_of, resolve_device, with_options
    from exl_core.session.open import open_model
    from exl_core.session.ranks import digest_of, sharded
    from exl_core.session.weights import Loading
    from exl_core.settings import read_settings

    options = options_of(settings["options"])
    rank = Rank(settings["rank"], settings["options"]["tensor_parallel"])
    threads = options.threads or 1  # rank 0 has chosen it
    torch.set_num_threads(threads)
    files = open_model(settings["path"])
    config = with_options(files.config, options)
    device = resolve_device(options.device, is_exact=options.exact)
    isa = options.isa or (read_settings().isa if device == "cpu" else None)
    ops = get_table(device, isa=isa, threads=threads, batch_invariant=options.batch_invariant)
    tensors, own = sharded(checkpoint_of(files, config, options), config, rank)
    weights = Loading(own, tensors, files.path, threads, None).whole(ops, None)

    def join(folder: Path) -> RankTransformer:
        exchange = GlooExchange(folder, rank)
        return RankTransformer(
            config, weights, ops, exchange, shares=tensors.shares, sample_ids=files.sample_ids
        )

    return _Part(digest_of(files), join)


if __name__ == "__main__":
    main(sys.argv[1:])
