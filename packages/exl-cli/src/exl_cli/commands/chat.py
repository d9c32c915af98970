"""`exl chat`: a conversation in the terminal, or over a pipe, one prompt a line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from exl_cli import engine_options, options, output
from exl_cli.conversation import Conversation
from exl_cli.interrupt import Interrupt, exits_at_once
from exl_core.errors import ExlError, printable
from exl_core.files import decode_text

if TYPE_CHECKING:
    from exl_cli.load import Runtime
    from exl_cli.terminal import Terminal
    from exl_core.engine.events import FinishEvent
    from exl_core.sampling.params import SamplerParams

EXAMPLES = (
    ("exl chat", "talk to the default model"),
    ('exl chat model.gguf --system "Answer in one sentence."', "another model, and a manner"),
    ("printf 'Hi!\\nAnd in French?\\n' | exl chat --temp 0", "a prompt a line, replies to stdout"),
)
HELP = """/help   this list
/clear  forget the conversation; the system prompt stays
/stats  show or hide the speed after each reply
/bye    leave (so do /exit and Ctrl-D)
Ctrl-C stops a reply, and the conversation goes on."""
LEAVE = ("/bye", "/exit")


def chat(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = 1024,
    stop: options.Stop = None,
    quiet: options.Quiet = False,
    temp: options.Temperature = options.DEFAULT_TEMPERATURE,
    top_k: options.TopK = options.DEFAULT_TOP_K,
    top_p: options.TopP = options.DEFAULT_TOP_P,
    min_p: options.MinP = options.DEFAULT_MIN_P,
    repeat_penalty: options.RepeatPenalty = options.DEFAULT_REPEAT_PENALTY,
    seed: options.Seed = None,
    ctx_size: options.CtxSize = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    exact: options.Exact = False,
    cache_type: options.CacheType = "fp16",
    lora: engine_options.Lora = None,
    draft_model: engine_options.DraftModel = None,
    draft_tokens: engine_options.DraftTokens = None,
    ngram: engine_options.Ngram = False,
) -> None:
    """Talk to a model, with its own chat template.

    On a terminal Ctrl-C stops the reply, Ctrl-D leaves, and /help lists the commands. Over a pipe
    each line is a prompt, and stdout gets the replies and nothing else. When the context is full
    the oldest turns are dropped; the system prompt stays.
    """
    spec = options.pick_model(model, model_option)
    sampler = options.sampler_params(
        temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed
    )
    limit = options.token_limit(max_tokens)
    choices = engine_options.choices_of(cache_type, lora, draft_model, draft_tokens, ngram=ngram)
    with exits_at_once():
        from exl_cli.load import open_runtime
        from exl_cli.terminal import Terminal
    runtime = open_runtime(spec, choices, ctx_size, device, threads, is_quiet=quiet, exact=exact)
    runtime.require_template()
    terminal = Terminal() if Terminal.is_there() else None
    if terminal is not None and not quiet:
        terminal.note(
            f"{printable(runtime.name)}, context of {runtime.ctx_size} tokens. "
            "/help lists the commands, Ctrl-D leaves."
        )
    session = ChatSession(
        runtime,
        sampler=sampler,
        max_tokens=limit,
        stop=stop or (),
        system=system,
        terminal=terminal,
    )
    unanswered = session.run()
    if unanswered:
        raise ExlError(f"{unanswered} of the prompts could not be answered; see above")


class ChatSession:
    """Read, answer, remember. One engine serves all turns, so that its prompt cache works."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        sampler: SamplerParams,
        max_tokens: int | None,
        stop: Sequence[str],
        system: str | None,
        terminal: Terminal | None,
    ) -> None:
        self._runtime = runtime
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._stop = stop
        self._conversation = Conversation(system)
        self._terminal = terminal
        self._shows_stats = False

    def run(self) -> int:
        """Until the input ends. The number of prompts over a pipe that got no answer."""
        unanswered = 0
        for line in _typed(self._terminal) if self._terminal is not None else _piped():
            text = line.strip()
            if text in LEAVE:
                break
            if not text or self._obey(text):
                continue
            self._conversation.say(text)
            try:
                self._answer()
            except ExlError as error:
                self._conversation.take_back()
                print(f"exl: error: {error}", file=sys.stderr, flush=True)
                unanswered += self._terminal is None
        return unanswered

    def _obey(self, text: str) -> bool:
        """Carry out a slash command. Any other text is for the model, slash or not."""
        if text == "/clear":
            self._conversation.clear()
        elif text == "/stats":
            self._shows_stats = not self._shows_stats
        elif text != "/help":
            return False
        if self._terminal is not None:
            notes = {
                "/clear": "The conversation is forgotten.",
                "/stats": f"Speed is {'shown' if self._shows_stats else 'hidden'}.",
                "/help": HELP,
            }
            self._terminal.note(notes[text])
        return True

    def _answer(self) -> None:
        token_ids = self._fit()
        request = self._runtime.request(token_ids, self._max_tokens, self._sampler, self._stop)
        from exl_cli.reply import stream_reply

        with Interrupt() as interrupt:
            reply = stream_reply(self._runtime.engine, request, interrupt, output.write_text)
        output.write_text("\n")
        if interrupt.is_set and self._terminal is None:
            raise KeyboardInterrupt
        if reply.text:
            self._conversation.answer(reply.text)
        else:
            self._conversation.take_back()
        self._comment(reply, was_stopped=interrupt.is_set)

    def _fit(self) -> list[int]:
        ctx = self._runtime.ctx_size
        reserve = min(self._max_tokens or ctx, ctx // 4)
        dropped = self._conversation.dropped_turns
        token_ids = self._conversation.fit(self._runtime.encode_chat, ctx, reserve)
        dropped = self._conversation.dropped_turns - dropped
        if dropped and self._terminal is not None:
            self._terminal.note(f"The context is full: {dropped} of the oldest turns were dropped.")
        return token_ids

    def _comment(self, reply: FinishEvent, *, was_stopped: bool) -> None:
        if self._terminal is None:
            return
        if was_stopped:
            self._terminal.note("Stopped.")
        elif reply.reason.value == "length":
            self._terminal.note("Cut off: the limit of tokens is reached (-n, -c).")
        if self._shows_stats:
            from exl_cli.render import print_speed

            print_speed(reply, None)


def _typed(terminal: Terminal) -> Iterator[str]:
    while True:
        try:
            yield terminal.ask()
        except KeyboardInterrupt:
            terminal.note("Ctrl-D leaves.")
        except EOFError:
            return


def _piped() -> Iterator[str]:
    if sys.stdin is None:
        return
    for number, line in enumerate(sys.stdin.buffer, start=1):
        yield decode_text(line, f"stdin, line {number}")
