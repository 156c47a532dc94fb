"""lp-generate with a file of prompts: results in a JSON-lines file; an interrupted run is resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import MAX_SEED, SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.distributed.context import restarted_by_torchrun
from lp_runtime.entrypoints.generate import check_num_samples, request_options
from lp_runtime.errors import ConfigError, LookaheadError, RequestError
from lp_runtime.model.tokenizer import conversation
from lp_runtime.replica.request_builder import SEED_BITS, RequestOptions
from lp_runtime.request.generation import Generation
from lp_runtime.request.request import Request
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.job import Job
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.utils.json_line import to_json
from lp_runtime.utils.prompt_file import Prompt

GROUPS = {"loading": ModelConfig, "lookahead": LookaheadConfig, "sampling": SamplingConfig}  # in a file of settings
LOG_SECONDS = 30.0  # between two lines of progress if stderr is not a terminal
MAX_AHEAD = 4  # submitted jobs per job that can run: enough that no replica waits for the file
# Settings of the command that determine the results, and parts of a result.
SETTINGS = ("prompt_field", "ids", "chat", "turns", "max_new_tokens", "stop", "max_time", "logprobs", "eos")
RESULT = ("text", "token_ids", "num_tokens", "steps", "compression_ratio", "step_tokens", "seconds", "finish_reason")

Key = tuple[int, int, int]  # identifies a result: index of the prompt, sample, turn


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
                    output.write(_result(item, generation, has_turn=config.turns == "all"))
                    answers[item.key] = generation.text
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
            raise RequestError(f"{config.prompts} line {prompt.line}: {error}") from error
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
        raise RequestError(f"{config.prompts} line {item.prompt.line}, turn {item.turn + 1}: {error}") from error


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
        "lookahead": _without_tables(asdict(config.lookahead)),
        "sampling": asdict(config.sampling),
        **({"constraint": config.constraint.key} if config.constraint.kind else {}),
        # A split model rounds differently.
        **({} if runtime.gpus_per_replica == 1 else {"gpus_per_replica": runtime.gpus_per_replica}),
    }


def check_output(path: Path) -> None:
    """Raise ConfigError, before replicas start, if an output is not writable or not lp-generate's own."""
    try:
        if path.is_dir():
            raise ConfigError(f"output={path}: cannot be written: is a directory")
        if not path.parent.is_dir():
            raise ConfigError(f"output={path}: cannot be written: there is no directory {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"output={path}: cannot be written: no permission")
        if _is_kept(path) and path.exists() and path.stat().st_size and not _settings_path(path).exists():
            raise ConfigError(f"output={path}: exists and was not written by lp-generate; choose another output")
    except OSError as error:  # for example a name that is too long, or a folder without permission
        raise ConfigError(f"output={path}: cannot be written: {error.strerror}") from error


def _is_kept(path: Path) -> bool:
    """Whether an output is a regular file, which is resumed and gets a file of settings: no pipe or standard output."""
    is_stream = str(path) in ("/dev/stdout", "/dev/stderr") or str(path.parent) in ("/dev/fd", "/proc/self/fd")
    return not is_stream and (path.is_file() or not path.exists())


def check_prompts(path: str) -> None:
    """Raise ConfigError if prompts are not a regular file: they are read again for the settings' digest."""
    file = Path(path)
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ConfigError(f"prompts={path}: must be a regular file, which can be read twice, if output is given")


def _settings_path(output: Path) -> Path:
    return output.with_name(output.name + ".settings")


def _setting_of(settings: Mapping[str, Any], key: str) -> object:
    """Return a setting of a file; a setting that the file's version did not have yet has its default."""
    value = settings.get(key, getattr(GenerateConfig, key, None))
    if key in GROUPS and isinstance(value, dict):
        value = json.loads(json.dumps(asdict(GROUPS[key]()) | value, default=str))
    return _without_tables(value) if key == "lookahead" and isinstance(value, dict) else value


def _without_tables(lookahead: dict[str, Any]) -> dict[str, Any]:
    """Return drafting settings without draft tables and corpus, whose content another run may not have."""
    return {name: value for name, value in lookahead.items() if not name.startswith(("draft_tables", "corpus"))}


class OutputFile:
    """A file of results, with the settings that produced them in PATH.settings."""

    def __init__(self, path: Path, settings: Mapping[str, object], seed: int | None, free: tuple[str, ...] = ()):
        self._path = path
        self._free = free  # names of settings that may differ from the run that began the file
        self._settings_path = _settings_path(path)
        self._settings = json.loads(json.dumps(settings, default=str))  # normalized to compare with those of a file
        # Of the first prompt, None if decoding is greedy; after `resume`, of the run that began the file.
        self.seed = seed
        self._is_kept = _is_kept(path)
        self._file: TextIO | None = None

    def resume(self) -> dict[Key, str]:
        """Open the file for appending; return the texts of the results that it already has."""
        path = self._path
        done: dict[Key, str] = {}
        try:
            if self._is_kept and path.is_file() and path.stat().st_size:
                self._check_settings()
                done = self._read_done()
            elif self._is_kept:
                path.open("a").close()  # raises before the settings are written if the output is not writable
                self._settings_path.write_text(json.dumps(self._settings | {"seed": self.seed}, indent=1) + "\n")
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise ConfigError(f"output={path}: cannot be written: {error.strerror or error}") from error
        return done

    def _check_settings(self) -> None:
        try:
            before = dict(json.loads(self._settings_path.read_text()))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"output={self._path}: {self._settings_path.name} is not readable") from error
        for key in [*self._settings, *before]:  # some settings are left out where they are not used
            was, value = _setting_of(before, key), self._settings.get(key)
            if was != value and key not in self._free and key != "seed":
                raise ConfigError(
                    f"output={self._path}: holds results of other settings"
                    f" ({key} was {json.dumps(was)}, is {json.dumps(value)}); choose another output"
                )
        self.seed = before.get("seed")

    def _read_done(self) -> dict[Key, str]:
        """Return the texts of the file's results; remove an incomplete last line from the file."""
        done: dict[Key, str] = {}
        num_bytes = 0  # of complete lines
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    result = json.loads(line)
                    done[int(result["index"]), int(result["sample"]), int(result.get("turn", 0))] = str(result["text"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"output={self._path} line {number}: is not a result of lp-generate") from error
                num_bytes += len(line)
        os.truncate(self._path, num_bytes)
        return done

    def write(self, result: Mapping[str, object]) -> None:
        assert self._file is not None  # opened by `resume`
        try:
            self._file.write(to_json(result) + "\n")
            self._file.flush()
            if self._is_kept:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise self._write_failure(error) from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        """Close the file; fail if buffered text cannot be written, unless another error has ended the block."""
        assert self._file is not None  # opened by `resume`
        try:
            self._file.close()
        except OSError as error:  # close() retries text that `write` failed to write; its error was reported then
            if kind is None:
                raise self._write_failure(error) from error

    def _write_failure(self, error: OSError) -> LookaheadError:
        return LookaheadError(f"output={self._path}: writing failed: {error.strerror or error}")
