"""Fields that all request bodies share, and their conversion to options of decoding requests.

An unsupported field that would change the answer is refused by name, unless its value is the default behavior. Unknown
fields are refused or logged. So nothing that a client asks for is ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from lp_runtime.config.checks import is_unicode
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import MAX_SEED, MIN_TEMPERATURE, SAMPLING_ONLY, SamplingConfig
from lp_runtime.errors import RequestError
from lp_runtime.request.request_options import RequestOptions
from lp_runtime.sampling.request_processors import AllowedTokens
from lp_runtime.server.openai.parts import (
    ContentPart,
    Int,
    NamedPart,
    ResponseFormat,
    StrictPart,
    StructuredOutputs,
    constraint_of,
    joined,
    unknown_in,
)
from lp_runtime.server.openai.unsupported import check_supported

# Limits on one request, so that it cannot slow down other clients too much.
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOKEN_LIST = 1024  # entries of stop_token_ids and of bad_words
MAX_COLUMNS = 256
MAX_NGRAM_SIZE = 32
MAX_BUDGET_TOKENS = 4096
MAX_TOKEN_DIGITS = 9  # of a token id in logit_bias: enough for any vocabulary, and fits an int32
MAX_SALT_CHARS = 256
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
OPENAI_SEEDS = range(-(2**63), 2**63)
NO_SEED = -1  # some clients send it for "no seed"
NO_TOP_K = -1  # vLLM's value for "off", which trl sends
TRUNCATIONS = tuple(SAMPLING_ONLY.keys() - {"temperature"})


class StreamOptions(NamedPart):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class Lookahead(StrictPart):
    """Drafting settings of one request; the text does not depend on them."""

    W: Int | None = Field(default=None, le=MAX_COLUMNS)
    N: Int | None = Field(default=None, le=MAX_NGRAM_SIZE)
    G: Int | None = Field(default=None, le=MAX_COLUMNS)
    drafter: str | None = None
    budget: Int | None = Field(default=None, le=MAX_BUDGET_TOKENS)
    tokens: Int | None = Field(default=None, le=MAX_BUDGET_TOKENS)

    def resolve(self) -> LookaheadConfig:
        return LookaheadConfig(**self.model_dump(exclude_none=True))


class Prediction(NamedPart):
    """OpenAI's predicted output: text that the answer probably contains much of."""

    type: Literal["content"] = "content"
    content: str | list[ContentPart]


