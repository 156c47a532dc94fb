"""lp-generate with a file of prompts: results in a JSON-lines file; an interrupted run is resumed."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.sampling import MAX_SEED
from lp_runtime.distributed.environment import restarted_by_torchrun
from lp_runtime.entrypoints.generate import check_num_samples, request_options
from lp_runtime.entrypoints.output_file import Key, OutputFile, answer_of, without_tables
from lp_runtime.errors import ConfigError, RequestError
from lp_runtime.model.tokenizer import conversation
from lp_runtime.replica.request_builder import SEED_BITS
from lp_runtime.request.generation import Generation
from lp_runtime.request.request import Request
from lp_runtime.request.request_options import RequestOptions
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.job import Job
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.utils.prompt_file import Prompt

LOG_SECONDS = 30.0  # between two lines of progress if stderr is not a terminal
MAX_AHEAD = 4  # submitted jobs per job that can run: enough that no replica waits for the file
# Settings of the command that determine the results, and parts of a result.
SETTINGS = ("prompt_field", "ids", "chat", "turns", "max_new_tokens", "stop", "max_time", "logprobs", "eos")
RESULT = ("text", "token_ids", "num_tokens", "steps", "compression_ratio", "step_tokens", "seconds", "finish_reason")


class Item(NamedTuple):
    """One line of the output: a prompt, and the indices of its sample and turn, from 0."""

    prompt: Prompt
    sample: int
    turn: int

    @property
    def key(self) -> Key:
        return self.prompt.index, self.sample, self.turn


def generate_file(runtime: LookaheadRuntime, config: GenerateConfig, prompts: list[Prompt]) -> None:
    """Decode the prompts that have no result in `config.output` yet, and show progress on stderr."""
    options = request_options(config)
    check_num_samples(runtime, config)
    seed = _check_prompts(runtime, config, prompts, options)
    free = ("gpus",) if restarted_by_torchrun() else ()
    assert config.output is not None  # GenerateConfig requires it with `prompts`
    output = OutputFile(Path(config.output), _settings(runtime, config), seed, free)
    rounds = rounds_of(config, prompts)
    wanted = {item.key for items in rounds for item in items}
    answers = {key: text for key, text in output.resume().items() if key in wanted}
    tokens = steps = 0
    ended = _EndedConversations()
    started = time.perf_counter()
    with output, _Progress(len(wanted), len(answers)) as progress:
        for items in rounds:
            left = [item for item in items if item.key not in answers]
            requests = ended.others(
                left, lambda item: item_request(runtime, config, item, answers, output.seed, options)
            )
            # Close the generator, and with it the scheduler, before the replicas, even after an error.
            with contextlib.closing(_generations(runtime, config, requests)) as generations:
                for item, generation in generations:
                    result = _result(item, generation, has_turn=config.turns == "all")
                    output.write(result)
                    answers[item.key] = answer_of(result)
                    tokens, steps = tokens + generation.num_tokens, steps + generation.steps
                    speed = tokens / (time.perf_counter() - started)
                    progress.add_one(f"{speed:.1f} tokens/s, S {tokens / steps:.2f}")
    ended.check()


class _EndedConversations:
    """Conversations with a turn that cannot be decoded: one that has outgrown the model's context, for example."""

    def __init__(self) -> None:
        self._errors: dict[tuple[int, int], RequestError] = {}  # by index of the prompt, and sample

    def others(self, items: Iterable[Item], request_of: Callable[[Item], Request]) -> Iterator[tuple[Item, Request]]:
        """Yield the items that can be decoded, with their requests. A first turn that cannot be raises its error."""
        for item in items:
            conversation = item.prompt.index, item.sample
            if conversation in self._errors:
                continue
            try:
                request = request_of(item)
            except RequestError as error:
                if item.turn == 0:
                    raise
                self._errors[conversation] = error
            else:
                yield item, request

    def check(self) -> None:
        """Raise the first error, if there is any; all other conversations have been decoded."""
        for error in self._errors.values():
            rest = f" (and {len(self._errors) - 1} more conversations ended early)" if len(self._errors) > 1 else ""
            raise RequestError(f"{error}{rest}; all others were decoded") from error


class _Progress:
    """Progress on stderr: a bar on a terminal; elsewhere, as in a job's log, a line every LOG_SECONDS."""

    def __init__(self, total: int, done: int):
        self._bar = tqdm(total=total, initial=done, unit="prompt", file=sys.stderr, disable=None)
        self._total, self._done = total, done
        self._next_line = 0.0  # time.monotonic() from which on the next line may be written

    def __enter__(self) -> _Progress:
        if self._done:
            self._write("prompts were decoded before")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def add_one(self, figures: str) -> None:
        """Count one result; `figures` describe all results so far."""
        self._done += 1
        self._bar.set_postfix_str(figures)
        self._bar.update()
        if self._done == self._total or time.monotonic() >= self._next_line:
            self._write(f"prompts, {figures}")
            self._next_line = time.monotonic() + LOG_SECONDS

    def _write(self, what: str) -> None:
        if self._bar.disable:
            print(f"{self._done}/{self._total} {what}", file=sys.stderr, flush=True)


