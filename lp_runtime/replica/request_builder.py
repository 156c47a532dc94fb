"""Builds checked requests from what callers ask for."""

from __future__ import annotations

import pickle
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack, cast, get_type_hints

from lp_runtime.config.checks import plain, require_bool, require_int
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import LookaheadConfig, check_exactness
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import DEFAULT_MAX_NEW_TOKENS, RuntimeConfig, check_limits
from lp_runtime.constraints.compile_process import ConstraintCompiler
from lp_runtime.constraints.compiled import CompiledConstraint
from lp_runtime.errors import ConfigError, ConstraintError, LengthError, RequestError, first_line
from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.model.tokenizer import encode, encode_chat
from lp_runtime.replica.loaded_model import ReplicaInfo
from lp_runtime.request.request import Request
from lp_runtime.request.request_options import RequestOptions
from lp_runtime.sampling.gumbel import MAX_SAMPLE
from lp_runtime.sampling.processors import check_processors
from lp_runtime.sampling.types import LogitsProcessor
from lp_runtime.text.stop_check import check_stop_strings

Config = TypeVar("Config")
MAX_TOP_LOGPROBS = 20  # as in the OpenAI API
MAX_KEPT_STOPS = 1000  # checked stop strings that are remembered
SEED_BITS = 32  # of a seed that is chosen here: short enough to type
FLAGS = {name for name, kind in get_type_hints(RequestOptions).items() if kind is bool}


