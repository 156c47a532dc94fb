"""Answer bodies of POST /v1/chat/completions: messages with reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterator

from lp_runtime.chat.answer import message_of, parts_of
from lp_runtime.request.output import Logprob
from lp_runtime.server.openai.responses import Choice, ChoicesForm
from lp_runtime.text.token_text import TokenTexts


class ChatForm(ChoicesForm):
    """The form of answers to POST /v1/chat/completions.

    Args:
        max_calls: calls that an answer shows at most; None for no limit.
    """

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        num_top: int | None,
        max_calls: int | None = None,
    ):
        super().__init__(model, texts, num_top)
        self._max_calls = max_calls

    def opening(self, choices: list[Choice]) -> Iterator[str]:
        for choice in choices:
            yield self.chunk(
                {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            )

    def choice(self, choice: Choice) -> dict[str, object]:
        message = message_of(choice.pieces(choice.text), self._max_calls)
        logprobs = self._logprobs(choice, slice(None))
        reason = self._reason(choice)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        parts = parts_of(choice.pieces(text), self._max_calls)
        logprobs = self._logprobs(choice, new)
        return {"index": choice.index, "delta": parts, "logprobs": logprobs, "finish_reason": self._reason(choice)}

    @staticmethod
    def _reason(choice: Choice) -> str | None:
        """Return the finish_reason of a choice whose text has been parsed."""
        has_calls = choice.parser is not None and choice.parser.num_calls
        return "tool_calls" if has_calls and choice.reason == "stop" else choice.reason

    def _logprobs(self, choice: Choice, new: slice) -> dict[str, object] | None:
        if self.num_top is None:
            return None
        content = []
        tokens = zip(choice.tokens[new], choice.token_texts[new], choice.logprobs[new], strict=True)
        for place, (token, text, value) in enumerate(tokens, start=new.start or 0):
            entry = {"token": text, "logprob": float(value), "bytes": list(self._bytes(choice, token, place == 0))}
            top = value.top if isinstance(value, Logprob) else ()
            entries = [entry if other == token else self._entry(other, each) for other, each in top]
            content.append({**entry, "top_logprobs": entries})
        return {"content": content}

    def _bytes(self, choice: Choice, token: int, is_first: bool) -> bytes:
        """Return the bytes that a token of the answer has added to its text."""
        is_hidden = choice.job.request.skip_special_tokens and token in self.texts.special_ids
        if is_hidden:
            return b""
        return self.texts.bytes_at_start(token) if is_first else self.texts.bytes_of(token)

    def _entry(self, token: int, value: float) -> dict[str, object]:
        return {"token": self.texts.label(token), "logprob": value, "bytes": list(self.texts.bytes_of(token))}