def _check_prompts(
    runtime: LookaheadRuntime, config: GenerateConfig, prompts: list[Prompt], options: RequestOptions
) -> int | None:
    """Check that all prompts can be decoded; return the sampling seed, None if decoding is greedy."""
    for prompt in prompts:
        try:
            request = turn_request(runtime, config, prompt, (), options)
        except RequestError as error:
            raise RequestError(f"{prompt.where}: {error}") from error
    return request.sampling.seed


def _generations(
    runtime: LookaheadRuntime, config: GenerateConfig, requests: Iterable[tuple[Item, Request]]
) -> Generator[tuple[Item, Generation]]:
    num_ahead = MAX_AHEAD * runtime.num_replicas * (1 if config.policy == "latency" else config.max_batch)
    with Scheduler(runtime, num_ahead, config.policy, config.max_batch) as scheduler:
        jobs: deque[tuple[Item, Job]] = deque()
        for item, request in requests:
            jobs.append((item, scheduler.submit(request)))
            if len(jobs) >= num_ahead:
                first, job = jobs.popleft()
                yield first, job.result()
        for first, job in jobs:
            yield first, job.result()


def _result(item: Item, generation: Generation, has_turn: bool) -> dict[str, object]:
    prompt = item.prompt
    result: dict[str, object] = {
        "index": prompt.index,
        "sample": item.sample,
        "prompt": prompt.turns[item.turn] if item.turn else prompt.value,
        **{name: getattr(generation, name) for name in RESULT},
        "seed": generation.seed,
    }
    if has_turn:
        result["turn"] = item.turn
    if generation.message is not None:
        result["message"] = generation.message
    if generation.logprobs is not None:
        result["logprobs"] = generation.logprobs
    return result


def rounds_of(config: GenerateConfig, prompts: list[Prompt]) -> list[list[Item]]:
    """Group the items by turn, because the prompts of a turn contain the answers of the turns before it."""
    num_turns = max(len(prompt.turns) for prompt in prompts) if config.turns == "all" else 1
    samples = range(config.num_samples)
    return [
        [Item(prompt, sample, turn) for prompt in prompts if turn < (len(prompt.turns) or 1) for sample in samples]
        for turn in range(num_turns)  # token ids have no turns
    ]


def item_request(
    runtime: LookaheadRuntime,
    config: GenerateConfig,
    item: Item,
    answers: Mapping[Key, str],
    seed: int | None,
    options: RequestOptions,
) -> Request:
    """Build an item's request, with the answers to earlier turns. A RequestError names line and turn."""
    more = options.copy()
    more["sample"] = item.sample
    if seed is not None:  # each turn of each prompt has a different seed
        own = seed + item.prompt.index + (item.turn << SEED_BITS)
        more["sampling"] = replace(config.sampling, seed=own % (MAX_SEED + 1))
    before = [answers[item.prompt.index, item.sample, turn] for turn in range(item.turn)]
    try:
        return turn_request(runtime, config, item.prompt, before, more)
    except RequestError as error:
        raise RequestError(f"{item.prompt.where}, turn {item.turn + 1}: {error}") from error


def turn_request(
    runtime: LookaheadRuntime, config: GenerateConfig, prompt: Prompt, before: Sequence[str], options: RequestOptions
) -> Request:
    """Build the request of a prompt's turn; `before` has the answers to the turns before it."""
    if not config.chat:
        return runtime.request(prompt.value, config.max_new_tokens, **options)
    messages: RequestOptions = {**options, "messages": conversation(prompt.turns, before)}
    return runtime.request(None, config.max_new_tokens, **messages)


def _settings(runtime: LookaheadRuntime, config: GenerateConfig) -> dict[str, object]:
    """Return the settings that must not change between runs that fill one output file."""
    assert config.prompts is not None  # this module is used only with a file of prompts
    with open(config.prompts, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    location = Path(config.model.location)
    return {
        "model": str(location.resolve()) if location.is_dir() else config.model.location,
        "loading": asdict(config.model) | {"path": None},
        "prompts": digest,
        **{name: getattr(config, name) for name in SETTINGS},
        "dtype": runtime.info.dtype,
        "exactness": [config.exactness, config.strict_tokens] if config.exactness == "strict" else config.exactness,
        "device": runtime.info.device.split(":")[0],
        "gpus": runtime.num_replicas * runtime.gpus_per_replica,
        "lookahead": without_tables(asdict(config.lookahead)),
        "sampling": asdict(config.sampling),
        **({"constraint": config.constraint.key} if config.constraint.kind else {}),
        # A split model rounds differently.
        **({} if runtime.gpus_per_replica == 1 else {"gpus_per_replica": runtime.gpus_per_replica}),
    }


def check_prompts_file(path: str) -> None:
    """Raise ConfigError if prompts are not a regular file: they are read again for the settings' digest."""
    file = Path(path)
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ConfigError(f"prompts={path}: must be a regular file, which can be read twice, if output is given")