class RequestBuilder:
    """Builds checked requests for the replicas of a runtime.

    `tokenizer` returns the model's tokenizer; it is called where text is met.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        info: ReplicaInfo,
        tokenizer: Callable[[], Tokenizer],
        compiler: ConstraintCompiler,
    ):
        self._config = config
        self._info = info
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._possible_stops: set[str] = set()  # stop strings that texts of the model can contain

    def check_stops(self, strings: Sequence[str], tokenizer: Tokenizer | None = None) -> None:
        """Raise RequestError if no text of the model contains one of the stop strings.

        That takes a second for unusual strings. `tokenizer` is the calling thread's copy; None for the model's.
        """
        new = [each for each in strings if each not in self._possible_stops]
        if not new:
            return
        check_stop_strings(tokenizer or self._tokenizer(), new)
        if len(self._possible_stops) + len(new) > MAX_KEPT_STOPS:
            self._possible_stops.clear()
        self._possible_stops.update(new)

    def build(
        self,
        prompt: str | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Return a checked request with the model's defaults filled in, and with a seed if it samples.

        Args:
            prompt: text or token ids; None with `messages`.
            max_new_tokens: largest number of new tokens, >= 1; None for the model's default, else 128, or what fits
                into the context if that is fewer.

        Raises:
            RequestError: if the prompt is empty, too long for the model, or has ids outside the vocabulary.
        """
        options, max_new_tokens = _given(options), plain(max_new_tokens)
        defaults = self._info.defaults
        eos, sample = options.get("eos", True), options.get("sample", 0)
        processors = options.get("processors", ())
        stop = self._stop_strings(options.get("stop"))
        max_time = options.get("max_time")
        max_time = defaults.get("max_time") if max_time is None else max_time
        check_limits(max_new_tokens, stop, max_time)
        require_int("stop_after", options.get("stop_after", 0), 0)
        self.check_stops(stop)
        self._check_processors(processors)
        request_id, cache_salt = options.get("request_id", ""), options.get("cache_salt", "")
        _check_texts(request_id=request_id, cache_salt=cache_salt)
        check_sample(sample)
        logprobs, top_logprobs = options.get("logprobs", False), options.get("top_logprobs", 0)
        prompt_logprobs = options.get("prompt_logprobs", False)
        _check_logprobs(logprobs, top_logprobs, prompt_logprobs)
        if prompt_logprobs and self._config.exactness == "strict":  # the prompt is fed as trees are, not as prompts are
            raise ConfigError("prompt_logprobs: not with exactness=strict")
        sampling = self._with_seed(_typed("sampling", options.get("sampling"), SamplingConfig) or self._config.sampling)
        lookahead = self._lookahead(options.get("lookahead"))
        ids = self._encode(prompt, options)
        if max_new_tokens is None:
            max_new_tokens = self._default_max_new_tokens(len(ids))
        self._check_lengths(len(ids), max_new_tokens, sampling)  # before each token of a long text is checked
        stop_tokens = _plain_ids("stop_token_ids", options.get("stop_token_ids", ()))
        prediction = options.get("prediction", ())
        if isinstance(prediction, str):
            arguments = (self._tokenizer(), prediction, False, False, "the prediction")
            prediction = encode(*arguments) if prediction else ()
        prediction = _plain_ids("prediction", prediction)
        self._check_vocabulary(
            {"of the prompt": ids, "in stop_token_ids": stop_tokens, "in prediction": prediction}, sampling
        )
        return Request(
            prompt_ids=ids,
            lookahead=lookahead,
            max_new_tokens=max_new_tokens,
            eos_token_ids=(self._info.eos_token_ids if eos else frozenset()) | frozenset(stop_tokens),
            sampling=sampling,
            sample=sample,
            stop=tuple(stop),
            stop_after=options.get("stop_after", 0),
            max_time=max_time,
            logprobs=logprobs,
            top_logprobs=min(top_logprobs, self._info.vocabulary_size),
            prompt_logprobs=prompt_logprobs,
            trace=options.get("trace", False),
            request_id=request_id,
            cache_salt=cache_salt,
            processors=tuple(processors),
            constraint=self._compiled(options.get("constraint"), eos),
            is_answer=options.get("is_answer", options.get("messages") is not None),
            skip_special_tokens=options.get("skip_special_tokens", True),
            reasoning=options.get("reasoning"),
            prediction=prediction,
        )

    def max_new_tokens_after(self, prompt_length: int) -> int:
        """Return how many new tokens fit after a prompt into context and memory; 1 if not even one does."""
        limits = [limit for limit in (self._info.context_length, self._info.capacity) if limit is not None]
        return max(1, min(limits, default=sys.maxsize) - prompt_length)

    def _stop_strings(self, given: Sequence[str] | None) -> Sequence[str]:
        stop = self._info.defaults.get("stop_strings", ()) if given is None else given
        return (stop,) if isinstance(stop, str) else stop

    def _compiled(self, given: ConstraintConfig | None, eos: bool) -> CompiledConstraint | None:
        constraint = _typed("constraint", given, ConstraintConfig)
        if constraint is None or constraint.kind is None:
            return None
        if not eos:
            raise ConstraintError("constraint: not with eos=false, since the end-of-sequence token ends the text")
        return self._compiler.compile(constraint)

    def _lookahead(self, given: LookaheadConfig | None) -> LookaheadConfig:
        """Return a request's drafting settings, checked against the runtime's."""
        config = self._config
        lookahead = _typed("lookahead", given, LookaheadConfig) or config.lookahead
        check_exactness(config.exactness, lookahead)
        own = config.lookahead.draft_tables
        if lookahead.draft_tables not in ("auto", "request", "runtime", own):
            raise ConfigError(
                f"lookahead.draft_tables={lookahead.draft_tables}: of a request it must be request, runtime or the"
                " runtime's own"
            )
        if lookahead.corpus not in (None, config.lookahead.corpus):
            raise ConfigError(f"lookahead.corpus={lookahead.corpus}: of a request it must be the runtime's own")
        if lookahead.draft_tables == "auto":
            lookahead = replace(lookahead, draft_tables="runtime" if own == "auto" else own)
        return lookahead

    def _encode(self, prompt: str | Sequence[int] | None, options: RequestOptions) -> tuple[int, ...]:
        """Return the token ids of a prompt or a conversation, at least one."""
        messages = options.get("messages")
        if messages is not None and prompt is None:
            tools, template_kwargs = options.get("tools", ()), options.get("chat_template_kwargs")
            ids = tuple(encode_chat(self._tokenizer(), messages, tools=tools, template_kwargs=template_kwargs))
        elif prompt is not None and messages is None:
            ids = tuple(encode(self._tokenizer(), prompt)) if isinstance(prompt, str) else _plain_ids("prompt", prompt)
        else:
            raise RequestError("prompt and messages: give one of them")
        if not ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        return ids

    def _check_lengths(self, num_prompt: int, max_new_tokens: int, sampling: SamplingConfig) -> None:
        info = self._info
        if sampling.min_new_tokens is not None and sampling.min_new_tokens > max_new_tokens:
            raise ConfigError(
                f"sampling.min_new_tokens={sampling.min_new_tokens}: must not be above max_new_tokens={max_new_tokens}"
            )
        if info.context_length is not None and num_prompt + max_new_tokens > info.context_length:
            raise LengthError(
                f"the prompt is too long: {num_prompt} tokens + max_new_tokens={max_new_tokens} are more than"
                f" the model's context of {info.context_length}"
            )
        if info.capacity is not None and num_prompt + max_new_tokens > info.capacity:
            left = info.capacity - num_prompt
            remedy = f"give max_new_tokens={left} or less" if left > 0 else "shorten the prompt"
            raise LengthError(
                f"no room in memory: {num_prompt} tokens + max_new_tokens={max_new_tokens}"
                f"{self._memory_of(num_prompt + max_new_tokens)} are more than the {info.capacity}"
                f"{self._memory_of(info.capacity)} that a replica's cache can hold: {remedy}"
            )

    def _memory_of(self, num_tokens: int) -> str:
        """Return the size of some tokens' keys and values for a message; empty if it is unknown."""
        num_bytes = num_tokens * self._info.cache_bytes_per_token
        return f" ({num_bytes / (1 << 30):.2f} GiB)" if num_bytes else ""

    def _default_max_new_tokens(self, prompt_length: int) -> int:
        """Return what the model's own defaults say, else DEFAULT_MAX_NEW_TOKENS; no more than fit."""
        defaults = self._info.defaults
        wanted = defaults.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        if "max_new_tokens" not in defaults and "max_length" in defaults:
            wanted = defaults["max_length"] - prompt_length
            if wanted <= 0:
                raise RequestError(
                    f"the prompt has {prompt_length} tokens, and the model's default max_length="
                    f"{defaults['max_length']} counts them: give max_new_tokens"
                )
        return min(wanted, self.max_new_tokens_after(prompt_length))

    @staticmethod
    def _check_processors(processors: Sequence[LogitsProcessor]) -> None:
        if isinstance(processors, str) or not isinstance(processors, Sequence):
            raise ConfigError(f"processors={processors!r}: must be a list of LogitsProcessors")
        check_processors(processors)
        try:
            pickle.dumps(tuple(processors))
        except Exception as error:  # whatever a foreign class raises
            raise ConfigError(f"processors: must pickle, to be sent to replicas: {first_line(error)}") from error

    def _with_seed(self, sampling: SamplingConfig) -> SamplingConfig:
        """Return the settings with a seed if they sample, and without one if they do not."""
        sampling.check(self._info.defaults)
        if not sampling.samples(self._info.defaults):
            return replace(sampling, seed=None)
        return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(SEED_BITS))

    def _check_vocabulary(self, tokens_by_place: Mapping[str, Sequence[int]], sampling: SamplingConfig) -> None:
        size = self._info.vocabulary_size
        for where, tokens in (
            *tokens_by_place.items(),
            *(("in sampling.bad_words_ids", words) for words in sampling.bad_words_ids or ()),
            ("in sampling.logit_bias", sampling.logit_bias or ()),
        ):
            for token in tokens:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                    raise RequestError(f"token id {token!r} {where}: must be an integer 0 to {size - 1}")


