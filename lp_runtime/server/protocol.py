"""Bodies of requests in the form of the OpenAI API, and the decoding requests that they stand for.

Unknown fields are refused by name, so that nothing that a client asks for is ignored silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.engine.request_builder import RequestOptions
from lp_runtime.errors import RequestError

# What one client may ask for at most, so that others do not pay for it.
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_COLUMNS = 256
MAX_NGRAM_SIZE = 32
MAX_BUDGET_TOKENS = 4096
MAX_TOKEN_DIGITS = 9  # of a token id in logit_bias: far above any vocabulary, within an int32
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


class _Body(BaseModel):
    """A body or a part of it, without unknown fields or conversions of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool = False


class Lookahead(_Body):
    """Settings of drafting for one request; the text does not depend on them."""

    W: int | None = Field(default=None, le=MAX_COLUMNS)
    N: int | None = Field(default=None, le=MAX_NGRAM_SIZE)
    G: int | None = Field(default=None, le=MAX_COLUMNS)
    drafter: str | None = None
    budget: int | None = Field(default=None, le=MAX_BUDGET_TOKENS)

    def resolve(self) -> LookaheadConfig:
        """Return the settings, with defaults for those that are not given.

        Raises:
            ConfigError: a setting is out of range.
        """
        return LookaheadConfig(**self.model_dump(exclude_none=True))


class Common(_Body):
    """Fields of completions and chats alike.

    Fields beyond the OpenAI API: top_k, min_p, repetition_penalty, ignore_eos, max_time, lookahead, gpus and trace.
    Settings that are not given are as in the model's generation_config.json.
    """

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
    metadata: dict[str, object] | None = None
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
    def _without_nulls(cls, data: object) -> object:
        """Remove fields that are null: in the OpenAI API they count as not given."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    def stops(self) -> list[str] | None:
        """Return the stop strings; None if none are given.

        Raises:
            RequestError: there are more than MAX_STOPS, or one is not valid Unicode.
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
        """Return the options of the decoding request.

        Args:
            sampling: the runtime's settings, which fields of the body override.

        Raises:
            ConfigError: a setting is out of range.
            RequestError: a field asks for what is not supported.
        """
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise RequestError(f"{name}={getattr(self, name)}: must be 0; repetition_penalty is there instead")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only with stream=true")
        options = RequestOptions(
            eos=not self.ignore_eos, sampling=self._sampling(sampling), stop=self.stops(), max_time=self.max_time
        )
        if self.trace:
            if not self.stream:
                raise RequestError("trace: only with stream=true")
            options["trace"] = True
        if self.lookahead is not None:
            options["lookahead"] = self.lookahead.resolve()
        return options

    def _sampling(self, sampling: SamplingConfig) -> SamplingConfig:
        """Return the runtime's settings of sampling with those of the body put in."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        replace(sampling, **given | {"temperature": None})  # raises for values out of range, even unused ones
        if self.temperature == 0:  # clients send their defaults along, which have no effect on greedy decoding
            given = {name: given[name] for name in ("temperature", "repetition_penalty") if name in given}
            given = dict.fromkeys(("top_k", "top_p", "min_p", "typical_p", "seed")) | given
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return replace(sampling, **given)


def _token_id(text: str) -> int:
    """Return the token id that a key of logit_bias is.

    Raises:
        RequestError: the key is not a token id.
    """
    if not text.isascii() or not text.isdigit() or len(text) > MAX_TOKEN_DIGITS:
        raise RequestError(f"logit_bias of {text!r}: keys must be token ids")
    return int(text)


class Completion(Common):
    """The body of POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=1)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts, one or several.

        Raises:
            RequestError: there is none, or too many, or a field asks for what is not supported.
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
    """A part of a message's content; text alone is supported."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation. Unknown fields are passed on to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, object]:
        """Return the message as chat templates take it, with its content as one text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": "" if content is None else content}


class Chat(Common):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=0)

    def length(self) -> int | None:
        """Return how many tokens to generate at most; None for the default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
