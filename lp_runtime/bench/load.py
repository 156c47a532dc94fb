"""lp-bench url=...: puts any server that speaks the OpenAI API under load, and reports latencies and throughput.

Requests come from a number of clients, each of which asks again when it has its answer (a closed loop), or at random
moments, however many are being answered (Poisson arrivals, an open loop). In an open loop latencies count from the
moment at which a request was to be sent.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lp_runtime.bench.prompts import read_sources
from lp_runtime.config.checks import MAX_SECONDS
from lp_runtime.config.commands import BenchConfig
from lp_runtime.errors import ConfigError, LookaheadError, ReplicaError, RequestError, unforeseen_as
from lp_runtime.utils.openai_client import REASONING_FIELDS, Endpoint, choices_of, delta_of

CLIENTS = 8  # of a closed loop, if the settings do not say
PERCENTILES = (50, 90, 99)
DELTA_FIELDS = ("content", *REASONING_FIELDS, "refusal", "tool_calls")  # of a chat, in which the model's tokens come
OF_METHODS = {"methods": [], "degrees": [], "rounds": 1, "threads": None}  # settings without effect on a load, unset
Ask = Callable[[int, float], "Answer"]  # of a request's number, and when it was to be sent


@dataclass(frozen=True)
class Answer:
    """How one request went.

    Attributes:
        num_tokens: new tokens, as the server counts them; where it does not, the pieces in which the answer came.
        first_token: seconds until the first piece, of text, reasoning or a tool call; None if none came.
        inter_token: seconds between tokens, mean; None for fewer than two.
        seconds: until the end.
        error: what went wrong, in a line; None if nothing did.
    """

    num_tokens: int
    first_token: float | None
    inter_token: float | None
    seconds: float
    error: str | None = None


@dataclass
class Load:
    """What a load has found.

    Attributes:
        seconds: from the first request to the last answer.
        answers: by request, in the order in which they ended.
    """

    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        """Return counts, throughput, and percentiles of milliseconds; those of what no answer has are left out."""
        good = [answer for answer in self.answers if answer.error is None]
        num_tokens = sum(answer.num_tokens for answer in good)
        found: dict[str, object] = {
            "requests": len(self.answers),
            "errors": len(self.answers) - len(good),
            "seconds": self.seconds,
            "new tokens": num_tokens,
            "requests/s": len(good) / self.seconds,
            "tokens/s": num_tokens / self.seconds,
        }
        for name, values in (
            ("time to first token ms", [each.first_token for each in good]),
            ("inter-token time ms", [each.inter_token for each in good]),
            ("request ms", [each.seconds for each in good]),
        ):
            if known := sorted(1000 * value for value in values if value is not None):
                found[name] = {f"p{each}": percentile(known, each) for each in PERCENTILES}
        return found

    def markdown(self) -> str:
        """Return the summary as tables, and the errors by what they say."""
        summary = self.summary()
        plain = {name: value for name, value in summary.items() if not isinstance(value, dict)}
        rows = ["| " + " | ".join(plain) + " |", "|" + " --- |" * len(plain)]
        rows.append(
            "| "
            + " | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in plain.values())
            + " |"
        )
        rows += [
            "",
            "| ms | " + " | ".join(f"p{each}" for each in PERCENTILES) + " |",
            "|" + " --- |" * (1 + len(PERCENTILES)),
        ]
        for name, value in summary.items():
            if isinstance(value, dict):
                rows.append(
                    f"| {name.removesuffix(' ms')} | " + " | ".join(f"{each:.1f}" for each in value.values()) + " |"
                )
        errors = Counter(answer.error for answer in self.answers if answer.error is not None)
        rows += [f"\n{number} x {error}" for error, number in errors.most_common()]
        return "\n".join(rows)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of some sorted values that at least `percent` percent of them do not exceed."""
    rank = -(-len(values) * percent // 100)
    return values[max(0, int(rank) - 1)]


def put_under_load(config: BenchConfig) -> None:
    """Put the server of the settings under load, print a table, and write the report if an output folder is given.

    Raises:
        ConfigError: a setting does not fit, or the report cannot be written.
        LaunchError: the server cannot be reached.
        RequestError: the server refuses to say what models it has.
        ReplicaError: no request has been answered.
    """
    assert config.url is not None
    _check(config)
    endpoint = Endpoint.of(config.url, config.api_key, config.api_key_file)
    prompts = read_sources(config)
    if config.output is not None:
        _make(Path(config.output))
    name = config.served_name or endpoint.model()
    bodies = [_body(prompt.value, name, config) for prompt in prompts]
    route = "chat/completions" if config.chat else "completions"

    def ask(number: int, due: float) -> Answer:
        answer = _ask(endpoint, route, bodies[number % len(bodies)], due)
        with contextlib.suppress(OSError):  # the reader of stderr may have gone
            if not sys.stderr.isatty():  # a run that is cut short has told what it had
                print(f"request {number}: {answer.error or f'{answer.seconds:.2f} s'}", file=sys.stderr, flush=True)
        return answer

    if config.rate is None:
        load = closed_loop(ask, config.num_requests, config.concurrency or CLIENTS)
    else:
        load = open_loop(ask, config.num_requests, config.rate, config.load_seed)
    print(load.markdown())
    if config.output is not None:
        _write(Path(config.output), load, config, name)
    if all(answer.error is not None for answer in load.answers):
        raise ReplicaError(f"url={config.url}: no request was answered")


def _check(config: BenchConfig) -> None:
    """Refuse settings that have no effect on a load, and a load that would never end.

    Raises:
        ConfigError: names the setting.
    """
    for name, unset in OF_METHODS.items():
        if (value := getattr(config, name)) != unset:
            raise ConfigError(f"{name}={value}: has no effect with url")
    if config.rate is not None and config.num_requests - 1 > config.rate * MAX_SECONDS:
        raise ConfigError(
            f"rate={config.rate}: must be higher; {config.num_requests} requests would take over {MAX_SECONDS} seconds"
        )


def _body(prompt: str | list[int], name: str, config: BenchConfig) -> dict[str, object]:
    """Return the fields of a request, without `stream`."""
    common: dict[str, object] = {"model": name, "max_tokens": config.max_new_tokens, "temperature": 0}
    common["stream_options"] = {"include_usage": True}
    if config.eos is False:  # sent only where it is asked for: servers other than vLLM and this one may refuse it
        common["ignore_eos"] = True
    if config.chat:
        return {**common, "messages": [{"role": "user", "content": prompt}]}
    return {**common, "prompt": prompt}


def _ask(endpoint: Endpoint, route: str, body: dict[str, object], due: float) -> Answer:
    """Ask, and measure from `due` on, a time of time.perf_counter's clock. No exception leaves the function: each is
    the answer's error."""
    first = last = None
    num_pieces, num_tokens, error = 0, None, None
    try:
        with unforeseen_as(RequestError, f"url={endpoint.url}: the answer cannot be read"):
            for event in endpoint.stream(route, body):
                if any(map(_has_tokens, choices_of(event))):
                    last = time.perf_counter()
                    first = first or last
                    num_pieces += 1
                num_tokens = num_tokens if (counted := _counted(event)) is None else counted
    except LookaheadError as reason:
        error = str(reason)
    total = num_pieces if num_tokens is None else num_tokens
    between = (last - first) / (total - 1) if first is not None and last is not None and total > 1 else None
    return Answer(total, None if first is None else first - due, between, time.perf_counter() - due, error)


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Return whether a choice brings tokens of the model's: text, reasoning, or a part of a tool call."""
    delta = delta_of(choice)
    return bool(choice.get("text")) or any(delta.get(name) for name in DELTA_FIELDS)


def _counted(event: dict[str, Any]) -> int | None:
    """Return how many new tokens an event's `usage` says there are; None if it does not say."""
    usage = event.get("usage")
    number = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return number if type(number) is int and number >= 0 else None


def closed_loop(ask: Ask, num_requests: int, num_clients: int) -> Load:
    """Have clients ask, each again when it has its answer, until all requests were asked."""
    numbers, lock, load = iter(range(num_requests)), threading.Lock(), Load()

    def next_number() -> int | None:
        with lock:
            return next(numbers, None)

    def work() -> None:
        while (number := next_number()) is not None:
            load.answers.append(ask(number, time.perf_counter()))

    started = time.perf_counter()
    _join([_started(work) for _ in range(min(num_clients, num_requests))])
    load.seconds = time.perf_counter() - started
    return load


def open_loop(ask: Ask, num_requests: int, rate: float, seed: int) -> Load:
    """Ask at moments whose distances are exponentially distributed, `rate` a second on average."""
    load, threads, started = Load(), [], time.perf_counter()

    def work(number: int, due: float) -> None:
        load.answers.append(ask(number, due))

    for number, moment in enumerate(itertools.islice(arrivals(rate, seed), num_requests)):
        due = started + moment
        time.sleep(max(0.0, due - time.perf_counter()))
        threads.append(_started(functools.partial(work, number, due)))
    _join(threads)
    load.seconds = time.perf_counter() - started
    return load


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the moments, in seconds, of a Poisson process of `rate` a second; the first is 0."""
    rng, now = random.Random(seed), 0.0
    while True:
        yield now
        now += rng.expovariate(rate)


def _started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def _write(folder: Path, load: Load, config: BenchConfig, name: str) -> None:
    """Write load.md, and load.json with every answer.

    Raises:
        ConfigError: they cannot be written.
    """
    asked = {
        each: getattr(config, each) for each in ("url", "rate", "concurrency", "max_new_tokens", "prompts", "chat")
    }
    report = {"model": name, **asked, **load.summary(), "answers": [asdict(answer) for answer in load.answers]}
    try:
        (folder / "load.md").write_text(load.markdown() + "\n")
        (folder / "load.json").write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"output={folder}: {error.strerror or error}") from error


def _make(folder: Path) -> None:
    """Make the report's folder.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output={folder}: {error.strerror or error}") from error
