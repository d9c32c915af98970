"""Rank 0's model: tells the other ranks about every pass before it runs its own part.

The engine uses it like any other model. Caches and adapters are created on the followers when a
pass first uses one, and copies between pages are repeated there. A pass that fails on rank 0 ends
the group, because the others wait for it in an exchange.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import FrameType

import torch
from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.cache.page_pool import PageCopy
from exl_core.cache.store import KVStore
from exl_core.errors import RankError, RequestError
from exl_core.model.adapters import Adapter
from exl_core.model.batch import Batch
from exl_core.model.observe import Observer, StateRecorder
from exl_core.model.segment import Segment
from exl_core.model.weights import ModelWeights
from exl_core.ops.table import OpTable
from exl_core.parallel.exchange import Exchange, GlooExchange
from exl_core.parallel.followers import Group
from exl_core.parallel.hosts import Hops, HostTransformer, WholeModel
from exl_core.parallel.peers import Link, PeerExchange
from exl_core.parallel.shares import Shares
from exl_core.parallel.wire import (
    Header,
    Message,
    Operation,
    adapter_message,
    numbers_message,
    pass_message,
    replay_message,
    store_message,
)


class LeadingTransformer(HostTransformer):
    """The model of rank 0. `followers` are ended by `unload`, and when the model goes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: OpTable,
        exchange: Exchange,
        *,
        shares: Shares,
        sample_ids: tuple[int, ...] = (),
        followers: Group,
        hops: Hops | None = None,
        whole: WholeModel | None = None,
        digest_of: Callable[[Adapter], str] = attrgetter("digest"),
    ) -> None:
        """`digest_of`: text by which the followers find an adapter."""
        super().__init__(
            config,
            weights,
            ops,
            exchange,
            shares=shares,
            sample_ids=sample_ids,
            hops=hops,
            whole=whole,
        )
        self._digest_of = digest_of
        self.link: Link | None = None
        """How GPUs exchange, which the load sets; None without GPUs."""
        self.followers = followers
        self._lock = threading.RLock()
        self._mirrors: weakref.WeakKeyDictionary[KVStore, _Mirror] = weakref.WeakKeyDictionary()
        self._num_stores = 0
        self._dropped: list[Header] = []  # caches and adapters that are gone: sent before the next
        self._adapters: weakref.WeakKeyDictionary[Adapter, int] = weakref.WeakKeyDictionary()
        self._num_adapters = 0
        weakref.finalize(self, followers.close)

    def run_stage(
        self,
        index: int,
        batch: Batch,
        store: KVStore,
        x: Tensor | None = None,
        *,
        observe: Observer | None = None,
    ) -> Tensor:
        if observe is not None and not isinstance(observe, StateRecorder):
            raise RequestError(
                "an observer may change states, which the other ranks would not see",
                expected="a StateRecorder, or a model without --tensor-parallel",
            )
        self.check_pass(observe)
        with self._lock:
            if self._is_replaying:  # the others have been told
                return super().run_stage(index, batch, store, x, observe=observe)
            number = self.number_of(store)
            with self._telling(pass_message(number, batch, self._adapter_number)):
                return super().run_stage(index, batch, store, x, observe=observe)

    @contextmanager
    def replaying(self, store: KVStore, segments: Sequence[Segment]) -> Iterator[Tensor | None]:
        with self._lock:
            number = self.number_of(store)
            with (
                self._telling(replay_message(number, segments)),
                super().replaying(store, segments) as received,
            ):
                yield received

    def embed(self, token_ids: Tensor) -> Tensor:
        ids = token_ids.to("cpu", torch.int64).view(-1)
        with self._lock, self._telling(numbers_message(Operation.EMBED, ids)):
            return super().embed(ids)

    def unload(self) -> None:
        """Frees the weights on all ranks. Their processes end, and rank 0 listens no longer."""
        self.followers.close()
        super().unload()
        if isinstance(self._exchange, PeerExchange | GlooExchange):
            self._exchange.close()

    def tell(self, message: Message) -> None:
        """Sends a message that no exchange follows."""
        with self._lock, _interrupts_deferred():
            while self._dropped:
                self.followers.send(Message(self._dropped.pop(), b""))
            self.followers.send(message)

    @contextmanager
    def _telling(self, message: Message) -> Iterator[None]:
        """Sends a message, then runs rank 0's part of the same work."""
        self.check_loaded()
        with _interrupts_deferred():
            self.tell(message)
            try:
                yield
            except RankError as error:
                raise self.followers.cause(error) from error
            except BaseException as error:
                self.followers.abandon(f"failed in a pass: {type(error).__name__}: {error}")
                raise

    def number_of(self, store: KVStore) -> int:
        """The number of a cache. The followers have it from then on."""
        with self._lock, _interrupts_deferred():
            mirror = self._mirrors.get(store)
            if mirror is None:
                number = self._num_stores
                self._num_stores += 1
                num_states = 0 if store.states is None else store.states.num_slots
                self.tell(store_message(number, store.kv_format, store.num_pages, num_states))
                mirror = _Mirror(weakref.ref(self), number)
                self._mirrors[store] = store.mirror = mirror
                drop = Header(Operation.DROP, store=number)
                weakref.finalize(store, self._dropped.append, drop)
            return mirror.number

    def _adapter_number(self, adapter: Adapter) -> int:
        """The number of an adapter. The followers read their parts of it the first time."""
        with _interrupts_deferred():
            number = self._adapters.get(adapter)
            if number is None:
                number = self._num_adapters
                self._num_adapters += 1
                self.tell(adapter_message(number, self._digest_of(adapter), adapter.path))
                self._adapters[adapter] = number
                forget = Header(Operation.FORGET, adapter=number)
                weakref.finalize(adapter, self._dropped.append, forget)
            return number


class _Mirror:
    """Repeats the copies between pages of one cache on the followers."""

    def __init__(self, model: weakref.ref[LeadingTransformer], number: int) -> None:
        self.number = number
        self._model = model

    def copied(self, copies: Sequence[PageCopy]) -> None:
        self._tell(Operation.COPY, [(one.source, one.target, one.length) for one in copies])

    def moved(self, moves: Sequence[tuple[int, int]]) -> None:
        self._tell(Operation.MOVE, list(moves))

    def transferred(self, to: KVStore, pages: Sequence[tuple[int, int]]) -> None:
        self._tell(Operation.GIVE, list(pages), to)

    def states_copied(self, copies: Sequence[tuple[int, int]]) -> None:
        self._tell(Operation.COPY_STATES, list(copies))

    def state_transferred(self, to: KVStore, source: int, target: int) -> None:
        self._tell(Operation.GIVE_STATES, [(source, target)], to)

    def _tell(
        self, operation: Operation, rows: Sequence[tuple[int, ...]], to: KVStore | None = None
    ) -> None:
        model = self._model()
        if rows and model is not None:
            target = 0 if to is None else model.number_of(to)
            model.tell(numbers_message(operation, torch.tensor(rows), self.number, target))


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Holds Ctrl-C back until the end of a pass, which the other ranks run to its end as well, or
    until a message has reached all of them. May be nested."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers on the main thread only
        return
    held: list[tuple[int, FrameType | None]] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])
