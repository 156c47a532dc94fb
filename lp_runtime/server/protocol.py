"""What clients send, in the terms of the OpenAI API, and what it means for a request here.

Unknown fields are refused by name: what a client asks for is done, or it is told that it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.engine.request_builder import RequestOptions
from lp_runtime.errors import RequestError

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_COLUMNS, MAX_NGRAM, MAX_BUDGET = 256, 32, 4096  # that a client may ask for: nobody else is to pay for more
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """Of a streamed answer."""

    include_usage: bool = False


class Lookahead(_Body):
    """How this request is drafted; the text is the same with any."""

    W: int | None = Field(default=None, le=MAX_COLUMNS)
    N: int | None = Field(default=None, le=MAX_NGRAM)
    G: int | None = Field(default=None, le=MAX_COLUMNS)
    drafter: str | None = None
    budget: int | None = Field(default=None, le=MAX_BUDGET)

    def resolve(self) -> LookaheadConfig:
        return LookaheadConfig(**self.model_dump(exclude_none=True))


class Common(_Body):
    """What completions and chats have in common; beyond OpenAI's: top_k, min_p, repetition_penalty, ignore_eos,
    max_time, lookahead, gpus and trace. What is not given is as the model's own defaults say."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    max_time: float | None = None
    lookahead: Lookahead | None = None
    gpus: int | None = None
    trace: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """In OpenAI's API a field that is null is not given."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    def stops(self) -> list[str] | None:
        """The stop strings that are given.

        Raises:
            RequestError: if there are too many, or one is no Unicode.
        """
        if self.stop is None:
            return None
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop: {len(stops)} strings are given; must be at most {MAX_STOPS}")
        for stop in stops:
            if any("\ud800" <= character <= "\udfff" for character in stop):
                raise RequestError(f"stop={stop!r}: is not valid Unicode")
        return stops

    def options(self, sampling: SamplingConfig) -> RequestOptions:
        """A request's options.

        Args:
            sampling: the runtime's own, which what is given here overrides.

        Raises:
            ConfigError, RequestError: names what is out of range, or is not done here.
        """
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise RequestError(f"{name}={getattr(self, name)}: must be 0; repetition_penalty is there instead")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only with stream=true")
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        replace(sampling, **given | {"temperature": None})  # its checks
        if self.temperature == 0:  # clients send their defaults along, which greedy decoding has no use for
            given = {name: given[name] for name in ("temperature", "repetition_penalty") if name in given}
            warpers = dict.fromkeys(("top_k", "top_p", "min_p", "typical_p", "seed"))
            given = warpers | given
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        options = RequestOptions(
            eos=not self.ignore_eos, sampling=replace(sampling, **given), stop=self.stops(), max_time=self.max_time
        )
        if self.trace:
            if not self.stream:
                raise RequestError("trace: only with stream=true")
            options["trace"] = True
        if self.lookahead is not None:
            options["lookahead"] = self.lookahead.resolve()
        return options


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise RequestError(f"logit_bias of {text!r}: keys must be token ids")
    return int(text)


class Completion(Common):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=1)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one or several.

        Raises:
            RequestError: if there is none, or something is asked for that is not done here.
        """
        if self.echo or self.suffix is not None or self.best_of not in (None, self.n):
            raise RequestError("echo, suffix and best_of: not supported")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt: is empty")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise RequestError(f"prompt: {len(self.prompt)} prompts x n={self.n}: must be at most {MAX_CHOICES}")
        return self.prompt


class ContentPart(_Body):
    """A part of a message; text only."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation; what else it has is for the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": "" if content is None else content}


class Chat(Common):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=0)

    def length(self) -> int | None:
        """Tokens to generate at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
