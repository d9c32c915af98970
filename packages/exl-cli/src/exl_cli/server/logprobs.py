"""Log probabilities in OpenAI's two formats: that of chat, and the legacy one of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from exl_core.engine.events import FinishEvent, SampledToken
from exl_core.tokenizer.base import StreamDecoder, Tokenizer


def shown(tokenizer: Tokenizer, token_id: int) -> str:
    """Text of a token. A token that is not valid UTF-8 is shown as `bytes:\\x..`, as by OpenAI."""
    data = tokenizer.token_bytes(token_id, skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entry(tokenizer: Tokenizer, token: SampledToken, num_top: int) -> dict[str, object]:
    """An element of `logprobs.content`."""

    def as_json(token_id: int, log_prob: float | None) -> dict[str, object]:
        data = tokenizer.token_bytes(token_id, skip_special=False)
        return {"token": shown(tokenizer, token_id), "logprob": log_prob, "bytes": list(data)}

    return {
        **as_json(token.token_id, token.log_prob),
        "top_logprobs": [as_json(*one) for one in token.top_log_probs[:num_top]],
    }


def tokens_of_text(tokenizer: Tokenizer, end: FinishEvent) -> tuple[SampledToken, ...]:
    """Tokens of the final event that belong to the text, without a stop token and without tokens
    that a stop string cut off."""
    tokens = list(end.tokens)
    if isinstance(end.stopped_by, int):
        tokens = tokens[:-1]
    elif isinstance(end.stopped_by, str):
        cut = len(end.held_text.encode())
        while tokens and cut > 0:
            size = len(tokenizer.token_bytes(tokens[-1].token_id))
            if size > cut:
                break  # the token contains the end of the text and the start of the stop string
            cut -= size
            tokens.pop()
    return tuple(tokens)


@dataclass(slots=True)
class LegacyLogprobs:
    """`tokens`, `token_logprobs`, `top_logprobs`, `text_offset` of one choice of a completion.

    A token that ended the reply has an entry too: clients that score a prompt expect one entry
    after it. The first token of an echoed prompt has no prediction, so its entry is null.
    """

    tokenizer: Tokenizer
    num_top: int
    prompt_ids: Sequence[int]
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    _echo: StreamDecoder = field(init=False)
    _reply: StreamDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._echo = self.tokenizer.stream_decoder(skip_special=False)
        self._reply = self.tokenizer.stream_decoder()
        # The prompt may end within a character that the reply completes. Its last tokens suffice.
        self._reply.feed_all(self.prompt_ids[-16:])

    def begin_echo(self, *, is_hidden: bool) -> None:
        """Add the first token of the prompt. A hidden BOS has no text and does not advance the
        offset."""
        first = self.prompt_ids[0]
        self._put(first, "" if is_hidden else self._echo.feed(first))
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)

    def echo(self, tokens: Sequence[SampledToken]) -> None:
        """Add tokens of the prompt."""
        for token in tokens:
            self._add(token, self._echo.feed(token.token_id))

    def add(self, tokens: Sequence[SampledToken]) -> None:
        """Add tokens of the reply."""
        for token in tokens:
            self._add(token, self._reply.feed(token.token_id))

    def take(self) -> dict[str, object]:
        """Entries added since the previous call."""
        taken: dict[str, object] = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken

    def _add(self, token: SampledToken, text: str) -> None:
        assert token.log_prob is not None, "the request asked for it"
        self._put(token.token_id, text)
        self.token_logprobs.append(token.log_prob)
        top: dict[str, float] = {}
        reported = (*token.top_log_probs[: self.num_top], (token.token_id, token.log_prob))
        for token_id, value in reported:
            # Two tokens may have the same text. The more probable one, which comes first, is kept.
            top.setdefault(shown(self.tokenizer, token_id), value)
        self.top_logprobs.append(top)

    def _put(self, token_id: int, text: str) -> None:
        self.tokens.append(shown(self.tokenizer, token_id))
        self.text_offset.append(self.offset)
        self.offset += len(text)
