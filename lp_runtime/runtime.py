"""Python API: a runtime that starts replicas of a model and decodes prompts on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Unpack

from lp_runtime.chat.answer import AnswerReader, end_of, read_message
from lp_runtime.chat.chat_format import ChatFormat
from lp_runtime.config.checks import plain, require_int
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.constraints.compile_process import ConstraintCompiler
from lp_runtime.errors import ConfigError, ModelError, RequestError
from lp_runtime.launchers import launch
from lp_runtime.launchers.base import Launcher
from lp_runtime.launchers.wire.lease import ReplicaLease
from lp_runtime.model.chat_template import ChatTemplate
from lp_runtime.model.hf.location import check_location
from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.replica.loaded_model import ReplicaInfo
from lp_runtime.replica.request_builder import RequestBuilder, check_sample
from lp_runtime.request.generation import Generation, GenerationStream
from lp_runtime.request.request import Request
from lp_runtime.request.request_options import RequestOptions
from lp_runtime.request.request_text import RequestText
from lp_runtime.utils.callables import never


class LookaheadRuntime:
    """Replicas of a model that share every decoding step of a request.

    Use it in a `with` block, or call `close`. It decodes one request at a time; a Scheduler decodes several. Under
    torchrun every rank runs the same program.

    Args:
        model: a directory, a hub id or a ModelConfig; default: the demo model.
        gpus: number of GPUs (on CPUs: of processes), >= 1, a multiple of gpus_per_replica. Default: WORLD_SIZE under
            torchrun, else gpus_per_replica.
        launcher: "auto", "local", "torchrun", "ray", or a LauncherConfig.
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "float32", "bfloat16" or "float16".
        lookahead: default drafting settings of requests; default: LookaheadConfig().
        sampling: default sampling settings of requests; default: those of the model's generation_config.json.
        exactness: "fast", or "strict": bit for bit the output of one token per step, even in half precision.
        strict_tokens: tokens of every forward pass with exactness="strict", >= 2.
        gpus_per_replica: GPUs (on CPUs: processes) that one replica spans: a number >= 1, "auto" for the fewest that
            hold the model, or "fastest" for the split that lp-bench measured as fastest.
        config: a complete configuration, without any other argument; see `from_config`.

    Attributes:
        config: the complete configuration.
        launcher: starts and reaches the replicas; the scheduler uses it.
        compiler: compiles the constraints of requests.

    Raises:
        ConfigError: a setting is out of range, or not possible on this machine.
        ModelError: the model cannot be loaded, or fails the start-up self-check.
        LaunchError: the replicas cannot be started; none is left running.
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
        *,
        gpus_per_replica: int | str = "auto",
        config: RuntimeConfig | None = None,
    ):
        given = RuntimeConfig(
            model=model if isinstance(model, ModelConfig) else ModelConfig(path=None if model is None else str(model)),
            gpus=gpus,
            gpus_per_replica=gpus_per_replica,
            launcher=launcher if isinstance(launcher, LauncherConfig) else LauncherConfig(name=launcher),
            device=device,
            dtype=dtype,
            lookahead=lookahead or LookaheadConfig(),
            sampling=sampling or SamplingConfig(),
            exactness=exactness,
            strict_tokens=strict_tokens,
        )
        if config is not None and given != RuntimeConfig():
            raise ConfigError("config: must be given without other arguments")
        self.config = given if config is None else config
        check_location(self.config.model)
        self.launcher: Launcher = launch(self.config)
        self.compiler = ConstraintCompiler(lambda: self.tokenizer, self.info.vocabulary_size, self.info.eos_token_ids)

    @classmethod
    def from_config(cls, config: RuntimeConfig) -> LookaheadRuntime:
        """Start a runtime from a full configuration, as the command line does; raises as the constructor does."""
        return cls(config=config)

    @property
    def info(self) -> ReplicaInfo:
        """Facts about the loaded model: vocabulary, context length, dtype, capacity."""
        return self.launcher.info

    @property
    def num_replicas(self) -> int:
        """Number of replicas, including lost ones."""
        return self.launcher.num_replicas

    @property
    def gpus_per_replica(self) -> int:
        """Number of GPUs (on CPUs: of processes) that each replica spans."""
        return self.launcher.gpus_per_replica

    @property
    def num_ready(self) -> int:
        """Number of replicas that are up. Lost replicas do not count, even while they are restarting."""
        return self.launcher.num_ready

    @property
    def is_leader(self) -> bool:
        """Whether this process accepts requests; under torchrun only rank 0 does."""
        return self.launcher.is_leader

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded on first use.

        Raises:
            ModelError: the model has no usable tokenizer.
        """
        return load_tokenizer(self.config.model)

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Decode a prompt and return the complete result.

        Args:
            prompt: text or token ids; None if `messages` is given.
            max_new_tokens: upper bound on new tokens, >= 1; default: the model's, else 128 or what the context allows.
            options: see RequestOptions.

        Raises:
            TypeError: an option is unknown.
            ConfigError: a setting is out of range.
            RequestError: the prompt is empty, has ids outside the vocabulary, or is too long for the model or for the
                memory of a replica; or another request is being decoded.
            ConstraintError: the constraint is invalid, or cannot be compiled in time.
            ModelError: text is needed, and the model has no usable tokenizer.
            ReplicaError: the request was lost with its replicas, or the runtime is closed.
        """
        return _finished(self.stream(prompt, max_new_tokens, **options))

    def samples(
        self,
        prompt: str | Sequence[int] | None = None,
        num_samples: int = 1,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """Decode several independent samples of a prompt, one after another, from one seed.

        Args:
            prompt: text or token ids; None if `messages` is given.
            num_samples: number of samples, >= 1; more than 1 requires sampling.
            max_new_tokens: upper bound on new tokens of each sample, >= 1; default as in `generate`.
            options: see RequestOptions; `sample` is the index of the first sample.

        Raises:
            ConfigError: num_samples is out of range.
            RequestError: decoding is greedy, and num_samples is above 1.
            LookaheadError: any other error of `generate`.
        """
        num_samples = plain(num_samples)
        require_int("num_samples", num_samples, 1)
        first = self.request(prompt, max_new_tokens, **options)
        if num_samples > 1 and first.sampling.seed is None:
            raise RequestError(f"num_samples={num_samples}: decoding is greedy; give sampling.temperature > 0")
        check_sample(first.sample + num_samples - 1)
        requests = [replace(first, sample=first.sample + number) for number in range(num_samples)]
        return [_finished(self.stream_request(each, isinstance(prompt, str))) for each in requests]

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """Start decoding a prompt, and return a stream of deltas, one per step.

        Arguments and errors are those of `generate`. Errors of a replica are raised while iterating.
        """
        request = self.request(prompt, max_new_tokens, **options)
        return self.stream_request(request, needs_text=isinstance(prompt, str))

    def stream_request(
        self,
        request: Request,
        needs_text: bool = False,
        lease: ReplicaLease | None = None,
        should_cancel: Callable[[], bool] = never,
    ) -> GenerationStream:
        """Start decoding a checked request, and return a stream of deltas, one per step.

        Args:
            request: made by the method `request`.
            needs_text: whether a model without a tokenizer is an error; if not, its deltas contain token ids only.
            lease: the replicas to use, for the scheduler; None for all.
            should_cancel: asked between steps and between chunks of the prompt; only without a lease.

        Raises:
            ModelError: text is needed, and the model has no usable tokenizer.
        """
        text: RequestText | None = None
        try:
            text = RequestText(request, self.tokenizer)
        except ModelError:
            if needs_text or request.stop:  # token ids in and out need no tokenizer
                raise
        read = None if request.tools is None else partial(read_message, self._chat_format, self.tokenizer, request)
        is_closed = threading.Event()

        def must_end() -> bool:
            return is_closed.is_set() or should_cancel()

        events = self.launcher.run(request, must_end) if lease is None else self.launcher.run_on(request, lease)
        return GenerationStream(events, text, read, is_closed)

    def request(
        self,
        prompt: str | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Turn a prompt and options into a checked request. Arguments and errors are those of `generate`."""
        builder = RequestBuilder(self.config, self.info, lambda: self.tokenizer, self.compiler)
        messages = options.get("messages")
        if messages is None or prompt is not None:
            return builder.build(prompt, max_new_tokens, **options)
        chat = self._chat_format
        options["messages"] = chat.history(messages)
        request = builder.build(None, max_new_tokens, **options)
        reasoning = request.reasoning or chat.reasoning_marks(end_of(request.prompt_ids, self.tokenizer))
        return replace(request, reasoning=reasoning, tools=tuple(options.get("tools") or ()))

    def answer_reader(self, request: Request) -> AnswerReader:
        """Return a reader that splits the answer to a request with messages into reasoning, content and calls."""
        return AnswerReader(self._chat_format, self.tokenizer, request)

    @cached_property
    def _chat_format(self) -> ChatFormat:
        """The syntax of the model's answers, by its chat template."""
        return ChatFormat(ChatTemplate.of(self.tokenizer))

    def close(self) -> None:
        """Stop all replicas. Under torchrun, ranks other than 0 serve rank 0's requests until rank 0 closes."""
        try:
            self.compiler.close()
        finally:
            self.launcher.close()

    def __enter__(self) -> LookaheadRuntime:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _finished(stream: GenerationStream) -> Generation:
    """Decode a request to its end."""
    with closing(stream):
        for _ in stream:
            pass
    assert stream.generation is not None  # the iteration has ended
    return stream.generation
