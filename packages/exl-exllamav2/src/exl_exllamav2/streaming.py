"""ExLlamaV2StreamingGenerator: `begin_stream_ex`, then one token per call of `stream_ex`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exl_core.engine.engine import Engine
from exl_core.engine.events import FinishReason, SampledToken
from exl_core.engine.request import Report, Request
from exl_core.generate.driver import running
from exl_core.generate.streaming import StreamingGenerator, StreamResult
from exl_core.model.embedded import EmbeddedSpan
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter
from exl_core.speculate.stats import DraftStats
from exl_exllamav2.base_generator import EngineOwner, ExLlamaV2BaseGenerator
from exl_exllamav2.cache import ExLlamaV2CacheBase
from exl_exllamav2.engines import (
    Stops,
    Weights,
    build_request,
    make_engine,
    model_drafter,
    random_seed,
    split_stops,
    weights_of,
)
from exl_exllamav2.errors import (
    OldAssertionError,
    OldRuntimeError,
    no_ids,
    old_types,
    refuse,
)
from exl_exllamav2.filters import healed_text
from exl_exllamav2.job import token_details
from exl_exllamav2.model import ExLlamaV2
from exl_exllamav2.settings import Settings, SettingsReader
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

Mode = tuple[object, ...]
"""Settings of drafting that an engine was made for."""


@dataclass
class _Begun:
    """Arguments of the stream that runs."""

    request: Request
    reader: SettingsReader
    report: Report
    abort_event: Any
    stops: Stops
    heals: bool
    """The next step samples the last prompt token again."""
    has_ended: bool = False
    is_full: bool = False


class StreamOwner(EngineOwner):
    """User of a cache that streams one reply."""

    def __init__(self, engine: Engine, weights: Weights, inner: StreamingGenerator) -> None:
        super().__init__(engine, weights)
        self.inner = inner
        self.prefix: list[int] = []

    @property
    def held_len(self) -> int:
        return len(self.held_ids()[0])

    def held_ids(self) -> list[list[int]]:
        """All tokens but the newest, which is not computed yet."""
        return [list(self.inner.sequence_ids or self.prefix)[:-1]]

    def leave(self) -> None:
        self.inner.cancel()
        super().leave()


class ExLlamaV2StreamingGenerator(ExLlamaV2BaseGenerator):
    """Streams one reply at a time, and reuses what earlier streams cached."""

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2CacheBase,
        tokenizer: ExLlamaV2Tokenizer,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2CacheBase | None = None,
        num_speculative_tokens: int = 5,
    ) -> None:
        super().__init__(model, cache, tokenizer)
        self.draft_model = draft_model
        self.draft_cache = draft_cache
        self.num_speculative_tokens = num_speculative_tokens
        self.speculative_prob_threshold = 0.25
        self.speculative_ngram = False
        self.speculative_ngram_min = 1
        self.speculative_ngram_max = 5
        self.speculative_ngram_max_inf = 3
        self.speculative_ngram_threshold = 1
        self.settings: Settings | None = None
        self.held_text = ""
        self.stop_tokens: set[int] = {i for i in (tokenizer.eos_token_id,) if i is not None}
        self.stop_strings: set[str] = set()
        self._preloaded: tuple[int, ...] = ()
        self._past_stats = DraftStats()
        self._owners: dict[Mode, StreamOwner] = {}
        self._owner: StreamOwner | None = None
        self._begun: _Begun | None = None
        self._num_emitted = 0

    # Settings

    def set_stop_conditions(self, stop_conditions: Any) -> None:
        """Replace all stop tokens and stop strings, also those of a running stream."""
        ids, strings = split_stops(stop_conditions)
        self.stop_tokens, self.stop_strings = set(ids), set(strings)

    def ngram_preload(self, input_ids: Any) -> None:
        """Ids of a text that later n-gram drafts may quote."""
        listed = input_ids.view(-1).tolist() if isinstance(input_ids, Tensor) else input_ids
        self._preloaded = tuple(int(i) for i in listed)

    def reset_sd_stats(self) -> None:
        self._past_stats = DraftStats()
        for owner in self._owners.values():
            owner.inner.draft_stats = DraftStats()

    def get_sd_stats(self) -> tuple[float, float, int, int, int]:
        """Shares of accepted tokens among all and among the drafted ones, and the counts."""
        stats = self._past_stats
        for owner in self._owners.values():
            stats = stats + owner.inner.draft_stats
        emitted, drafted, accepted = stats.emitted, stats.drafted, stats.accepted
        return (
            accepted / emitted if emitted else 0.0,
            accepted / drafted if drafted else 0.0,
            emitted,
            drafted,
            accepted,
        )

    @property
    def total_tokens(self) -> int:
        return self.get_sd_stats()[2]

    @property
    def total_draft_tokens(self) -> int:
        return self.get_sd_stats()[3]

    @property
    def accepted_draft_tokens(self) -> int:
        return self.get_sd_stats()[4]

    # Streams

    def begin_stream(
        self,
        input_ids: Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: Any = None,
        input_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        abort_event: Any = None,
        **kwargs: Any,
    ) -> None:
        """`begin_stream_ex` with the older arguments."""
        self.begin_stream_ex(
            input_ids,
            gen_settings,
            token_healing,
            loras,
            input_mask,
            position_offsets,
            abort_event=abort_event,
            **kwargs,
        )

    def begin_stream_ex(
        self,
        input_ids: Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: Any = None,
        input_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        return_probabilities: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        abort_event: Any = None,
        input_embeddings: Tensor | None = None,
        decode_special_tokens: bool = False,
        banned_strings: list[str] | None = None,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        **kwargs: Any,
    ) -> None:
        """Begin a stream and compute its prompt, all but the last token."""
        if "_gen_single_token" in self.__dict__:
            refuse(
                "generator._gen_single_token",
                "exl samples in its engine",
                "Use filters, post_sampling_hooks, or Context of exl_core.model.context.",
            )
        if input_embeddings is not None and self.draft_model is not None:
            raise OldAssertionError("input_embeddings do not go with a draft model")
        rows = _rows(input_ids, input_mask)
        if len(rows) != (1 if gen_settings.cfg_scale is None else 2):
            raise OldAssertionError(
                "a stream has one row of ids, or two with cfg_scale", got=f"{len(rows)} rows"
            )
        self.settings = gen_settings
        reader = SettingsReader(gen_settings, self.tokenizer, random_seed())
        report = Report(return_probabilities, return_top_tokens, return_logits)
        stops = frozenset(self.stop_tokens), tuple(self.stop_strings)
        capacity = min(self.model.config.max_seq_len, self.cache.max_seq_len) - max(map(len, rows))
        with old_types():
            request = build_request(
                rows[0],
                padded_vocab=self.model.config.padded_vocab_size,
                negative_ids=rows[1] if len(rows) == 2 else None,
                max_tokens=max(1, capacity),
                sampler=reader.params,
                settings=gen_settings,
                stops=stops,
                banned_strings=banned_strings,
                filters=filters,
                filter_prefer_eos=filter_prefer_eos,
                token_healing=token_healing,
                healed=healed_text(rows[0], self.tokenizer) if token_healing else None,
                loras=loras,
                report=report,
                decode_special_tokens=decode_special_tokens,
            )
            if input_embeddings is not None:
                request = replace(request, embeddings=(EmbeddedSpan(input_embeddings[0]),))
            self._begin(request, reader, report, abort_event, stops)

    def _begin(
        self, request: Request, reader: SettingsReader, report: Report, abort: Any, stops: Stops
    ) -> None:
        if request.negative_prompt_ids is not None and self.cache.batch_size < 2:
            raise OldAssertionError(
                "a stream with cfg_scale needs a cache of two rows",
                expected="batch_size=2",
                got=self.cache.batch_size,
            )
        owner = self._take_cache()
        owner.inner.cancel()
        owner.engine.check(request)
        self.sequence_ids = torch.tensor([list(request.prompt_ids)])
        owner.prefix = list(request.prompt_ids)
        self._begun = _Begun(request, reader, report, abort, stops, request.token_healing)
        if len(request.prompt_ids) > 1:
            self._prefill(owner, request, abort)
        if abort is not None and abort.is_set():
            self._begun = None
            return
        self._num_emitted = 0
        owner.inner.begin_request(request, abort)

    def _prefill(self, owner: StreamOwner, request: Request, abort: Any) -> None:
        """Compute all tokens of the prompts but the last, which the stream then finds cached."""
        negative = request.negative_prompt_ids
        first = Request(
            prompt_ids=request.prompt_ids[:-1],
            negative_prompt_ids=None if negative is None else negative[:-1] or negative,
            max_tokens=1,
            sampler=SamplerParams(temperature=0.0, cfg_scale=request.sampler.cfg_scale),
            adapters=request.adapters,
            embeddings=request.embeddings,
            allow_drafts=False,
        )
        with running(owner.engine, [first]) as run:
            for _ in run.events(None if abort is None else abort.is_set):
                pass

    def _take_cache(self) -> StreamOwner:
        """The engine for the present settings of drafting, as the user of the cache."""
        mode: Mode = ()
        if self.speculative_ngram:
            mode = (
                "ngram",
                self.speculative_ngram_min,
                self.speculative_ngram_max,
                self.speculative_ngram_max_inf,
                hash(self._preloaded),
            )
        elif self.draft_model is not None and self.num_speculative_tokens > 0:
            mode = ("model", self.num_speculative_tokens, self.speculative_prob_threshold)
        weights = weights_of(self.model, self.draft_model if "model" in mode else None)
        owner = self._owners.get(mode)
        if owner is not None and owner.weights != weights:
            self._past_stats = self._past_stats + owner.inner.draft_stats
            owner = None
        if owner is None:
            engine = make_engine(
                self.model,
                self.cache,
                self.tokenizer,
                max_batch=2,
                drafter=self._drafter(mode),
            )
            inner = StreamingGenerator(self.model.loaded_model, engine=engine)
            owner = self._owners[mode] = StreamOwner(engine, weights, inner)
        self.cache.pending_ids = None
        if self.cache.take(owner):
            owner.engine.forget_cache()
        self._owner = owner
        return owner

    def _drafter(self, mode: Mode) -> Drafter | None:
        if not mode:
            return None
        if mode[0] == "ngram":
            return NgramDrafter(
                max_tokens=max(1, self.speculative_ngram_max_inf - 1),
                min_match=max(1, self.speculative_ngram_min),
                max_match=max(self.speculative_ngram_min, self.speculative_ngram_max),
                preload=self._preloaded,
            )
        assert self.draft_model is not None, "the mode says so"
        return model_drafter(
            self.model,
            self.cache,
            self.draft_model,
            self.draft_cache,
            self.tokenizer,
            max_tokens=self.num_speculative_tokens,
            min_probability=self.speculative_prob_threshold,
        )

    def stream(self) -> tuple[Any, ...]:
        """`(chunk, eos, chunk_token_ids)`, with probabilities and logits if requested."""
        begun = self._begun
        if begun is not None and begun.report.top_tokens:
            raise OldAssertionError("stream returns no top tokens", next_step="Use stream_ex.")
        found = self.stream_ex()
        extra = tuple(found[name] for name in ("probs", "logits") if name in found)
        return (found["chunk"], found["eos"], found["chunk_token_ids"], *extra)

    def stream_ex(self, ban_tokens: Any = None, **kwargs: Any) -> dict[str, Any]:
        """The next token as a dictionary; `ban_tokens` are not sampled in this call."""
        begun, owner = self._begun, self._owner
        if begun is None or owner is None:
            raise OldRuntimeError("no stream was begun", next_step="Call begin_stream_ex first.")
        if self.cache.owner is not owner:
            raise OldRuntimeError("another generator or forward has taken the cache of this stream")
        if begun.is_full:
            raise OldAssertionError(
                "the context is full",
                next_step="Test generator.full() after each token, and begin a shorter stream.",
            )
        if begun.has_ended:
            return self._result(begun, StreamResult(is_end=True), is_end=True)
        if owner.weights[0] is not self.model.weights:
            raise OldRuntimeError(
                "the model was loaded again during this stream",
                next_step="Call begin_stream_ex again.",
            )
        with old_types():
            self._change_settings(begun, owner)
            found = self._step(begun, owner, [] if ban_tokens is None else ban_tokens)
            begun.reader.store_cut(owner.engine, begun.request.request_id)
        return self._finish(begun, owner, found)

    def _step(self, begun: _Begun, owner: StreamOwner, ban_tokens: Any) -> StreamResult:
        """The next token. The healed token is no token of the reply: its text comes with the first
        one."""
        banned = ban_tokens if isinstance(ban_tokens, int) else list(ban_tokens)
        found = owner.inner.step(banned)
        heals, begun.heals = begun.heals, False
        is_healed_only = len(owner.inner.sequence_ids) == len(begun.request.prompt_ids)
        if heals and is_healed_only and not found.is_end:
            found = found.followed_by(owner.inner.step(banned))
        return found

    def _change_settings(self, begun: _Begun, owner: StreamOwner) -> None:
        """Apply settings and stop conditions that the program has changed."""
        params = begun.reader.changed()
        stops = frozenset(self.stop_tokens), tuple(self.stop_strings)
        changed = stops if stops != begun.stops else None
        if params is not None or changed is not None:
            begun.stops = stops
            owner.inner.change(params, None if changed is None else (*changed[0], *changed[1]))

    def _finish(self, begun: _Begun, owner: StreamOwner, found: StreamResult) -> dict[str, Any]:
        is_end = found.is_end
        if found.reason in (FinishReason.LENGTH, FinishReason.CANCELLED):
            # The end of the context is not the end of the stream: programs test `full`.
            begun.is_full, is_end = found.reason is FinishReason.LENGTH, False
            begun.has_ended = found.reason is FinishReason.CANCELLED
            is_end = begun.has_ended
        elif is_end:
            begun.has_ended = True
        ids = list(owner.inner.sequence_ids)
        stopped = found.finish is not None and isinstance(found.finish.stopped_by, int)
        self.sequence_ids = torch.tensor([ids])
        left: tuple[int, ...] = ()
        tokens: tuple[SampledToken, ...] = ()
        if found.finish is not None and not stopped:
            emitted = self._num_emitted + len(found.token_ids)
            left, tokens = found.finish.token_ids[emitted:], found.finish.tokens
        self._num_emitted += len(found.token_ids) + len(left)
        whole = replace(
            found, token_ids=(*found.token_ids, *left), tokens=(*found.tokens, *tokens[: len(left)])
        )
        return self._result(begun, whole, is_end=is_end)

    def _result(self, begun: _Begun, found: StreamResult, *, is_end: bool) -> dict[str, Any]:
        result: dict[str, Any] = {
            "chunk": found.chunk,
            "eos": is_end,
            "chunk_token_ids": torch.tensor([list(found.token_ids)], dtype=torch.long).view(1, -1),
        }
        padded_vocab = self.model.config.padded_vocab_size
        details = token_details(found.tokens, begun.report, padded_vocab, "probs", "top_")
        result |= details or _no_details(begun.report, padded_vocab)
        if found.suppressed:
            result["suppressed"] = found.suppressed
        return result


def _no_details(report: Report, padded_vocab: int) -> dict[str, Any]:
    """Details of a step without tokens: the same keys, with n = 0."""
    found: dict[str, Any] = {}
    if report.probabilities:
        found["probs"] = torch.empty(1, 0)
    if report.top_tokens:
        found["top_tokens"] = torch.empty((1, 0, report.top_tokens), dtype=torch.long)
        found["top_probs"] = torch.empty(1, 0, report.top_tokens)
    if report.logits:
        found["logits"] = torch.empty(1, 0, padded_vocab)
    return found


def _rows(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Ids of each row without the columns that the mask excludes."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() not in (1, 2):
        raise no_ids(input_ids)
    if input_ids.dim() == 1:
        input_ids = input_ids[None]
    rows = []
    for i, ids in enumerate(input_ids.tolist()):
        kept = None if mask is None else (mask[min(i, len(mask) - 1)] > -1e4).tolist()
        rows.append(ids if kept is None else [x for x, k in zip(ids, kept, strict=False) if k])
    if not rows or not rows[0]:
        raise OldAssertionError("the prompt is empty")
    return rows
