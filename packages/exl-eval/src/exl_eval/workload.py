"""Workload of the speed measurements: prefill and decode of several sequences.

Calls the engine's `Runner` and reads back the likeliest token of each row, without scheduling and
without text. All sequences have the same prompt. Each decodes from another token on, so that the
rows of a step choose different experts, and has its own pages in a cache of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from exl_core.cache.format import KVFormat, pages_for
from exl_core.cache.page_pool import PageCopy
from exl_core.cache.state import StateCopy
from exl_core.engine.engine import PREFILL_CHUNK
from exl_core.engine.logits import PassLogits
from exl_core.model.runner import NextPart, Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.ops.sampling import NextStep, PartLogits, RowSettings

PASS_ROWS = PREFILL_CHUNK["cpu"]
"""Prompt tokens per pass, equal to the engine's limit on a CPU."""


def fixed_tokens(count: int, vocab_size: int) -> tuple[int, ...]:
    """Prompt of every sequence. The comparison with llama.cpp uses the same."""
    return tuple((100 + i % 20000) % vocab_size for i in range(count))


def prefill_passes(
    prompt: Sequence[int], pages: Sequence[tuple[int, ...]], pass_rows: int = PASS_ROWS
) -> Iterator[list[Segment]]:
    """Splits one prompt for each entry of `pages` into passes of at most `pass_rows` tokens. Its
    index is the slot of its recurrent state, if the model has one."""
    current: list[Segment] = []
    free = pass_rows
    for slot, page_ids in enumerate(pages):
        start = 0
        while start < len(prompt):
            end = min(start + free, len(prompt))
            logit_rows = LogitRows.LAST if end == len(prompt) else LogitRows.NONE
            chunk, held = tuple(prompt[start:end]), page_ids[: pages_for(end)]
            current.append(Segment(chunk, start, held, logit_rows, state_slot=slot))
            free -= end - start
            start = end
            if free == 0:
                yield current
                current, free = [], pass_rows
    if current:
        yield current


class Workload:
    """`batch` sequences of up to `tokens` tokens each."""

    def __init__(
        self,
        model: Transformer,
        kv_format: KVFormat,
        *,
        tokens: int,
        batch: int,
        pass_rows: int = PASS_ROWS,
    ) -> None:
        config, each = model.config, pages_for(tokens)
        self.batch = batch
        self.store = store_for(model, kv_format, batch * each, num_states=batch)
        self.pages = [tuple(range(owner * each, (owner + 1) * each)) for owner in range(batch)]
        self._runner = Runner(model, self.store)
        self._ops = model.ops
        self._settings = [RowSettings(row, top_k=1) for row in range(batch)]
        self._vocab_size = config.vocab_size
        self._tokens = fixed_tokens(tokens, config.vocab_size)
        self._pass_rows = pass_rows

    def prefill(self, prompt_tokens: int) -> None:
        """Computes the prompt of every sequence and reads back the token that follows."""
        self._prefill(prompt_tokens, self.pages)

    def fill(self, depth: int) -> list[int]:
        """Fills the cache with `depth` tokens of each sequence. Returns each sequence's next token,
        for `step`; no two are equal unless there are more sequences than tokens.

        Computes one sequence and copies its pages for the others.
        """
        self._prefill(depth, self.pages[:1])
        copies = []
        for page_ids in self.pages[1:]:
            held = pages_for(depth)
            for source, target in zip(self.pages[0][:held], page_ids[:held], strict=True):
                copies.append(PageCopy(source, target, self.store.page_size))
        self.store.copy_pages(copies)
        if self.store.states is not None:
            self.store.states.copy([StateCopy(0, slot) for slot in range(1, self.batch)])
        first, vocab_size = self._tokens[depth], self._vocab_size
        return [(first + sequence) % vocab_size for sequence in range(self.batch)]

    def step(self, newest: Sequence[int], past_len: int) -> list[int]:
        """Decodes one token of each sequence and reads back the likeliest next tokens."""
        return self._next(self.decode_segments(newest, past_len))

    def decode(self, newest: Sequence[int], past_len: int, steps: int) -> list[int]:
        """Runs `steps` decode steps. On a GPU, as in the engine, each is launched before the host
        has read the previous one's tokens (async steps)."""
        newest = list(newest)
        logits = self._computed(newest, past_len)
        for place in range(past_len + 1, past_len + steps):
            next_pass = self._runner.next_pass(self.decode_segments(newest, place))
            if next_pass is None:
                newest = self._likeliest(logits)
                logits = self._computed(newest, place)
            else:
                begun: list[PartLogits] = []
                newest = self._draw(logits, next_pass.step(partial(self._begin, begun)))
                logits = PassLogits(next_pass.logits_of(begun), parts=begun)
        return self._likeliest(logits)

    def check(self, rows: int, past_len: int) -> list[int]:
        """Verifies a draft: runs one token of the first sequence and `rows - 1` draft tokens, and
        reads back the likeliest token after each."""
        held = self.pages[0][: pages_for(past_len + rows)]
        drafted = self._tokens[past_len : past_len + rows]
        return self._next([Segment(drafted, past_len, held, LogitRows.ALL, state_slot=0)])

    def decode_segments(self, newest: Sequence[int], past_len: int) -> list[Segment]:
        held = pages_for(past_len + 1)
        return [
            Segment((token_id,), past_len, page_ids[:held], LogitRows.LAST, state_slot=slot)
            for slot, (token_id, page_ids) in enumerate(zip(newest, self.pages, strict=True))
        ]

    def prompt_segments(self, rows: int) -> list[Segment]:
        """One pass over the first `rows` tokens of the first sequence."""
        held = self.pages[0][: pages_for(rows)]
        return [Segment(self._tokens[:rows], 0, held, LogitRows.LAST, state_slot=0)]

    def _prefill(self, prompt_tokens: int, pages: Sequence[tuple[int, ...]]) -> None:
        for segments in prefill_passes(self._tokens[:prompt_tokens], pages, self._pass_rows):
            newest = self._runner.run(segments).argmax(-1)
        newest.tolist()  # waits until the device has finished the last pass

    def _computed(self, newest: Sequence[int], past_len: int) -> PassLogits:
        return PassLogits(self._runner.run(self.decode_segments(newest, past_len)))

    def _begin(self, begun: list[PartLogits], part: NextPart) -> None:
        begun.append(self._runner.run_on(part))

    def _draw(self, logits: PassLogits, next_step: NextStep) -> list[int]:
        """Samples the likeliest tokens, with which the next pass begins."""
        sampled = logits.sample(self._ops, self._settings, self._vocab_size, next_step)
        return [one.token_id for one in sampled]

    def _next(self, segments: Sequence[Segment]) -> list[int]:
        newest: list[int] = self._runner.run(segments).argmax(-1).tolist()
        return newest

    def _likeliest(self, logits: PassLogits) -> list[int]:
        newest: list[int] = logits.block(0, self.batch).argmax(-1).tolist()
        return newest
