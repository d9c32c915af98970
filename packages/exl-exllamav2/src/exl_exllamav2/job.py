"""ExLlamaV2DynamicJob: one request of the dynamic generator, and its result dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl_core.engine.events import FinishEvent, FinishReason, SampledToken, TextEvent
from exl_core.engine.request import Report, Request
from exl_core.engine.sequence import RequestSequence
from exl_exllamav2.engines import Stops, build_request, ids_of, split_stops
from exl_exllamav2.errors import OldAssertionError, OldValueError
from exl_exllamav2.sampler import fill_top
from exl_exllamav2.sequences import SeqTensor
from exl_exllamav2.settings import Settings, SettingsReader
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

Result = dict[str, Any]

_REASONS = {
    FinishReason.LENGTH: "max_new_tokens",
    FinishReason.TIME: "max_new_tokens",
    FinishReason.CONSTRAINT: "end_filter",
}


class JobSequence:
    """Ids of one sequence of a job. `sequence_ids` grows with the reply."""

    def __init__(self, input_ids: Tensor) -> None:
        self.input_ids = SeqTensor.from_tensor(input_ids.view(1, -1), seq_dim=-1)
        self.running: RequestSequence | None = None

    @property
    def sequence_ids(self) -> SeqTensor:
        if self.running is None:
            return self.input_ids
        return SeqTensor.from_tensor(torch.tensor([self.running.token_ids]), seq_dim=-1)


class ExLlamaV2DynamicJob:
    """A prompt to complete. `enqueue` of a generator starts it."""

    def __init__(
        self,
        input_ids: Tensor | list[Tensor],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        max_skips: int | None = 4,
        gen_settings: Settings | None = None,
        seed: int | None = None,
        stop_conditions: Any = None,
        decode_special_tokens: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        token_healing: bool = False,
        identifier: object = None,
        banned_strings: list[str] | None = None,
        embeddings: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.sequences = [JobSequence(ids) for ids in _rows(input_ids)]
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = min_new_tokens
        self.max_skips = max_skips
        self.gen_settings = gen_settings or Settings()
        self.seed = seed
        self.stops: Stops = split_stops(stop_conditions)
        self.stop_tokens, self.stop_strings = map(set, self.stops)
        self.decode_special_tokens = decode_special_tokens
        self.report = Report(return_probs, return_top_tokens, return_logits)
        self.filters = list(filters or ())
        self.filter_prefer_eos = filter_prefer_eos
        self.token_healing = token_healing
        self.identifier = identifier
        self.banned_strings = banned_strings
        self.embeddings = embeddings
        self.generator: Any = None
        self.serial_number: int | None = None
        self.full_completion = ""
        self.new_tokens = 0
        self.is_finished = False
        self.is_started = False
        self.cached_pages = self.cached_tokens = 0
        self.accepted_draft_tokens = self.rejected_draft_tokens = 0
        self.time_enqueue: float | None = None
        self.time_first_prefill: float | None = None
        self.time_first_token: float | None = None
        self.time_last_token: float | None = None
        self.reader: SettingsReader | None = None
        self.request_id = ""
        self.num_emitted = 0
        self.num_sampled = 0
        self.prefill_done = self.prefill_total = 0

    def __repr__(self) -> str:
        return f"ExLlamaV2DynamicJob #{self.serial_number}"

    @property
    def total_pages(self) -> int:
        running = self.sequences[0].running
        return 0 if running is None else len(running.page_ids)

    @property
    def non_sequential_pages(self) -> int:
        running = self.sequences[0].running
        return 0 if running is None else running.state.num_jumps

    def is_prefill_done(self) -> bool:
        return self.new_tokens > 0

    def check_is_new(self, *, is_queued: bool) -> None:
        """Refuse a job that waits or runs, and one that has run: it holds the text of its reply.

        A job that was cancelled before its first step may be enqueued again.
        """
        if is_queued or self.is_started or self.is_finished:
            raise OldAssertionError(
                "a job is enqueued only once",
                where=repr(self),
                got=f"a job that {'waits or runs' if is_queued else 'has run'}",
                next_step="Make a new ExLlamaV2DynamicJob for each reply.",
            )

    def request(
        self, tokenizer: ExLlamaV2Tokenizer, loras: Any, busy_filters: Sequence[Any]
    ) -> Request:
        """The request for exl's engine."""
        if len(self.sequences) > 2:
            raise OldAssertionError("a job has one sequence, or two for guidance")
        ids = [ids_of(sequence.input_ids.torch()) for sequence in self.sequences]
        if len(ids) == 1 and self.gen_settings.cfg_scale is not None:
            raise OldAssertionError("cfg_scale needs a job of two sequences")
        self.reader = SettingsReader(self.gen_settings, tokenizer, self.seed)
        request = build_request(
            ids[0],
            padded_vocab=tokenizer.config.padded_vocab_size,
            negative_ids=ids[1] if len(ids) == 2 else None,
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            sampler=self.reader.params,
            settings=self.gen_settings,
            stops=self.stops,
            banned_strings=self.banned_strings,
            filters=self.filters,
            busy_filters=busy_filters,
            filter_prefer_eos=self.filter_prefer_eos,
            token_healing=self.token_healing,
            loras=loras,
            embeddings=self.embeddings,
            report=self.report,
            decode_special_tokens=self.decode_special_tokens,
        )
        self.request_id = request.request_id
        return request

    def started(self, sequence: RequestSequence) -> None:
        """Follow the sequence that the engine made."""
        self.sequences[0].running = sequence
        if sequence.negative is not None:
            self.sequences[1].running = sequence.negative

    def result(self, stage: str, **values: Any) -> Result:
        serial = self.serial_number
        found: Result = {"job": self, "stage": stage, "eos": False, "serial": serial, **values}
        if self.identifier is not None:
            found["identifier"] = self.identifier
        return found

    def streamed(self, event: TextEvent, padded_vocab: int) -> Result:
        self.full_completion += event.text
        self.num_emitted += len(event.token_ids)
        found = self.result("streaming")
        found["text"] = event.text
        if event.token_ids:
            found |= self._tokens(event.token_ids, event.tokens, padded_vocab)
        return found

    def finished(
        self, event: FinishEvent, last: Result | None, tokenizer: ExLlamaV2Tokenizer
    ) -> Result:
        """The final result, merged with the last one of the same token, if there is one."""
        self.is_finished = True
        self.new_tokens = event.completion_tokens
        result = self.result("streaming") if last is None else last
        padded_vocab = tokenizer.config.padded_vocab_size
        left = event.token_ids[self.num_emitted :]
        is_token = event.reason is FinishReason.STOP and isinstance(event.stopped_by, int)
        if left and not is_token:
            found = self._tokens(left, event.tokens, padded_vocab)
            for name, value in found.items():
                result[name] = torch.cat([result[name], value], 1) if name in result else value
        if event.held_text or (left and is_token):
            result["held"] = {"text": event.held_text}
            if is_token:
                result["held"] |= self._tokens(left, event.tokens, padded_vocab)
        if event.drafting is not None:
            accepted, drafted = event.drafting.accepted, event.drafting.drafted
            result["accepted_draft_tokens"] = self.accepted_draft_tokens = accepted
            result["rejected_draft_tokens"] = self.rejected_draft_tokens = drafted - accepted
        self.cached_pages, self.cached_tokens = event.cached_pages, event.cached_tokens
        return {**result, "eos": True, **self._ending(event, tokenizer), **_counts(event)}

    def _ending(self, event: FinishEvent, tokenizer: ExLlamaV2Tokenizer) -> Result:
        if event.reason is not FinishReason.STOP:
            return {"eos_reason": _REASONS[event.reason]}
        if isinstance(event.stopped_by, str):
            return {"eos_reason": "stop_string", "eos_triggering_string": event.stopped_by}
        assert event.stopped_by is not None, "a stop has a cause"
        return {
            "eos_reason": "stop_token",
            "eos_triggering_token_id": event.stopped_by,
            "eos_triggering_token_str": tokenizer.exl.token_text(event.stopped_by),
        }

    def _tokens(
        self, token_ids: Sequence[int], tokens: Sequence[SampledToken], padded_vocab: int
    ) -> Result:
        """Token ids [1, n], and the details of the tokens that the job's settings select."""
        if not token_ids:
            return {}
        # For every token of every job: from numpy in a third of the time of torch.tensor.
        found: Result = {"token_ids": torch.from_numpy(np.array([token_ids], dtype=np.int64))}
        return found | self.details(tokens[: len(token_ids)], padded_vocab)

    def details(self, tokens: Sequence[SampledToken], padded_vocab: int) -> Result:
        return token_details(tokens, self.report, padded_vocab, "token_probs", "top_k_")


