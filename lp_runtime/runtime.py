"""The Python API: a runtime whose replicas are up decodes prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.constraints.compile_process import ConstraintCompiler
from lp_runtime.errors import ConfigError, ModelError, RequestError
from lp_runtime.launchers import launch
from lp_runtime.launchers.base import Launcher
from lp_runtime.launchers.wire.lease import ReplicaLease
from lp_runtime.model.hf.location import check_location
from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.tokenizer import StopStrings, TextStream
from lp_runtime.replica.replica import ReplicaInfo
from lp_runtime.replica.request_builder import RequestBuilder, RequestOptions
from lp_runtime.request.generation import Generation, GenerationStream
from lp_runtime.request.request import Request


class LookaheadRuntime:
    """Replicas of a model that share every decoding step of a request.

    Use it in a `with` block, or call `close`. Under torchrun every rank runs the same program.

    Args:
        model: a directory or hub id, or a ModelConfig; the demo model if not given.
        gpus: number of GPUs (on CPUs: of processes), >= 1; default gpus_per_replica, under torchrun WORLD_SIZE.
        launcher: "auto", "local", "torchrun", "ray", or a LauncherConfig.
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "float32", "bfloat16" or "float16".
        lookahead: settings of drafting; default: LookaheadConfig().
        sampling: settings of sampling; default: the model's own, from its generation_config.json.
        exactness: "fast", or "strict": bit for bit the output of one token a step, in half precision, too.
        strict_tokens: tokens of every forward pass with exactness="strict", >= 2.
        gpus_per_replica: GPUs (on CPUs: processes) that one replica spans, >= 1; gpus is a multiple. "auto" takes the
            fewest that hold the model.
        config: a whole configuration, given alone; see `from_config`.

    Attributes:
        config: the whole configuration.
        compiler: compiles the constraints of requests.

    Raises:
        ConfigError: a setting is out of range.
        ModelError: the model cannot be loaded.
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
            raise ConfigError("config: give it alone, without other arguments")
        self.config = given if config is None else config
        check_location(self.config.model)
        self._tokenizer: Tokenizer | None = None
        self._launcher = launch(self.config)
        self.compiler = ConstraintCompiler(
            lambda: self.tokenizer, self._launcher.info.vocabulary_size, self._launcher.info.eos_token_ids
        )

    @classmethod
    def from_config(cls, config: RuntimeConfig) -> LookaheadRuntime:
        """Start a runtime from a whole configuration, as the command line makes one.

        Raises:
            ConfigError: a setting does not fit this machine.
            ModelError: the model cannot be loaded.
            LaunchError: the replicas cannot be started; none is left running.
        """
        return cls(config=config)

    @property
    def info(self) -> ReplicaInfo:
        """The model that the replicas hold."""
        return self._launcher.info

    @property
    def num_replicas(self) -> int:
        """Number of replicas, lost ones included."""
        return self._launcher.num_replicas

    @property
    def gpus_per_replica(self) -> int:
        """Number of GPUs (on CPUs: of processes) that each replica spans, as given or chosen."""
        return self._launcher.gpus_per_replica

    @property
    def launcher(self) -> Launcher:
        """The launcher that leads the replicas; for the scheduler."""
        return self._launcher

    @property
    def num_ready(self) -> int:
        """Number of replicas that are up, as far as is known; lost ones that start again are not."""
        return self._launcher.num_ready

    @property
    def is_leader(self) -> bool:
        """Whether this process takes requests: under torchrun, rank 0 alone does."""
        return self._launcher.is_leader

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when text is first met.

        Raises:
            ModelError: the model has no usable tokenizer.
        """
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
            ConfigError: a setting is out of range.
            RequestError: the prompt is empty, has ids out of the vocabulary, or is too long for the model.
            ReplicaError: a replica fails or is lost.
        """
        stream = self.stream(prompt, max_new_tokens, **options)
        for _ in stream:
            pass
        assert stream.generation is not None  # the iteration has ended
        return stream.generation

    def samples(
        self,
        prompt: str | Sequence[int] | None = None,
        num_samples: int = 1,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """Decode several independent samples of a prompt, of one seed.

        Args:
            prompt: text or token ids; left out where `messages` is given.
            num_samples: number of samples, >= 1; more than 1 needs sampling.
            max_new_tokens: tokens of each sample at most, >= 1; default: the model's own, else 128.
            options: see RequestOptions; `sample` is the number of the first sample.

        Raises:
            LookaheadError: as `generate` does.
        """
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise ConfigError(f"num_samples={num_samples}: must be an integer >= 1")
        first = self.request(prompt, max_new_tokens, **options)
        if num_samples > 1 and first.sampling.seed is None:
            raise RequestError(f"num_samples={num_samples}: decoding is greedy; give sampling.temperature > 0")
        options["sampling"] = first.sampling  # with its seed
        start = options.get("sample", 0)
        by_sample: list[RequestOptions] = [{**options, "sample": start + number} for number in range(num_samples)]
        return [self.generate(prompt, max_new_tokens, **sample_options) for sample_options in by_sample]

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """Decode a prompt as a stream of deltas, one a step.

        Args:
            prompt: text or token ids; left out where `messages` is given.
            max_new_tokens: tokens to generate at most, >= 1; default: the model's own, else 128.
            options: see RequestOptions.

        Raises:
            LookaheadError: as `generate` does; of a replica, from the iteration.
        """
        request = self.request(prompt, max_new_tokens, **options)
        return self.stream_request(request, needs_text=isinstance(prompt, str))

    def stream_request(
        self, request: Request, needs_text: bool = False, lease: ReplicaLease | None = None
    ) -> GenerationStream:
        """Decode a checked request as a stream of deltas, one a step.

        Args:
            request: as the method `request` makes one.
            needs_text: whether a model without a tokenizer is an error; if not, deltas are token ids alone.
            lease: replicas to use, for the scheduler; all if not given.

        Raises:
            ModelError: text is needed, and the model has no usable tokenizer.
        """
        text_stream = self._text_stream(optional=not (needs_text or request.stop))
        stop_strings = StopStrings(self.tokenizer, request.stop) if request.stop else None
        events = self._launcher.run(request) if lease is None else self._launcher.run_on(request, lease)
        return GenerationStream(events, text_stream, stop_strings)

    def _text_stream(self, optional: bool) -> TextStream | None:
        """Return a decoder of token ids; None if it is optional and the model has no tokenizer."""
        try:
            return TextStream(self.tokenizer)
        except ModelError:
            if optional:  # token ids in and out: a model without a tokenizer will do
                return None
            raise

    def request(
        self,
        prompt: str | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Turn a prompt and options into a checked request.

        Args:
            prompt: text or token ids; left out where `messages` is given.
            max_new_tokens: tokens to generate at most, >= 1; default: the model's own, else 128.
            options: see RequestOptions.

        Raises:
            ConfigError: a setting is out of range.
            RequestError: the prompt is empty, has ids out of the vocabulary, or is too long for the model.
        """
        return RequestBuilder(self.config, self.info, lambda: self.tokenizer, self.compiler).build(
            prompt, max_new_tokens, **options
        )

    def close(self) -> None:
        """End every replica. Under torchrun, ranks other than 0 first serve rank 0's remaining requests."""
        self.compiler.close()
        self._launcher.close()

    def __enter__(self) -> LookaheadRuntime:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
