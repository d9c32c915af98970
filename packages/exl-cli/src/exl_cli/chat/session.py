"""Chat loop: read a message, answer it, store both.

One engine serves all turns, so that later prompts reuse its cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import count

from exl_cli.chat import commands
from exl_cli.chat.commands import Outcome
from exl_cli.chat.conversation import Conversation
from exl_cli.chat.prompt_style import PromptStyle
from exl_cli.chat.reply import Reply, ReplyWriter
from exl_cli.chat.screen import ReplyScreen
from exl_cli.chat.settings import ChatSettings
from exl_cli.chat.terminal import Terminal
from exl_cli.interrupt import Interrupt
from exl_cli.load import explaining_long_prompts
from exl_cli.reply import stream_reply
from exl_core.engine.events import FinishReason
from exl_core.errors import ExlError, RequestError
from exl_core.files import PROMPT_LIMIT_BYTES, decode_text
from exl_core.session.runtime import Runtime
from exl_core.tokenizer.base import Tokenizer


class ChatSession:
    """A chat with one model. `terminal` None: prompts come from stdin, one per line."""

    def __init__(
        self,
        runtime: Runtime,
        style: PromptStyle,
        settings: ChatSettings,
        *,
        system: str | None,
        stop: Sequence[str],
        terminal: Terminal | None,
        is_quiet: bool = False,
    ) -> None:
        self.style = style
        self.settings = settings
        self.conversation = Conversation(system)
        self._runtime = runtime
        self._stop = stop
        self._terminal = terminal
        self._is_quiet = is_quiet
        self._lines = _stdin_lines()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._runtime.loaded.tokenizer

    @property
    def model_name(self) -> str:
        return self._runtime.name

    def run(self) -> int:
        """Run until the input ends. Returns the number of piped prompts that got no answer."""
        unanswered = 0
        outcome = Outcome()
        while not outcome.leaves:
            try:
                text = self._read(outcome.draft)
            except EOFError:
                break
            is_edit, outcome = outcome.is_edit, Outcome()
            try:
                outcome = self._handle(text, is_edit=is_edit)
                if outcome.message is not None:
                    self._answer(outcome.message)
            except ExlError as error:
                outcome = Outcome(draft=outcome.message or "")
                print(f"exl: error: {error}", file=sys.stderr, flush=True)
                unanswered += self._terminal is None
        return unanswered

    def _read(self, draft: str) -> str:
        """Read one message or command, which may be empty. Raises EOFError at the end of input."""
        if self._terminal is None:
            text = next(self._lines, None)
            if text is None:
                raise EOFError
            return text.strip()
        try:
            return self._terminal.ask(draft)
        except KeyboardInterrupt:
            self._terminal.note("Ctrl-D leaves.")
            return ""

    def _handle(self, text: str, *, is_edit: bool) -> Outcome:
        """Run a slash command; any other text becomes the outcome's message."""
        command = commands.parse(text, is_piped=self._terminal is None)
        if command is None:
            if text and is_edit:
                self.conversation.take_back()
            return Outcome(message=text or None)
        name, argument = command
        outcome = commands.COMMANDS[name].run(self, argument)
        if outcome.note is not None:
            self._note(outcome.note)
        return outcome

    def _answer(self, message: str) -> None:
        self.conversation.say(message)
        dropped = self.conversation.dropped_turns
        try:
            reply = self._reply()
        except ExlError:
            self.conversation.take_back()
            raise
        if reply.text or reply.reasoning:
            self.conversation.answer(reply.text, reply.reasoning)
        else:
            self.conversation.take_back()
        self._print_notes(reply, self.conversation.dropped_turns - dropped)
        if self.settings.chat.amnesia:
            self.conversation.clear()
        if reply.was_stopped and self._terminal is None:
            raise KeyboardInterrupt

    def _reply(self) -> Reply:
        """Stream one reply.

        If the context fills up during the reply, older turns are dropped and generation continues
        with a further request.
        """
        tokenizer = self.tokenizer
        limit, replying = self.settings.max_tokens, self.settings.replying
        params = replying.sampler(self.settings.params(tokenizer), tokenizer)
        prompt_ids = self._fit(limit)
        screen = ReplyScreen(shows_reasoning=self.settings.chat.reasoning, is_quiet=self._is_quiet)
        writer = ReplyWriter(screen, self.style.splitter(self.conversation.messages))
        reply = writer.reply
        healed_id: int | None = None
        with writer, Interrupt() as interrupt:
            while True:
                remaining = None if limit is None else limit - len(reply.token_ids)
                with explaining_long_prompts(self._runtime):
                    request = self._runtime.request(
                        [*prompt_ids, *reply.token_ids],
                        max_tokens=remaining,
                        sampler=params,
                        stop=self._stop,
                        negative_ids=self._negative_ids(reply.token_ids),
                        **replying.fields(len(reply.token_ids)),
                    )
                request = self.style.adapt(request)
                part = stream_reply(
                    self._runtime.engine, request, interrupt, writer.write, writer.note_progress
                )
                reply.add(part)
                healed_id = part.healed_id if healed_id is None else healed_id
                is_full = part.reason is FinishReason.LENGTH and reply.has_room(limit)
                reply.was_stopped = interrupt.is_set
                if not is_full or interrupt.is_set:
                    return reply
                writer.drop_half_character(tokenizer)
                shorter = self._make_room(len(reply.token_ids), limit)
                if shorter is None:
                    return reply
                prompt_ids = shorter if healed_id is None else [*shorter[:-1], healed_id]

    def _negative_ids(self, reply_ids: Sequence[int]) -> list[int] | None:
        """The conversation with the negative prompt as its system prompt, and the reply so far."""
        negative = self.settings.replying.negative_prompt
        if negative is None:
            return None
        turns = [turn for turn in self.conversation.messages if turn["role"] != "system"]
        return [*self.style.encode([{"role": "system", "content": negative}, *turns]), *reply_ids]

    def _fit(self, limit: int | None) -> list[int]:
        ctx = self._runtime.ctx_size
        return self.conversation.fit(self.style.encode, ctx, min(limit or ctx, ctx // 4))

    def _make_room(self, reply_tokens: int, limit: int | None) -> list[int] | None:
        """Shorten the prompt for a reply that has filled the context.

        Returns the prompt ids with fewer turns; None if no turn can be dropped.
        """
        ctx = self._runtime.ctx_size
        dropped = self.conversation.dropped_turns
        reserve = min(ctx if limit is None else limit - reply_tokens, ctx // 4)
        try:
            ids = self.conversation.fit(self.style.encode, ctx - reply_tokens, reserve)
        except RequestError:  # the last message and the reply fill the context by themselves
            return None
        return ids if self.conversation.dropped_turns > dropped else None

    def _print_notes(self, reply: Reply, dropped: int) -> None:
        if dropped:
            self._note(f"The context was full: {dropped} of the oldest turns were dropped from it.")
        if reply.was_stopped:
            self._note("Stopped.")
        elif reply.is_cut_off:
            self._note("Cut off: the token limit is reached (-n, -c).")
        if reply.reasoning and not reply.text and self._terminal is None:
            print(
                "exl: note: the reply ended inside its reasoning, so there is no answer",
                file=sys.stderr,
            )
        if self.settings.chat.stats and self._terminal is not None:
            self._terminal.note(reply.statistics())
        elif self.settings.chat.stats and not self._is_quiet:
            print(f"exl: {reply.statistics()}", file=sys.stderr, flush=True)

    def _note(self, text: str) -> None:
        if self._terminal is not None:
            self._terminal.note(text)


def _stdin_lines() -> Iterator[str]:
    if sys.stdin is None:
        return
    for number in count(1):
        line = sys.stdin.buffer.readline(PROMPT_LIMIT_BYTES + 1)
        if not line:
            return
        where = f"stdin, line {number}"
        if len(line) > PROMPT_LIMIT_BYTES:
            raise RequestError(
                "the line is longer than any context",
                where=where,
                expected=f"at most {PROMPT_LIMIT_BYTES} bytes",
            )
        yield decode_text(line, where)
