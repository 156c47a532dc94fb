"""The Python API: a runtime that is up, prompts in, text out."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from lp_runtime.config import (
    DEFAULT_MAX_NEW_TOKENS,
    LauncherConfig,
    LookaheadConfig,
    ModelConfig,
    RuntimeConfig,
    SamplingConfig,
    check_exactness,
    check_limits,
)
from lp_runtime.decoding import Event, Report, Request, StepTimes
from lp_runtime.errors import ConfigError, ModelError, RequestError, first_line
from lp_runtime.launchers import launch
from lp_runtime.lookahead.pool import PoolStatistics
from lp_runtime.lookahead.sampling import MAX_SAMPLE
from lp_runtime.model.loading import check_location, load_tokenizer
from lp_runtime.model.processors import check_processors
from lp_runtime.model.text import StopStrings, TextStream, encode, encode_chat

SEED_BITS = 32  # of a seed that is drawn: short enough to type


@dataclass(frozen=True)
class Generation:
    """What one request produced.

    Attributes:
        text: the new text.
        token_ids: the new tokens.
        steps: steps it took, the prefill's included; further forward passes of exactness="strict" count as steps.
        step_tokens: tokens fed a step, mean over replicas and steps, the prefill's excluded.
        seconds: from the request's start to its last token; loading excluded.
        finish_reason: "eos", "stop" (a stop string), "length", "time" or "cancelled".
        seed: of the sample; None if decoding was greedy.
        logprobs: the model's log-probability of each new token, before processors; None if not asked for.
        prefill_seconds, times, exchange_bytes, pool: see lp_runtime.decoding.Report.
    """

    text: str
    token_ids: list[int]
    steps: int
    step_tokens: float
    seconds: float
    finish_reason: str
    seed: int | None
    logprobs: list[float] | None
    prefill_seconds: float
    times: StepTimes
    exchange_bytes: int
    pool: PoolStatistics

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def compression_ratio(self) -> float:
        """S: new tokens / steps."""
        return self.num_tokens / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Piece:
    """What one step added.

    Attributes:
        text: text that the step's tokens completed; may be empty.
        token_ids: the step's tokens; empty in a last piece that only completes the text.
        logprobs: the model's log-probability of each, if asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None


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
    processors: Sequence[Any]