def _given(options: RequestOptions) -> RequestOptions:
    """Return the options that are not None; TypeError for an unknown one, ConfigError for a flag that is no bool."""
    if unknown := sorted(options.keys() - RequestOptions.__annotations__.keys()):
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    given = {name: plain(value) for name, value in options.items() if value is not None}
    for name in FLAGS & given.keys():
        require_bool(name, given[name])
    return cast(RequestOptions, given)


def _plain_ids(name: str, ids: Iterable[Any]) -> tuple[Any, ...]:
    """Return token ids without the types of numpy and torch; RequestError for bytes."""
    if isinstance(ids, bytes | bytearray | memoryview):
        raise RequestError(f"{name}={ids[:100]!r}: must be token ids or text, not bytes")
    return tuple(map(plain, plain(ids)))


def _check_logprobs(logprobs: bool, top_logprobs: int, prompt_logprobs: bool) -> None:
    require_int("top_logprobs", top_logprobs, 0)
    if top_logprobs > MAX_TOP_LOGPROBS:
        raise ConfigError(f"top_logprobs={top_logprobs}: must be at most {MAX_TOP_LOGPROBS}")
    if (top_logprobs or prompt_logprobs) and not logprobs:
        name = "top_logprobs" if top_logprobs else "prompt_logprobs"
        raise ConfigError(f"{name}: only with logprobs")


def check_sample(sample: int) -> None:
    if isinstance(sample, bool) or not isinstance(sample, int) or not 0 <= sample <= MAX_SAMPLE:
        raise ConfigError(f"sample={sample}: must be 0 to 2**32 - 1")


def _check_texts(**values: str) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"{name}={value!r}: must be a string")


def _typed(name: str, value: Config | None, kind: type[Config]) -> Config | None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r}: must be a {kind.__name__}")
    return value
