"""A file of prompts in, a file of results out: one JSON object a line, written as each finishes, resumed if cut off."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.sampling import MAX_SEED
from lp_runtime.distributed.context import restarted_by_torchrun
from lp_runtime.engine.generation import Generation
from lp_runtime.engine.request import Request
from lp_runtime.entrypoints.generate import check_num_samples, request_options
from lp_runtime.errors import ConfigError, LookaheadError, RequestError
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Job, Scheduler
from lp_runtime.utils.prompt_file import Prompt

MAX_AHEAD = 4  # prompts a replica that are begun, or wait, for each that can run, before the first of them is written


def generate_file(runtime: LookaheadRuntime, config: GenerateConfig, prompts: list[Prompt]) -> None:
    """Decode the prompts that `config.output` has no result of yet, with a progress bar on the terminal.

    Raises:
        ConfigError: if the output cannot be written, or holds results of other settings or prompts.
        RequestError: if any prompt cannot be decoded; names its line. Checked before the first one is.
    """
    options = request_options(config)
    check_num_samples(runtime, config)
    for prompt in prompts:
        try:
            request = runtime.request(prompt.value, config.max_new_tokens, **options)
        except RequestError as error:
            raise RequestError(f"{config.prompts} line {prompt.line}: {error}") from error
    free = ("gpus",) if restarted_by_torchrun() else ()
    output = OutputFile(Path(config.output), _settings(runtime, config), request.sampling.seed, free)
    work = [(prompt, sample) for prompt in prompts for sample in range(config.num_samples)]
    done = output.resume() & {(prompt.index, sample) for prompt, sample in work}

    def make_request(prompt: Prompt, sample: int) -> Request:
        more = dict(options)
        if output.seed is not None:  # each prompt has noise of its own
            more["sampling"] = replace(config.sampling, seed=(output.seed + prompt.index) % (MAX_SEED + 1))
        return runtime.request(prompt.value, config.max_new_tokens, sample=sample, **more)

    left = [(prompt, sample) for prompt, sample in work if (prompt.index, sample) not in done]
    tokens = steps = 0
    started = time.perf_counter()
    with output, tqdm(total=len(work), initial=len(done), unit="prompt", file=sys.stderr) as bar:
        requests = (make_request(*each) for each in left)
        # Closed here, whatever happens: before the replicas are.
        with contextlib.closing(_generations(runtime, config, requests)) as generations:
            for (prompt, sample), generation in zip(left, generations, strict=True):
                output.write(_result(prompt, sample, generation))
                tokens, steps = tokens + generation.num_tokens, steps + generation.steps
                speed = tokens / (time.perf_counter() - started)
                bar.set_postfix_str(f"{speed:.1f} tokens/s, S {tokens / steps:.2f}")
                bar.update()


def _generations(
    runtime: LookaheadRuntime, config: GenerateConfig, requests: Iterable[Request]
) -> Generator[Generation]:
    """What comes of each request, in their order."""
    num_ahead = MAX_AHEAD * runtime.num_replicas * (1 if config.policy == "latency" else config.max_batch)
    with Scheduler(runtime, num_ahead, config.policy, config.max_batch) as scheduler:
        jobs: deque[Job] = deque()
        for request in requests:
            jobs.append(scheduler.submit(request))
            if len(jobs) >= num_ahead:
                yield jobs.popleft().result()
        while jobs:
            yield jobs.popleft().result()


def _result(prompt: Prompt, sample: int, generation: Generation) -> dict:
    result = {
        "index": prompt.index,
        "sample": sample,
        "prompt": prompt.value,
        "text": generation.text,
        "token_ids": generation.token_ids,
        "num_tokens": generation.num_tokens,
        "steps": generation.steps,
        "compression_ratio": generation.compression_ratio,
        "step_tokens": generation.step_tokens,
        "seconds": generation.seconds,
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
    }
    if generation.logprobs is not None:
        result["logprobs"] = generation.logprobs
    return result


def _settings(runtime: LookaheadRuntime, config: GenerateConfig) -> dict:
    """What must not change between the runs that fill one output file: all but how many prompts are taken."""
    with open(config.prompts, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    location = Path(config.model.location)
    return {
        "model": str(location.resolve()) if location.is_dir() else config.model.location,
        "loading": asdict(config.model) | {"path": None},
        "prompts": digest,
        "prompt_field": config.prompt_field,
        "ids": config.ids,
        "max_new_tokens": config.max_new_tokens,
        "stop": config.stop,
        "max_time": config.max_time,
        "logprobs": config.logprobs,
        "eos": config.eos,
        "dtype": runtime.info.dtype,
        "exactness": [config.exactness, config.strict_tokens] if config.exactness == "strict" else config.exactness,
        "device": runtime.info.device.split(":")[0],
        "gpus": runtime.num_replicas,
        "lookahead": asdict(config.lookahead),
        "sampling": asdict(config.sampling),
    }


def check_output(path: Path) -> None:
    """Refuse, before anything is started, an output that cannot be written or is not ours.

    Raises:
        ConfigError: says why.
    """
    if path.is_dir():
        raise ConfigError(f"output={path}: cannot be written: is a directory")
    if not path.parent.is_dir():
        raise ConfigError(f"output={path}: cannot be written: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"output={path}: cannot be written: no permission")
    if path.is_file() and path.stat().st_size and not _settings_path(path).exists():
        raise ConfigError(f"output={path}: exists and was not written by lp-generate; it is left as it is")


def _settings_path(output: Path) -> Path:
    return output.with_name(output.name + ".settings")


class OutputFile:
    """The results, and beside them PATH.settings with what made them.

    Args:
        path: the results' file.
        settings: what made them.
        seed: of the first prompt's noise; None if decoding is greedy.
        free: settings that need not be those of the run that began the file.

    Attributes:
        seed: the same; of the run that began the file where it is resumed.
    """

    def __init__(self, path: Path, settings: dict, seed: int | None, free: tuple[str, ...] = ()):
        self._path = path
        self._free = free
        self._settings_path = _settings_path(path)
        self._settings = json.loads(json.dumps(settings, default=str))  # as they will be read again
        self.seed = seed
        self._file = None

    def resume(self) -> set[tuple[int, int]]:
        """Open for appending; returns the (index, sample) pairs that have a result already.

        Raises:
            ConfigError: see generate_file.
        """
        path = self._path
        try:
            if path.is_file() and path.stat().st_size:
                self._check_settings()
                done = self._read_done()
            else:
                done = set()
                with open(path, "a"):  # may this be written at all? asked before anything is
                    pass
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
        for key, value in self._settings.items():
            if before.get(key) != value and key not in self._free:
                raise ConfigError(
                    f"output={self._path}: holds results of other settings"
                    f" ({key} was {json.dumps(before.get(key))}, is {json.dumps(value)}); choose another output"
                )
        self.seed = before.get("seed")

    def _read_done(self) -> set[tuple[int, int]]:
        """What has a whole line; a last line that was cut off is dropped from the file."""
        done: set[tuple[int, int]] = set()
        whole = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    result = json.loads(line)
                    done.add((int(result["index"]), int(result["sample"])))
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"output={self._path} line {number}: is no result of lp-generate") from error
                whole += len(line)
        os.truncate(self._path, whole)
        return done

    def write(self, result: dict) -> None:
        """Append one result; it is on the disk when this returns."""
        try:
            self._file.write(json.dumps(result, ensure_ascii=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise LookaheadError(f"output={self._path}: writing failed: {error.strerror or error}") from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *exc_info) -> None:
        self._file.close()