class GenerationStream:
    """Iterates over the pieces of one request. Close it early to cancel the request.

    Attributes:
        generation: the whole, once the iteration has ended; None before.
        has_text: False where the model has no tokenizer, so that pieces are token ids alone.
    """

    def __init__(
        self,
        events: Generator[Event, None, None],
        text_stream: TextStream | None,
        stop_strings: StopStrings | None,
    ):
        self.generation: Generation | None = None
        self.has_text = text_stream is not None
        self._events = events
        self._pieces = self._decode(text_stream, stop_strings)

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel what is left of the request."""
        self._pieces.close()
        self._events.close()

    def _decode(self, text_stream: TextStream | None, stop_strings: StopStrings | None) -> Generator[Piece, None, None]:
        pieces: list[Piece] = []
        for event in self._events:
            if not isinstance(event, Report):
                text = _text(event.token_ids, text_stream, stop_strings) if text_stream else ""
                pieces.append(Piece(text, event.token_ids, event.logprobs))
                yield pieces[-1]
                continue
            if text_stream and event.finish_reason != "stop" and (rest := text_stream.finish()):
                pieces.append(Piece(rest, []))
                yield pieces[-1]
            logprobs = [value for piece in pieces for value in piece.logprobs or ()]
            self.generation = Generation(
                text="".join(piece.text for piece in pieces),
                token_ids=[token for piece in pieces for token in piece.token_ids],
                steps=event.num_steps,
                step_tokens=event.step_tokens,
                seconds=event.seconds,
                finish_reason=event.finish_reason,
                seed=event.seed,
                logprobs=logprobs or None,
                prefill_seconds=event.prefill_seconds,
                times=event.times,
                exchange_bytes=event.exchange_bytes,
                pool=event.pool,
            )


def _text(token_ids: Sequence[int], text_stream: TextStream, stop_strings: StopStrings | None) -> str:
    """The text of a run, without what stands behind a stop string inside the last token."""
    if stop_strings is None:
        return text_stream.add(token_ids)
    text = ""
    for token in token_ids:
        added = text_stream.add([token])
        num_behind = stop_strings.add(token)
        if num_behind is not None:
            added += text_stream.finish()
        text += added[: max(0, len(added) - (num_behind or 0))]
    return text


class LookaheadRuntime:
    """Replicas of a model that share every decoding step of a request.

    Args:
        model: a directory or hub id, or a ModelConfig; the demo model if not given.
        gpus: number of replicas, on CPUs too; default 1, under torchrun WORLD_SIZE.
        launcher: "auto", "local", "torchrun", "ray", or a LauncherConfig.
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "float32", "bfloat16" or "float16".
        lookahead: W, N, G; see LookaheadConfig.
        sampling: how successors are drawn; see SamplingConfig. Default: as the model's generation_config.json says.
        exactness: "fast" or "strict": bit for bit the output of one token a step, in half precision, too.
        strict_tokens: see RuntimeConfig.

    Use it in a `with` block, or call `close`. Under torchrun every rank runs the same program.

    Raises:
        ConfigError, ModelError, LaunchError: if it cannot start; nothing is left running then.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | None = None,
        gpus: int | None = None,
        launcher: str | LauncherConfig = "auto",
        device: str = "auto",
        dtype: str = "auto",
        lookahead: LookaheadConfig | None = None,
        sampling: SamplingConfig | None = None,
        exactness: str = "fast",
        strict_tokens: int = RuntimeConfig.strict_tokens,
    ):
        if not isinstance(model, ModelConfig):
            model = ModelConfig(path=None if model is None else str(model))
        self._start(
            RuntimeConfig(
                model=model,
                gpus=gpus,
                launcher=launcher if isinstance(launcher, LauncherConfig) else LauncherConfig(name=launcher),
                device=device,
                dtype=dtype,
                lookahead=lookahead or LookaheadConfig(),
                sampling=sampling or SamplingConfig(),
                exactness=exactness,
                strict_tokens=strict_tokens,
            )
        )

    @classmethod
    def from_config(cls, config: RuntimeConfig) -> LookaheadRuntime:
        """A runtime from a whole configuration, as the command line makes one."""
        runtime = cls.__new__(cls)
        runtime._start(config)
        return runtime

    def _start(self, config: RuntimeConfig) -> None:
        check_location(config.model)
        self.config = config
        self._tokenizer = None
        self._launcher = launch(config)

    @property
    def info(self):
        """The replicas' model: a lp_runtime.worker.ReplicaInfo."""
        return self._launcher.info

    @property
    def num_replicas(self) -> int:
        return self._launcher.num_replicas

    @property
    def is_leader(self) -> bool:
        """False on the ranks of torchrun that follow rank 0."""
        return self._launcher.is_leader

    @property
    def tokenizer(self):
        """The model's tokenizer, loaded when text is first met."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.config.model)
        return self._tokenizer

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Decode a prompt.

        Args:
            prompt: text or token ids; left out where `messages` is given.
            max_new_tokens: tokens to generate at most, >= 1; default: the model's own, else 128.
            options: see RequestOptions.

        Raises:
            ConfigError: if a setting is out of range.
            RequestError: if the prompt is empty, has ids out of the vocabulary, or is too long for the model.
            ReplicaError: if a replica fails or is lost.
        """
        stream = self.stream(prompt, max_new_tokens, **options)
        for _ in stream:
            pass
        return stream.generation

    def samples(
        self,
        prompt: str | Sequence[int] | None = None,
        num_samples: int = 1,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """Several independent samples of a prompt, of one seed. Arguments and errors as in `generate`."""
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise ConfigError(f"num_samples={num_samples}: must be an integer >= 1")
        first = self.request(prompt, max_new_tokens, **options)
        if num_samples > 1 and first.sampling.seed is None:
            raise RequestError(f"num_samples={num_samples}: decoding is greedy; give sampling.temperature > 0")
        options["sampling"] = first.sampling  # with its seed
        start = options.pop("sample", 0)
        return [
            self.generate(prompt, max_new_tokens, sample=sample, **options)
            for sample in range(start, start + num_samples)
        ]

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """Decode a prompt and iterate over what each step adds. Arguments and errors as in `generate`."""
        request = self.request(prompt, max_new_tokens, **options)
        needs_text = isinstance(prompt, str) or bool(request.stop)
        text_stream = self._text_stream(optional=not needs_text)
        stop_strings = StopStrings(self.tokenizer, request.stop) if request.stop else None
        return GenerationStream(self._launcher.run(request), text_stream, stop_strings)

    def _text_stream(self, optional: bool) -> TextStream | None:
        try:
            return TextStream(self.tokenizer)
        except ModelError:
            if optional:  # ids in, ids out: a model without a tokenizer will do
                return None
            raise

    def request(
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
        processors: Sequence[Any] = (),
    ) -> Request:
        """Turn a prompt and options into a checked request: the model's defaults filled in, a seed drawn if need be.

        Raises:
            ConfigError, RequestError: see `generate`.
        """
        info, defaults = self.info, self.info.defaults
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
        sampling = self._resolve(sampling or self.config.sampling)
        lookahead = lookahead or self.config.lookahead
        check_exactness(self.config.exactness, lookahead)
        if (prompt is None) == (messages is None):
            raise RequestError("prompt and messages: give one of them")
        if messages is not None:
            ids = tuple(encode_chat(self.tokenizer, messages))
        else:
            ids = tuple(encode(self.tokenizer, prompt) if isinstance(prompt, str) else prompt)
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
            processors=tuple(processors),
        )

    def _default_max_new_tokens(self, prompt_length: int) -> int:
        """As the model's own defaults say, else ours."""
        defaults = self.info.defaults
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
        sampling.check(self.info.defaults)
        if not sampling.draws(self.info.defaults):
            return replace(sampling, seed=None)
        return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(SEED_BITS))

    def _check_vocabulary(self, where: str, ids: Iterable[int]) -> None:
        size = self.info.vocabulary_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise RequestError(f"token id {token!r} {where}: must be an integer 0 to {size - 1}")

    def close(self) -> None:
        """End every replica. Under torchrun, ranks other than 0 first serve what rank 0 still asks for."""
        self._launcher.close()

    def __enter__(self) -> LookaheadRuntime:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
