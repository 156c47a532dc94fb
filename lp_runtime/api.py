"""The Python API: a runtime that is up, prompts in, text out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lp_runtime.config import LauncherConfig, LookaheadConfig, ModelConfig, RuntimeConfig
from lp_runtime.decoding import Event, Report, Request, StepTimes
from lp_runtime.errors import ModelError, RequestError
from lp_runtime.launchers import launch
from lp_runtime.lookahead.pool import PoolStatistics
from lp_runtime.model.loading import check_location, load_tokenizer
from lp_runtime.model.text import TextStream, encode


@dataclass(frozen=True)
class Generation:
    """What one request produced.

    Attributes:
        text: the new text.
        token_ids: the new tokens.
        steps: steps it took, the prefill's included.
        step_tokens: tokens fed a step, mean over replicas and steps, the prefill's excluded.
        seconds: from the request's start to its last token; loading excluded.
        finish_reason: "eos", "length" or "cancelled".
        prefill_seconds, times, exchange_bytes, pool: see lp_runtime.decoding.Report.
    """

    text: str
    token_ids: list[int]
    steps: int
    step_tokens: float
    seconds: float
    finish_reason: str
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
    """

    text: str
    token_ids: list[int]


class GenerationStream:
    """Iterates over the pieces of one request. Close it early to cancel the request.

    Attributes:
        generation: the whole, once the iteration has ended; None before.
        has_text: False where the model has no tokenizer, so that pieces are token ids alone.
    """

    def __init__(self, events: Generator[Event, None, None], text_stream: TextStream | None):
        self.generation: Generation | None = None
        self.has_text = text_stream is not None
        self._events = events
        self._pieces = self._decode(text_stream)

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel what is left of the request."""
        self._pieces.close()
        self._events.close()

    def _decode(self, text_stream: TextStream | None) -> Generator[Piece, None, None]:
        pieces: list[Piece] = []
        for event in self._events:
            if isinstance(event, Report):
                if text_stream and (rest := text_stream.finish()):
                    pieces.append(Piece(rest, []))
                    yield pieces[-1]
                self.generation = Generation(
                    text="".join(piece.text for piece in pieces),
                    token_ids=[token for piece in pieces for token in piece.token_ids],
                    steps=event.num_steps,
                    step_tokens=event.step_tokens,
                    seconds=event.seconds,
                    finish_reason=event.finish_reason,
                    prefill_seconds=event.prefill_seconds,
                    times=event.times,
                    exchange_bytes=event.exchange_bytes,
                    pool=event.pool,
                )
            else:
                pieces.append(Piece(text_stream.add(event) if text_stream else "", event))
                yield pieces[-1]


class LookaheadRuntime:
    """Replicas of a model that share every decoding step of a request.

    Args:
        model: a directory or hub id, or a ModelConfig; the demo model if not given.
        gpus: number of replicas, on CPUs too; default 1, under torchrun WORLD_SIZE.
        launcher: "auto", "local", "torchrun", "ray", or a LauncherConfig.
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "float32", "bfloat16" or "float16".
        lookahead: W, N, G; see LookaheadConfig.

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
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        eos: bool = True,
        lookahead: LookaheadConfig | None = None,
    ) -> Generation:
        """Decode a prompt.

        Args:
            prompt: text or token ids.
            max_new_tokens: tokens to generate at most, >= 1.
            eos: stop at the model's end-of-sequence token (which is kept); False goes on.
            lookahead: other settings for this request; the output is the same.

        Raises:
            RequestError: if the prompt is empty, has ids out of the vocabulary, or is too long for the model.
            ReplicaError: if a replica fails or is lost.
        """
        stream = self.stream(prompt, max_new_tokens, eos=eos, lookahead=lookahead)
        for _ in stream:
            pass
        return stream.generation

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        eos: bool = True,
        lookahead: LookaheadConfig | None = None,
    ) -> GenerationStream:
        """Decode a prompt and iterate over what each step adds. Arguments and errors as in `generate`."""
        request = self.request(prompt, max_new_tokens, eos, lookahead)
        return GenerationStream(self._launcher.run(request), self._text_stream(optional=not isinstance(prompt, str)))

    def _text_stream(self, optional: bool) -> TextStream | None:
        try:
            return TextStream(self.tokenizer)
        except ModelError:
            if optional:  # ids in, ids out: a model without a tokenizer will do
                return None
            raise

    def request(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        eos: bool = True,
        lookahead: LookaheadConfig | None = None,
    ) -> Request:
        """Turn a prompt into a checked request.

        Raises:
            RequestError: see `generate`.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={max_new_tokens}: must be an integer >= 1")
        info = self._launcher.info
        ids = tuple(encode(self.tokenizer, prompt) if isinstance(prompt, str) else prompt)
        if not ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < info.vocabulary_size:
                raise RequestError(
                    f"token id {token!r} of the prompt: must be an integer 0 to {info.vocabulary_size - 1}"
                )
        if info.context_length is not None and len(ids) + max_new_tokens > info.context_length:
            raise RequestError(
                f"the prompt is too long: {len(ids)} tokens + max_new_tokens={max_new_tokens} are more than"
                f" the model's context of {info.context_length}"
            )
        return Request(
            prompt_ids=ids,
            lookahead=lookahead or self.config.lookahead,
            max_new_tokens=max_new_tokens,
            eos_token_ids=info.eos_token_ids if eos else frozenset(),
        )

    def close(self) -> None:
        """End every replica. Under torchrun, ranks other than 0 first serve what rank 0 still asks for."""
        self._launcher.close()

    def __enter__(self) -> LookaheadRuntime:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