class Common(StrictPart):
    """Fields that all bodies share.

    Extensions of the OpenAI API: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids,
    include_stop_str_in_output, skip_special_tokens, allowed_token_ids, bad_words, truncate_prompt_tokens,
    truncation_side, max_time, split_special_tokens, structured_outputs, cache_salt, lookahead, gpus and trace. Missing
    settings default to the model's generation_config.json. `user`, `metadata` and `store` to `prompt_cache_retention`
    do not affect decoding.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    fills_context: ClassVar[bool] = False  # whether a request without a length may fill the model's context
    caps_length: ClassVar[bool] = False  # whether a length above the context is shortened

    model: str | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    metadata: dict[str, object] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: Prediction | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default=[], max_length=MAX_TOKEN_LIST)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1)
    bad_words: list[str] = Field(default=[], max_length=MAX_TOKEN_LIST)
    truncate_prompt_tokens: Int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] = "left"
    split_special_tokens: bool = False
    max_time: float | None = None
    cache_salt: str = Field(default="", max_length=MAX_SALT_CHARS)
    lookahead: Lookahead | None = None
    gpus: Int | None = None
    trace: bool = False

    def unknown_fields(self) -> list[str]:
        """Return the names of unknown fields; refuse those that ask for something that is not supported."""
        return [*check_supported(self.model_extra or {}, self.length_field), *unknown_in(self)]

    def constraint(self) -> ConstraintConfig | None:
        """Return the constraint of the answer's text; None for any text."""
        return constraint_of(self.response_format, self.structured_outputs)

    def length(self) -> int | None:
        """Return how many tokens to generate at most; None for the default."""
        return getattr(self, self.length_field)

    @property
    def length_field(self) -> str:
        """Name of the field of the number of new tokens."""
        return "max_tokens"

    def truncated(self, ids: list[int], context_length: int | None) -> list[int]:
        """Return `truncate_prompt_tokens` tokens of a prompt, or its last ones; with -1, all but one of a context."""
        num = self.truncate_prompt_tokens
        if num == -1:
            num = None if context_length is None else context_length - 1
        if num is None:
            return ids
        if num == 0:
            raise RequestError("truncate_prompt_tokens=0: must be -1, or at least 1")
        return ids[-num:] if self.truncation_side == "left" else ids[:num]

    def stops(self) -> list[str] | None:
        """Return the stop strings, at most MAX_STOPS; None if none are given."""
        if self.stop is None:
            return None
        return check_stops("stop", [self.stop] if isinstance(self.stop, str) else self.stop)

    def options(self, sampling: SamplingConfig, defaults: Mapping[str, Any]) -> RequestOptions:
        """Return the options of the decoding request.

        The body's fields override the runtime's `sampling`. `defaults` are those of the model's generation_config.json.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only with stream=true")
        if self.trace and not self.stream:
            raise RequestError("trace: only with stream=true")
        options = RequestOptions(
            eos=not self.ignore_eos,
            sampling=self._sampling(sampling, defaults),
            stop=self.stops(),
            stop_after=self.min_tokens or 0,
            max_time=self.max_time,
            constraint=self.constraint(),
            stop_token_ids=self.stop_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            trace=self.trace,
        )
        if self.prediction is not None:
            options["prediction"] = joined(self.prediction.content)
        if self.allowed_token_ids is not None:
            options["processors"] = [AllowedTokens(self.allowed_token_ids)]
        if self.lookahead is not None:
            options["lookahead"] = self.lookahead.resolve()
        return options

    def _sampling(self, sampling: SamplingConfig, defaults: Mapping[str, Any]) -> SamplingConfig:
        """Return the runtime's sampling settings, overridden by the body's.

        Many clients always send their defaults; for greedy decoding, settings that do not affect it are left out.
        """
        kept = {name: value for name in PENALTIES if (value := getattr(self, name)) is not None}
        if self.min_tokens is not None:
            kept["min_new_tokens"] = self.min_tokens
        given = self._given_sampling()
        replace(sampling, **given | kept | {"temperature": None})  # raises for values out of range, even unused ones
        if not replace(sampling, **given | dict.fromkeys(TRUNCATIONS)).samples(defaults):
            given |= dict.fromkeys((*TRUNCATIONS, "seed"))
        given |= kept
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return replace(sampling, **given)

    def _given_sampling(self) -> dict[str, Any]:
        """Return the body's settings, converted to this package's ranges."""
        given: dict[str, Any] = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if self.seed is not None and self.seed in OPENAI_SEEDS:
            given["seed"] = None if self.seed == NO_SEED else self.seed & MAX_SEED
        if self.top_k == NO_TOP_K:
            given["top_k"] = 0
        if self.top_p == 0:  # means: only the likeliest token
            given |= {"top_p": None, "temperature": 0.0}
        if 0 < given.get("temperature", 0) < MIN_TEMPERATURE:
            given["temperature"] = 0.0
        return given


def check_stops(name: str, stops: list[str]) -> list[str]:
    """Return the stop strings of the field `name` if they are valid."""
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{name}: {len(stops)} strings are given; must be at most {MAX_STOPS}")
    for stop in stops:
        if not stop:
            raise RequestError(f"{name}={stop!r}: must be strings of at least one character")
        if len(stop) > MAX_STOP_CHARS:
            raise RequestError(f"{name}: a string has {len(stop)} characters; must have at most {MAX_STOP_CHARS}")
        if not is_unicode(stop):
            raise RequestError(f"{name}={stop!r}: is not valid Unicode")
    return stops


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > MAX_TOKEN_DIGITS:
        raise RequestError(f"logit_bias of {text!r}: keys must be token ids")
    return int(text)
