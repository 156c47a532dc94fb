"""The Python API: a runtime that is up, prompts in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.engine.generation import Generation, GenerationStream
from lp_runtime.engine.request import Request
from lp_runtime.engine.request_builder import RequestBuilder, RequestOptions
from lp_runtime.errors import ConfigError, ModelError, RequestError
from lp_runtime.launchers import launch
from lp_runtime.launchers.base import Launcher
from lp_runtime.launchers.lease import ReplicaLease
from lp_runtime.model.loader import load_tokenizer
from lp_runtime.model.location import check_location
from lp_runtime.model.tokenizer import StopStrings, TextStream


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
        """The replicas' model: a lp_runtime.engine.replica.ReplicaInfo."""
        return self._launcher.info

    @property
    def num_replicas(self) -> int:
        return self._launcher.num_replicas

    @property
    def launcher(self) -> Launcher:
        """What leads the replicas, for whoever runs several requests at once (scheduler.py)."""
        return self._launcher

    @property
    def num_ready(self) -> int:
        """Replicas that are there, as far as is known: fewer than num_replicas while lost ones start again."""
        return self._launcher.num_ready

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
        return self.stream_request(request, needs_text=isinstance(prompt, str))

    def stream_request(
        self, request: Request, needs_text: bool = False, lease: ReplicaLease | None = None
    ) -> GenerationStream:
        """Decode what `request` returned. See `stream`.

        Args:
            needs_text: whether a model without a tokenizer is an error; pieces are token ids alone else.
            lease: the replicas to use, for whoever runs several requests at once (scheduler.py); all if not given.
        """
        text_stream = self._text_stream(optional=not (needs_text or request.stop))
        stop_strings = StopStrings(self.tokenizer, request.stop) if request.stop else None
        events = self._launcher.run(request) if lease is None else self._launcher.run_on(request, lease)
        return GenerationStream(events, text_stream, stop_strings)

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
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Turn a prompt and options into a checked request. Arguments and errors as in `generate`."""
        return RequestBuilder(self.config, self.info, lambda: self.tokenizer).make(prompt, max_new_tokens, **options)

    def close(self) -> None:
        """End every replica. Under torchrun, ranks other than 0 first serve what rank 0 still asks for."""
        self._launcher.close()

    def __enter__(self) -> LookaheadRuntime:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
