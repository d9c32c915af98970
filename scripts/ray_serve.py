"""Serve replicas of a model with Ray Serve: each replica is one whole `exl serve-lite`.

    pip install 'ray[serve]'
    serve run scripts.ray_serve:application model=MODEL replicas=2 device=cpu threads=4

or `python scripts/ray_serve.py MODEL --replicas 2`, which starts Ray on this machine and stops it
with Ctrl-C. Ray Serve starts, restarts and health-checks the replicas, and routes each request to
one of them. A replica takes a GPU if its `device` is one, else `threads` CPUs.

Ray listens on all interfaces; started by this script, it asks for a token. Without an API key the
server answers only to localhost; with `EXL_API_KEY` in the environment of the replicas it asks for
that key.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from exl_cli.replicas import LOCAL_RAY, connected
from exl_cli.server.app import Access, create_app
from exl_cli.server.limits import Limits, hosts_of
from exl_cli.server.models import ModelHost
from exl_core.session.load import LoadOptions
from exl_core.session.runtime import RuntimeOptions, open_runtime
from exl_core.settings import server_key

if TYPE_CHECKING:
    from ray import serve

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Replicas:
    """Model of the replicas, their number, and the resources of each."""

    model: str
    replicas: int = 1
    device: str = "auto"
    threads: int = 1
    max_batch: int = 16
    cache_tokens: int = 8192

    @property
    def resources(self) -> dict[str, float]:
        if self.device.startswith("cuda"):
            return {"num_gpus": 1}
        return {"num_cpus": self.threads}


class Server:
    """One replica: a model with its engine, behind the routes of `exl serve-lite`."""

    def __init__(self, what: Replicas) -> None:
        load = LoadOptions(device=what.device, threads=what.threads)
        options = RuntimeOptions(load, max_batch=what.max_batch, cache_tokens=what.cache_tokens)
        self._runtime = open_runtime(what.model, options)

    def __serve_build_asgi_app__(self) -> FastAPI:
        key = server_key()
        keys = frozenset() if key is None else frozenset([key])
        access = Access(keys, hosts_of(HOST, keys, ()))
        return create_app(ModelHost(self._runtime), limits=Limits(), access=access)

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises."""
        self._runtime.loaded.model.check_loaded()


def deployment(what: Replicas) -> serve.Application:
    """The replicas, for `serve.run`."""
    from ray import serve

    made: Any = serve.deployment(
        num_replicas=what.replicas,
        ray_actor_options=what.resources,
        max_ongoing_requests=4 * what.max_batch,
    )(serve.ingress()(Server))
    bound: serve.Application = made.bind(what)
    return bound


def application(arguments: dict[str, str]) -> serve.Application:
    """The same from the arguments of `serve run`: fields of `Replicas`."""
    texts = {name: arguments[name] for name in ("model", "device") if name in arguments}
    numbers = {name: int(value) for name, value in arguments.items() if name not in texts}
    return deployment(Replicas(**texts, **numbers))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve replicas of a model")
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    what = Replicas(given.model, given.replicas, given.device, given.threads)
    with connected(LOCAL_RAY):  # before Ray is imported: it chooses a token for Ray's ports
        from ray import serve

        serve.start(http_options={"host": HOST, "port": given.port})
        serve.run(deployment(what), blocking=True)


if __name__ == "__main__":
    main()
