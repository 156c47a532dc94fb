"""The methods that lp-bench compares; each decodes a prompt and reports new tokens, seconds and steps.

transformers' methods use a separate, unmodified copy of the model; the runtime's copy may be packed (model/modules/).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from lp_runtime.bench.critical_path import CriticalPathRunner
from lp_runtime.bench.prompts import GREEDY
from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.commands import BenchConfig
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.model.hf.types import CausalLM
from lp_runtime.model.loading.loader import load_model, quiet
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.loading import choose_device, ready_model
from lp_runtime.request.request import Request
from lp_runtime.runtime import LookaheadRuntime

NO_TOKEN = -1  # used as the end-of-sequence token: matches no token id
NUM_COPIED = 10  # tokens that transformers' prompt lookup copies; its default
PAPER = LookaheadConfig(W=15, N=5, G=15, drafter="paper")


@dataclass(frozen=True)
class Result:
    """Result of one method on one prompt; a value that was not measured is None.

    `seconds` are total seconds, the prefill included, by the exchange's assumed microseconds; without an assumption the
    only key is None.
    """

    token_ids: list[int]
    seconds: dict[float | None, float]
    num_steps: int  # forward passes
    step_tokens: float | None  # fed in a step, mean, the prefill excluded
    prefill_seconds: float | None = None  # to the first token
    device_seconds: float = 0.0  # of forward passes and exchanges, the prefill excluded
    other_seconds: float | None = None  # neither, the prefill excluded

    @property
    def other_share(self) -> float | None:
        """Fraction of the time that was neither forward pass nor exchange."""
        if self.other_seconds is None:
            return None
        return self.other_seconds / max(1e-9, self.device_seconds + self.other_seconds)

    @property
    def other_us(self) -> float | None:
        """Microseconds per step that were neither forward pass nor exchange."""
        return None if self.other_seconds is None else 1e6 * self.other_seconds / max(1, self.num_steps - 1)


Decode = Callable[[list[int]], Result]


class _FirstTokenClock:
    """A streamer for transformers' `generate` that records the time.perf_counter() of the first new token."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt first, then new tokens, which are already on the host."""
        if self._has_prompt and self.seconds is None:
            self.seconds = time.perf_counter()
        self._has_prompt = True

    def end(self) -> None:
        """Required by transformers' interface."""


class HuggingFace:
    """Greedy decoding with transformers' own `generate`.

    It stops after any of `eos_token_ids`; if these are empty, it continues to `max_new_tokens`. The model's own
    stop_strings have no effect.
    """

    def __init__(self, model: CausalLM, max_new_tokens: int, eos_token_ids: frozenset[int] = frozenset()):
        self._model, self._max_new_tokens = model, max_new_tokens
        self._eos = sorted(eos_token_ids) or NO_TOKEN
        # GenerationMixin is a base of the model's own class, not of CausalLM.
        self._generate = cast(Callable[..., torch.Tensor], model.generate)
        self._num_passes = 0
        model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self._num_passes += 1

    def decode(self, prompt: list[int], **options: object) -> Result:
        """Decode a prompt's token ids; `options` are additional arguments of transformers' `generate`."""
        ids = torch.tensor([prompt], device=self._model.device)
        self._num_passes = 0
        clock = _FirstTokenClock()
        started = time.perf_counter()
        with torch.inference_mode(), quiet():  # transformers warns about decoding without an end-of-sequence token
            output = self._generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                min_new_tokens=None,
                max_new_tokens=self._max_new_tokens,
                eos_token_id=self._eos,
                stop_strings=None,
                pad_token_id=0,
                streamer=clock,
                **options,
            )
        token_ids = output[0, len(prompt) :].tolist()
        seconds = time.perf_counter() - started
        prefill_seconds = None if clock.seconds is None else clock.seconds - started
        return Result(token_ids, {None: seconds}, self._num_passes, None, prefill_seconds)


def replica_model(config: BenchConfig) -> tuple[ModelRunner, Calibration]:
    device = choose_device(config.device, 0)
    model, _ = ready_model(config, device, batches=False)
    return model, Calibration(model, Group.alone(), config.cache_dir)


def huggingface_methods(config: BenchConfig, names: list[str], eos_token_ids: frozenset[int]) -> dict[str, Decode]:
    """Return transformers' methods among `names`, by name."""
    options: dict[str, dict[str, Any]] = {
        "hf": {},
        "hf_compiled": {"cache_implementation": "static"},  # transformers then compiles automatically on CUDA
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": NUM_COPIED},
    }
    wanted = [name for name in names if name in options]
    if not wanted:
        return {}
    loaded = load_model(config.model, choose_device(config.device, 0), config.dtype)
    model = HuggingFace(loaded, config.max_new_tokens, eos_token_ids)
    return {name: partial(model.decode, **options[name]) for name in wanted}


def runtime_methods(config: BenchConfig, runtime: LookaheadRuntime, names: list[str]) -> dict[str, Decode]:
    """Return the methods among `names` that run on the runtime's replicas, by name."""
    settings = {"plain": PLAIN, "paper": PAPER, "default": config.lookahead}

    def decode(prompt: list[int], lookahead: LookaheadConfig) -> Result:
        started = time.perf_counter()
        generation = runtime.generate(
            prompt, config.max_new_tokens, eos=config.stops_at_eos, stop=[], lookahead=lookahead, sampling=GREEDY
        )
        seconds = time.perf_counter() - started
        times = generation.times
        return Result(
            token_ids=generation.token_ids,
            seconds={None: seconds},
            num_steps=generation.steps,
            step_tokens=generation.step_tokens,
            prefill_seconds=generation.prefill_seconds,
            device_seconds=times.forward + times.exchange,
            other_seconds=times.other,
        )

    return {name: partial(decode, lookahead=settings[name]) for name in names if name in settings}


def critical_path_methods(config: BenchConfig, degrees: list[int], eos_token_ids: frozenset[int]) -> dict[str, Decode]:
    """Return methods named `critical path, DEGREE`, which measure default decoding at each LP degree."""
    if not degrees:
        return {}
    model, calibration = replica_model(config)

    def decode(prompt: list[int], runner: CriticalPathRunner) -> Result:
        path = runner.run(Request(tuple(prompt), config.lookahead, config.max_new_tokens, eos_token_ids, GREEDY))
        seconds: dict[float | None, float] = {each: path.seconds(1e-6 * each) for each in config.exchange_us}
        return Result(
            token_ids=path.token_ids,
            seconds=seconds,
            num_steps=path.num_steps,
            step_tokens=path.step_tokens,
            prefill_seconds=path.prefill_seconds,
            device_seconds=path.forward_seconds,
            other_seconds=path.other_seconds,
        )

    runners = {degree: CriticalPathRunner(model, calibration, degree) for degree in degrees}
    return {f"critical path, {degree}": partial(decode, runner=runner) for degree, runner in runners.items()}
