"""Answer bodies of POST /v1/chat/completions: messages with reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterator

from lp_runtime.chat.answer import message_of, parts_of
from lp_runtime.request.output import Logprob
from lp_runtime.server.openai.responses import Choice, ChoicesForm


class ChatForm(ChoicesForm):
    """The form of answers to POST /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, choices: list[Choice]) -> Iterator[str]:
        for choice in choices:
            delta = {"role": "assistant", "content": ""}
            yield self.chunk({"index": choice.index, "delta": delta, "finish_reason": None})

    def choice(self, choice: Choice) -> dict[str, object]:
        return self._body(choice, "message", message_of(choice.pieces(choice.text)), slice(None))

    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        return self._body(choice, "delta", parts_of(choice.pieces(text)), new)

    def _body(self, choice: Choice, name: str, parts: dict[str, object], new: slice) -> dict[str, object]:
        """Return a choice whose text has been parsed to `parts`, which are its message or delta."""
        has_calls = choice.parser is not None and choice.parser.num_calls
        reason = "tool_calls" if has_calls and choice.reason == "stop" else choice.reason
        return {"index": choice.index, name: parts, "logprobs": self._logprobs(choice, new), "finish_reason": reason}

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
        if choice.job.request.skip_special_tokens and token in self.texts.special_ids:
            return b""
        return self.texts.bytes_at_start(token) if is_first else self.texts.bytes_of(token)

    def _entry(self, token: int, value: float) -> dict[str, object]:
        return {"token": self.texts.label(token), "logprob": value, "bytes": list(self.texts.bytes_of(token))}
