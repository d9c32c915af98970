"""Rendezvous of processes that torchrun has started, on one host or on several.

Rank 0 writes its address and a random token to torchrun's store, where the others read them. It
listens on a port until all others have connected with the token, and then closes the port. Process
groups, which the exchanges use, listen until the processes end. Nothing that arrives is unpickled.
There is no encryption, and any program that reaches the store can join the group, so addresses that
other machines reach need a trusted network.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from exl_core.errors import RankError, RequestError
from exl_core.parallel.exchange import (
    LOOPBACK,
    Exchange,
    GlooExchange,
    GlooGroup,
    NoExchange,
    never,
)
from exl_core.parallel.followers import Follower, Group
from exl_core.parallel.hosts import Hops
from exl_core.parallel.liveness import Watchdog
from exl_core.parallel.nccl_library import new_id
from exl_core.parallel.plan import Grid, Rank
from exl_core.settings import Launched

CONNECT_S = 60
"""Longest wait for the other processes, which torchrun starts at about the same time."""
HELLO_S = 2.0
"""Time for a connection to say who it is."""
LOST_MS = 4000
"""Time after which data that another host does not acknowledge ends a connection."""
_HELLO = struct.Struct("<4s16s4i")  # magic, token, version, channel, rank, ranks of the host
_MAGIC, _VERSION = b"exlr", 1
_CHANNELS = _MESSAGES, _REPORTS = 0, 1
_LEADER = "leader"
_NCCL_ID = "nccl"


class Ends(NamedTuple):
    """A follower's ends of its sockets."""

    messages: Connection
    reports: Connection


class Meeting:
    """One process's side of the rendezvous."""

    def __init__(self, job: Launched) -> None:
        """Connects to the store. RequestError if the processes would have to listen where other
        machines reach them, and the network is not trusted."""
        self.job = job
        self.grid = Grid(job.world_size // job.local_size, job.local_size)
        self.address = LOOPBACK if self.grid.hosts == 1 else _own_address(job.address)
        if not (job.trusts_network or ipaddress.ip_address(self.address).is_loopback):
            raise RequestError(
                "the processes would accept connections from other machines, without encryption",
                expected="--trust-network, on a private network",
                got=f"address {self.address}",
            )
        self.hops: Hops | None = None
        """Transfers between hosts, after `connect`; None for a single host."""
        self._store = PrefixStore(f"exl/{job.run}", _store(job.address))
        self._own_store = PrefixStore(f"host{self.grid.host_of(job.rank)}", self._store)

    def lead(self, watchdog: Watchdog | None = None) -> Group:
        """Waits for all other processes, on rank 0. RankError if they do not come. `watchdog` ends
        this process if it hangs."""
        token = secrets.token_bytes(16)
        with socket.create_server((self.address, 0)) as listening:
            port = listening.getsockname()[1]
            self._store.set(_LEADER, f"{self.address} {port} {token.hex()}")
            ends = self._accepted(listening, token)
        followers = []
        for rank, (messages, reports) in sorted(ends.items()):
            connections = Connection(messages.detach()), Connection(reports.detach())
            followers.append(Follower(rank, *connections, f"host {self.grid.host_of(rank)}"))
        return Group(followers, self.connect, watchdog)

    def follow(self) -> Ends:
        """Connects to rank 0. RankError if it cannot be reached."""
        try:
            text = self._store.get(_LEADER).decode()
            address, port, token = text.split(" ")
            target, secret = (address, int(port)), bytes.fromhex(token)
            messages, reports = (self._connected(target, secret, one) for one in _CHANNELS)
        except (OSError, RuntimeError, ValueError) as error:
            got = str(error).partition("\n")[0]
            raise RankError("rank 0 cannot be reached", got=got) from error
        return Ends(Connection(messages.detach()), Connection(reports.detach()))

    def connect(self, has_ended: Callable[[], bool] = never) -> Exchange:
        """Joins the transfers between hosts, and the exchange of the ranks of this one. All ranks
        call it, and it ends once all are connected. `has_ended` as for `GlooGroup`."""
        rank = self.grid.rank_in_host(self.job.rank)
        exchange: Exchange = NoExchange()
        if rank.count > 1:
            exchange = GlooExchange(self._own_store, rank, has_ended)
        if self.grid.hosts > 1:
            everyone = Rank(self.job.rank, self.grid.count)
            group = GlooGroup(PrefixStore("hops", self._store), everyone, self.address, has_ended)
            self.hops = Hops(group, self.grid, self.job.rank)
        return exchange

    def nccl_id(self) -> bytes:
        """Id with which the GPUs of this host connect, of rank 0 among its ranks. Waits for it on
        the other ones. RankError if it does not come, and what `new_id` raises."""
        if self.grid.rank_in_host(self.job.rank).index == 0:
            identity = new_id()
            self._own_store.set(_NCCL_ID, identity.hex())
            return identity
        try:
            return bytes.fromhex(self._own_store.get(_NCCL_ID).decode())
        except RuntimeError as error:
            got = str(error).partition("\n")[0]
            raise RankError("the first rank of this host has no GPU ready", got=got) from error

    def _accepted(self, listening: socket.socket, token: bytes) -> dict[int, list[socket.socket]]:
        """Both connections of every other rank."""
        found: dict[tuple[int, int], socket.socket] = {}
        ranks = range(1, self.grid.count)
        until_s = time.monotonic() + CONNECT_S
        while len(found) < len(_CHANNELS) * len(ranks):
            listening.settimeout(max(0.01, until_s - time.monotonic()))
            try:
                one, _ = listening.accept()
            except TimeoutError as error:
                missing = [rank for rank in ranks if (rank, _REPORTS) not in found]
                raise RankError(f"rank {missing[0]} has not come for {CONNECT_S} s") from error
            who = _identity(one, token)
            if who is None:
                one.close()
                continue
            channel, rank, local = who
            if local != self.grid.local:
                raise RankError(
                    f"rank {rank} has another number of processes on its host",
                    expected=self.grid.local,
                    got=local,
                )
            _settle(one)
            found[rank, channel] = one
        return {rank: [found[rank, channel] for channel in _CHANNELS] for rank in ranks}

    def _connected(self, address: tuple[str, int], token: bytes, channel: int) -> socket.socket:
        one = socket.create_connection(address, CONNECT_S)
        _settle(one)
        one.sendall(
            _HELLO.pack(_MAGIC, token, _VERSION, channel, self.job.rank, self.job.local_size)
        )
        return one


def _identity(one: socket.socket, token: bytes) -> tuple[int, int, int] | None:
    """Channel, rank and ranks of the host that a connection names; None for a stranger."""
    one.settimeout(HELLO_S)
    try:
        data = one.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(data) < _HELLO.size:
        return None
    magic, theirs, version, channel, rank, local = _HELLO.unpack(data)
    is_known = magic == _MAGIC and version == _VERSION and secrets.compare_digest(theirs, token)
    return (channel, rank, local) if is_known else None


def _settle(one: socket.socket) -> None:
    """Blocking, without delays of small messages, and ended if the other host does not answer."""
    one.settimeout(None)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)


def _store(address: tuple[str, int]) -> Store:
    """torchrun's store, as its client."""
    host, port = address
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_S))
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        raise RankError(
            "torchrun's store cannot be reached", where=f"{host}:{port}", got=line
        ) from error


def _own_address(store: tuple[str, int]) -> str:
    """This machine's address on the network of the store. Nothing is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.connect(target)
            return str(one.getsockname()[0])
    except OSError as error:
        raise RankError("torchrun's store cannot be reached", where=store[0], got=error) from error
