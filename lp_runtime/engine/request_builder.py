"""From what a caller asks for to a checked request: the model's defaults filled in, a seed drawn if need be."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from lp_runtime.config.lookahead import LookaheadConfig, check_exactness
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import DEFAULT_MAX_NEW_TOKENS, RuntimeConfig, check_limits
from lp_runtime.engine.replica import ReplicaInfo
from lp_runtime.engine.request import Request
from lp_runtime.errors import ConfigError, RequestError, first_line
from lp_runtime.model.tokenizer import encode, encode_chat
from lp_runtime.sampling.gumbel import MAX_SAMPLE
from lp_runtime.sampling.processors import check_processors

SEED_BITS = 32  # of a seed that is drawn: short enough to type


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its prompt and max_new_tokens.

    messages: a conversation instead of a prompt, by the model's chat template: dicts with "role" and "content".
    eos: stop at the model's end-of-sequence token (which is kept); False goes on. Default True.
    lookahead: other W, N, G for this request; the output is the same.
    sampling: how successors are drawn, instead of the runtime's.
    sample: which of several independent samples of one seed, >= 0. Default 0.
    stop: strings of new text; decoding ends with the first of them, which is kept. Default: the model's stop_strings.
    max_time: seconds after which to stop, at the end of a step.
    logprobs: report the log-probability of each new token. Default False.
    trace: report which replica has found each new token. Default False.
    processors: transformers LogitsProcessors of your own; they must depend on their arguments alone, and pickle.
    """

    messages: Sequence[Mapping[str, Any]]
    eos: bool
    lookahead: LookaheadConfig | None
    sampling: SamplingConfig | None
    sample: int
    stop: Sequence[str] | None
    max_time: float | None
    logprobs: bool
    trace: bool
    processors: Sequence[Any]


class RequestBuilder:
    """Makes requests for the replicas of a runtime.

    Args:
        config: the runtime's.
        info: of its replicas' model.
        tokenizer: gives the model's tokenizer; called where text is met.
    """

    def __init__(self, config: RuntimeConfig, info: ReplicaInfo, tokenizer: Callable[[], Any]):
        self._config = config
        self._info = info
        self._tokenizer = tokenizer

    def make(
        self,
        prompt: str | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        eos: bool = True,
        lookahead: LookaheadConfig | None = None,
        sampling: SamplingConfig | None = None,
        sample: int = 0,
        stop: Sequence[str] | None = None,
        max_time: float | None = None,
        logprobs: bool = False,
        trace: bool = False,
        processors: Sequence[Any] = (),
    ) -> Request:
        """Turn a prompt and options into a checked request: the model's defaults filled in, a seed drawn if need be.

        Raises:
            ConfigError, RequestError: see `generate`.
        """
        info, defaults = self._info, self._info.defaults
        stop = defaults.get("stop_strings", ()) if stop is None else stop
        stop = (stop,) if isinstance(stop, str) else stop
        max_time = defaults.get("max_time") if max_time is None else max_time
        check_limits(max_new_tokens, stop, max_time)
        for value, kind, name in ((sampling, SamplingConfig, "sampling"), (lookahead, LookaheadConfig, "lookahead")):
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name}={value!r}: must be a {kind.__name__}")
        self._check_processors(processors)
        if isinstance(sample, bool) or not isinstance(sample, int) or not 0 <= sample <= MAX_SAMPLE:
            raise ConfigError(f"sample={sample}: must be 0 to 2**32 - 1")
        sampling = self._resolve(sampling or self._config.sampling)
        lookahead = lookahead or self._config.lookahead
        check_exactness(self._config.exactness, lookahead)
        if lookahead.draft_tables not in ("request", "runtime", self._config.lookahead.draft_tables):
            raise ConfigError(
                f"lookahead.draft_tables={lookahead.draft_tables}: of a request it must be request, runtime or the runtime's own"
            )
        if (prompt is None) == (messages is None):
            raise RequestError("prompt and messages: give one of them")
        if messages is not None:
            ids = tuple(encode_chat(self._tokenizer(), messages))
        else:
            ids = tuple(encode(self._tokenizer(), prompt) if isinstance(prompt, str) else prompt)
        if not ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        if max_new_tokens is None:
            max_new_tokens = self._default_max_new_tokens(len(ids))
        if sampling.min_new_tokens is not None and sampling.min_new_tokens > max_new_tokens:
            raise ConfigError(
                f"sampling.min_new_tokens={sampling.min_new_tokens}: must not be above max_new_tokens={max_new_tokens}"
            )
        self._check_vocabulary("of the prompt", ids)
        for words in sampling.bad_words_ids or ():
            self._check_vocabulary("in sampling.bad_words_ids", words)
        self._check_vocabulary("in sampling.logit_bias", sampling.logit_bias or ())
        if info.context_length is not None and len(ids) + max_new_tokens > info.context_length:
            raise RequestError(
                f"the prompt is too long: {len(ids)} tokens + max_new_tokens={max_new_tokens} are more than"
                f" the model's context of {info.context_length}"
            )
        if info.capacity is not None and len(ids) + max_new_tokens > info.capacity:
            raise RequestError(
                f"no room in memory: {len(ids)} tokens + max_new_tokens={max_new_tokens} are more than the"
                f" {info.capacity} that a replica's cache can hold"
            )
        return Request(
            prompt_ids=ids,
            lookahead=lookahead,
            max_new_tokens=max_new_tokens,
            eos_token_ids=info.eos_token_ids if eos else frozenset(),
            sampling=sampling,
            sample=sample,
            stop=tuple(stop),
            max_time=max_time,
            logprobs=logprobs,
            trace=trace,
            processors=tuple(processors),
        )

    def _default_max_new_tokens(self, prompt_length: int) -> int:
        """As the model's own defaults say, else ours."""
        defaults = self._info.defaults
        if "max_new_tokens" in defaults or "max_length" not in defaults:
            return defaults.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        if defaults["max_length"] <= prompt_length:
            raise RequestError(
                f"the prompt has {prompt_length} tokens, and the model's default max_length={defaults['max_length']}"
                " counts them: give max_new_tokens"
            )
        return defaults["max_length"] - prompt_length

    @staticmethod
    def _check_processors(processors: Sequence[Any]) -> None:
        if isinstance(processors, str) or not isinstance(processors, Sequence):
            raise ConfigError(f"processors={processors!r}: must be a list of LogitsProcessors")
        check_processors(processors)
        try:
            pickle.dumps(tuple(processors))
        except Exception as error:  # whatever a foreign class raises
            raise ConfigError(f"processors: must pickle, to be sent to replicas: {first_line(error)}") from error

    def _resolve(self, sampling: SamplingConfig) -> SamplingConfig:
        """The settings with a seed if they sample, and without one if they do not."""
        sampling.check(self._info.defaults)
        if not sampling.draws(self._info.defaults):
            return replace(sampling, seed=None)
        return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(SEED_BITS))

    def _check_vocabulary(self, where: str, ids: Iterable[int]) -> None:
        size = self._info.vocabulary_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise RequestError(f"token id {token!r} {where}: must be an integer 0 to {size - 1}")
