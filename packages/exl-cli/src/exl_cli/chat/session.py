"""Chat loop: read a message, answer it, store both.

One engine serves all turns, so that later prompts reuse its cache.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from exl_cli.chat import commands
from exl_cli.chat.commands import Outcome
from exl_cli.chat.conversation import Conversation
from exl_cli.chat.prompt_style import PromptStyle
from exl_cli.chat.reply import Reply, ReplyWriter
from exl_cli.chat.screen import ReplyScreen
from exl_cli.chat.settings import ChatSettings
from exl_cli.chat.terminal import Terminal
from exl_cli.interrupt import Interrupt
from exl_cli.keyboard import keys_are_held
from exl_cli.load import explaining_long_prompts, long_prompt_advice
from exl_cli.options import pick_model
from exl_cli.output import write_error
from exl_cli.reply import stream_reply
from exl_core.engine.events import FinishReason
from exl_core.errors import ExlError, RequestError, TemplateError, printable
from exl_core.files import PROMPT_LIMIT_BYTES, decode_text
from exl_core.session.open import open_model as open_files
from exl_core.session.runtime import Runtime
from exl_core.tokenizer.base import Tokenizer

GREETING = "{}, context of {} tokens. /help lists the commands, Ctrl-D leaves."
OpenedModel = tuple[Runtime, PromptStyle, str | None]
"""A model at work, its prompt style, and the system prompt that a chat with it begins with."""


class ChatSession:
    """A chat with one model.

    open_model  opens a model by its name or path; for None, the default model
    spec        the first model, as the user named it
    terminal    None: prompts come from stdin, one per line
    """

    def __init__(
        self,
        open_model: Callable[[str | None], OpenedModel],
        spec: str | None,
        settings: ChatSettings,
        *,
        stop: Sequence[str],
        terminal: Terminal | None,
        is_quiet: bool = False,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self._open_model = open_model
        self._runtime, self.style, system = open_model(spec)
        self.conversation = Conversation(system)
        self._first_system = system
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

    @property
    def ctx_size(self) -> int:
        return self._runtime.ctx_size

    @property
    def has_default_system(self) -> bool:
        """Whether the model's template chooses the system prompt.

        A named format inserts none by itself: its default is the conversation's system prompt. An
        empty system prompt suppresses the default of a template.
        """
        return self.conversation.system is None and self.style.format_name is None

    def greet(self) -> None:
        """Names the model on a terminal."""
        if not self._is_quiet:
            self._note(GREETING.format(printable(self.model_name), self.ctx_size))

    def description(self) -> str:
        """The model, where it is, and how prompts for it are made."""
        loaded = self._runtime.loaded
        how = "the model's chat template"
        if self.style.format_name is not None:
            how = f"the format {self.style.format_name}"
        no_system = "the model's default" if self.has_default_system else "none"
        rows = {
            "model": printable(loaded.name),
            "path": printable(str(loaded.path)),
            "context": f"{self.ctx_size} tokens",
            "prompts by": how,
            "system prompt": self.conversation.system or no_system,
        }
        return "\n".join(f"{name:<20}{text}" for name, text in rows.items())

    def preset(self) -> dict[str, Any]:
        """Model, system prompt and changed settings, by the names of options."""
        values: dict[str, Any] = {}
        if self.spec is not None:
            is_path = Path(self.spec).exists()
            values["model"] = str(Path(self.spec).resolve()) if is_path else self.spec
        if self.conversation.system is not None:
            values["system"] = self.conversation.system
        if self.style.format_name is not None:
            values["format"] = self.style.format_name
        return values | self.settings.changed()

    def use_model(self, spec: str) -> str:
        """Replaces the model and keeps the conversation. Returns what changed.

        The weights of the old model are freed before those of the new one are read. Where the new
        one cannot be opened, the old one is loaded again, and the error is raised.
        """
        path = pick_model(spec, None)
        open_files(path)  # reports everything that headers show before the old model goes
        old = str(self._runtime.loaded.path)
        has_first_system = self.conversation.system == self._first_system
        del self._runtime
        gc.collect()
        try:
            opened = self._open_model(path)
        except BaseException:
            self._runtime, self.style, self._first_system = self._open_model(old)
            raise
        self._runtime, self.style, self._first_system = opened
        self.spec = spec
        if has_first_system:
            self.conversation.system = self._first_system
        note = f"The model is now {printable(self.model_name)}, context of {self.ctx_size} tokens."
        try:
            self.style.usable(self.conversation.system or "")
        except TemplateError:
            if self.conversation.system:
                note += " Its template has no system prompt, so there is none now."
            self.conversation.system = None
        return note

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
                write_error(str(error))
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
        shown = self.settings.chat
        screen = ReplyScreen(
            shows_reasoning=shown.reasoning, is_quiet=self._is_quiet, wraps=shown.wrap
        )
        writer = ReplyWriter(screen, self.style.splitter(self.conversation.messages))
        reply = writer.reply
        healed_id: int | None = None
        with writer, Interrupt() as interrupt, keys_are_held():
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
        reserve, advice = min(limit or ctx, ctx // 4), long_prompt_advice(self._runtime)
        return self.conversation.fit(self.style.encode, ctx, reserve, advice=advice)

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