def _rows(input_ids: Tensor | list[Tensor]) -> list[Tensor]:
    """Ids of each sequence: a tensor [1, n] or [n], or a list of two of them for guidance."""
    listed = input_ids if isinstance(input_ids, list) else [input_ids]
    for ids in listed:
        if not isinstance(ids, Tensor):
            raise OldValueError("input_ids is no tensor", got=type(ids).__name__)
        if ids.dim() not in (1, 2) or (ids.dim() == 2 and len(ids) != 1):
            raise OldAssertionError(
                "input_ids of a job is not one row",
                expected="[1, n], or a list of two such tensors for guidance",
                got=list(ids.shape),
                next_step="Make one job for each prompt of a batch.",
            )
    if not listed or any(ids.numel() == 0 for ids in listed):
        raise OldAssertionError("the prompt of a job is empty")
    return listed


def token_details(
    tokens: Sequence[SampledToken],
    report: Report,
    padded_vocab: int,
    probs_name: str,
    top_prefix: str,
) -> Result:
    """Probabilities [1, n], top tokens [1, n, k] and logits [1, n, padded_vocab] of tokens."""
    found: Result = {}
    if not tokens:
        return found
    if report.probabilities:
        found[probs_name] = torch.tensor([[token.probability or 0.0 for token in tokens]])
    if report.top_tokens:
        tops = [fill_top(token.top, report.top_tokens) for token in tokens]
        found[top_prefix + "tokens"] = torch.tensor([[[i for i, _ in top] for top in tops]])
        found[top_prefix + "probs"] = torch.tensor([[[p for _, p in top] for top in tops]])
    if report.logits:
        rows = torch.full((1, len(tokens), padded_vocab), -65504.0)
        for row, token in enumerate(tokens):
            if token.logits is not None:
                rows[0, row, : len(token.logits)] = token.logits
        found["logits"] = rows
    return found


def _counts(event: FinishEvent) -> Result:
    return {
        "full_completion": event.text,
        "new_tokens": event.completion_tokens,
        "prompt_tokens": event.prompt_tokens,
        "time_enqueued": event.queued_s,
        "time_prefill": event.prefill_s,
        "time_generate": event.decode_s,
        "cached_pages": event.cached_pages,
        "cached_tokens": event.cached_tokens,
    }
