"""Bodies of requests in the form of the OpenAI API, and the decoding requests that they stand for.

A field that would change the answer and is not supported is refused by name, except where its value asks for nothing.
Unknown fields are refused or named in the log, so that nothing that a client asks for is ignored silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import MAX_SEED, MIN_TEMPERATURE, WARPERS, SamplingConfig
from lp_runtime.errors import RequestError
from lp_runtime.replica.request_builder import RequestOptions
from lp_runtime.server.chat.messages import Message
from lp_runtime.server.chat.tools import MAX_TOOLS, NamedTool, Tool, ToolUse, choose_tools
from lp_runtime.server.openai.structure import ResponseFormat, StructuredOutputs, constraint_of

# What one client may ask for at most, so that others do not pay for it.
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_COLUMNS = 256
MAX_NGRAM_SIZE = 32
MAX_BUDGET_TOKENS = 4096
MAX_TOKEN_DIGITS = 9  # of a token id in logit_bias: far above any vocabulary, within an int32
MAX_COMPLETION_LOGPROBS = 5
MAX_CHAT_LOGPROBS = 20
MAX_SALT_CHARS = 256
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
OPENAI_SEEDS = range(-(2**63), 2**63)
NO_SEED = -1  # as some clients write "no seed"
WARPERS_BESIDES = tuple(WARPERS.keys() - {"temperature"})
# Fields of other servers that would change an answer, and the values of each that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "typical_p": (1.0,),
}


class _Body(BaseModel):
    """A body or a part of it, without unknown fields or conversions of types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        """Remove fields that are null: in the OpenAI API they count as not given."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


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

    Fields beyond the OpenAI API: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, max_time,
    split_special_tokens, structured_outputs, cache_salt, lookahead, gpus and trace. Settings that are not given are as
    in the model's generation_config.json. Fields from `user` to `prediction` are accepted and have no effect.
    """

    model_config = ConfigDict(extra="allow", strict=True)

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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, object] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    split_special_tokens: bool = False
    max_time: float | None = None
    cache_salt: str = Field(default="", max_length=MAX_SALT_CHARS)
    lookahead: Lookahead | None = None
    gpus: int | None = None
    trace: bool = False

    def unknown_fields(self) -> list[str]:
        """Return the names of fields that are not known here.

        Raises:
            RequestError: a field asks for what is not supported.
        """
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in UNSUPPORTED and not any(_same(value, each) for each in UNSUPPORTED[name]):
                if name.startswith("guided_"):
                    kind = name.removeprefix("guided_")
                    raise RequestError(f'{name}: is not supported; give structured_outputs={{"{kind}": ...}}')
                allowed = " or ".join(json.dumps(each) for each in UNSUPPORTED[name])
                raise RequestError(f"{name}: is not supported{f'; leave it out or give {allowed}' if allowed else ''}")
        return [name for name in extra if name not in UNSUPPORTED]

    def constraint(self) -> ConstraintConfig | None:
        """Return what the text must be; None for any text.

        Raises:
            ConstraintError: it is invalid.
        """
        return constraint_of(self.response_format, self.structured_outputs)

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

    def options(self, sampling: SamplingConfig, defaults: Mapping[str, Any]) -> RequestOptions:
        """Return the options of the decoding request.

        Args:
            sampling: the runtime's settings, which fields of the body override.
            defaults: the model's own, from its generation_config.json.

        Raises:
            ConfigError: a setting is out of range.
            RequestError: a field asks for what is not supported.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only with stream=true")
        options = RequestOptions(
            eos=not self.ignore_eos,
            sampling=self._sampling(sampling, defaults),
            stop=self.stops(),
            max_time=self.max_time,
            constraint=self.constraint(),
        )
        if self.trace:
            if not self.stream:
                raise RequestError("trace: only with stream=true")
            options["trace"] = True
        if self.lookahead is not None:
            options["lookahead"] = self.lookahead.resolve()
        return options

    def _sampling(self, sampling: SamplingConfig, defaults: Mapping[str, Any]) -> SamplingConfig:
        """Return the runtime's settings of sampling with those of the body put in.

        Clients send defaults of theirs along: what has no effect on greedy decoding is left out there.
        """
        kept = {name: value for name in PENALTIES if (value := getattr(self, name)) is not None}
        if self.min_tokens is not None:
            kept["min_new_tokens"] = self.min_tokens
        given = self._given_sampling()
        replace(sampling, **given | kept | {"temperature": None})  # raises for values out of range, even unused ones
        if not replace(sampling, **given | dict.fromkeys(WARPERS_BESIDES)).samples(defaults):
            given |= dict.fromkeys((*WARPERS_BESIDES, "seed"))
        given |= kept
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return replace(sampling, **given)

    def _given_sampling(self) -> dict[str, Any]:
        """Return the settings of sampling that the body gives, in the ranges of this package."""
        given: dict[str, Any] = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if self.seed is not None and self.seed in OPENAI_SEEDS:
            given["seed"] = None if self.seed == NO_SEED else self.seed & MAX_SEED
        if self.top_p == 0:  # the likeliest token alone
            given |= {"top_p": None, "temperature": 0.0}
        if 0 < given.get("temperature", 0) < MIN_TEMPERATURE:
            given["temperature"] = 0.0
        return given


def _same(value: object, other: object) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


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
    logprobs: int | None = Field(default=None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts, one or several.

        Raises:
            RequestError: there is none, or too many, or a field asks for what is not supported.
        """
        if self.suffix:
            raise RequestError("suffix: is not supported; leave it out or give an empty one")
        if self.best_of not in (None, self.n):
            raise RequestError(f"best_of={self.best_of}: is not supported; leave it out or give n={self.n}")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt: is empty")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise RequestError(f"prompt: {len(self.prompt)} prompts x n={self.n}: must be at most {MAX_CHOICES}")
        return self.prompt

    def length(self) -> int | None:
        """Return how many tokens to generate at most; None for the default.

        With `echo` a client may ask for no new token; one is generated then, which `shows_new` says not to show.
        """
        return self.max_tokens if self.shows_new else 1

    @property
    def shows_new(self) -> bool:
        """Whether the answer has new tokens, not the prompt alone."""
        return not (self.echo and self.max_tokens == 0)


class Chat(Common):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_CHAT_LOGPROBS)

    def length(self) -> int | None:
        """Return how many tokens to generate at most; None for the default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_top_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens each log-probability is to come with; None without log-probabilities.

        Raises:
            RequestError: likeliest tokens are asked for, and no log-probabilities.
        """
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs={self.top_logprobs}: only with logprobs=true")
        return self.top_logprobs or 0 if self.logprobs else None

    def tool_use(self) -> ToolUse:
        """Return which tools the answer may or must call.

        Raises:
            RequestError: a call is asked for and there is no such tool.
        """
        choice = self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return choose_tools(self.tools, choice, self.parallel_tool_calls)

    def conversation(self) -> list[dict[str, object]]:
        """Return the messages as chat templates take them."""
        return [message.plain() for message in self.messages]
