"""lp-bench url=...: load test of an OpenAI-compatible server, with latencies and throughput.

In a closed loop, each client sends a request when its previous one is answered. In an open loop, requests arrive at
random (Poisson), regardless of how many are running; latencies count from the time at which a request was due.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from lp_runtime.bench.output import check_folder, markdown_table, report
from lp_runtime.bench.prompts import read_sources
from lp_runtime.config.checks import MAX_SECONDS
from lp_runtime.config.commands import BenchConfig
from lp_runtime.errors import ConfigError, LookaheadError, ReplicaError, RequestError, unforeseen_as
from lp_runtime.utils.openai_client import REASONING_FIELDS, Endpoint, choices_of, delta_of

CLIENTS = 8  # default number of clients of a closed loop
PERCENTILES = (50, 90, 99)
DELTA_FIELDS = ("content", *REASONING_FIELDS, "refusal", "tool_calls")  # fields of a chat's delta with model output
OF_METHODS = {"methods": [], "degrees": [], "rounds": 1, "threads": None}  # defaults of settings that loads ignore
SHOWN_SETTINGS = ("url", "rate", "concurrency", "max_new_tokens", "prompts", "chat")  # in load.json
Ask = Callable[[int, float], "Answer"]  # called with a request's number and the time.perf_counter() at which it is due


@dataclass(frozen=True)
class Answer:
    """Measurements of one request, in seconds."""

    num_tokens: int  # new tokens by the server's count; if it reports none, the number of streamed pieces
    first_token: float | None  # until the first piece of text, reasoning or a tool call; None if none arrived
    inter_token: float | None  # mean between tokens; None for fewer than two
    seconds: float  # until the end of the answer
    error: str | None = None  # one line


@dataclass
class Load:
    """Results of a load test: its duration, and the answers in the order in which they ended."""

    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        """Return counts, throughput, and percentiles in milliseconds of the latencies that were measured."""
        good = [answer for answer in self.answers if answer.error is None]
        num_tokens = sum(answer.num_tokens for answer in good)
        entries: dict[str, object] = {
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
                entries[name] = {f"p{each}": percentile(known, each) for each in PERCENTILES}
        return entries

    def markdown(self) -> str:
        """Return the summary as Markdown tables, and the number of each distinct error."""
        summary = self.summary()
        plain = {name: value for name, value in summary.items() if not isinstance(value, dict)}
        counts = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in plain.values()]
        latencies = [
            [name.removesuffix(" ms"), *(f"{each:.1f}" for each in value.values())]
            for name, value in summary.items()
            if isinstance(value, dict)
        ]
        header = ["ms", *(f"p{each}" for each in PERCENTILES)]
        errors = Counter(answer.error for answer in self.answers if answer.error is not None)
        shown = [f"{number} x {error}" for error, number in errors.most_common()]
        return "\n\n".join([markdown_table(list(plain), [counts]), markdown_table(header, latencies), *shown])

    def as_json(self, head: dict[str, object]) -> str:
        answers = [asdict(answer) for answer in self.answers]
        return json.dumps({**head, **self.summary(), "answers": answers}, indent=1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of sorted values."""
    rank = -(-len(values) * percent // 100)
    return values[max(0, int(rank) - 1)]


def put_under_load(config: BenchConfig) -> None:
    """Load the server at `config.url`, print a table, and write the report if an output folder is given."""
    assert config.url is not None
    _check(config)
    endpoint = Endpoint.of(config.url, config.api_key, config.api_key_file)
    prompts = read_sources(config)
    check_folder(config.output)
    name = config.served_name or endpoint.model()
    bodies = [_body(prompt.value, name, config) for prompt in prompts]
    route = "chat/completions" if config.chat else "completions"

    def ask(number: int, due: float) -> Answer:
        answer = _ask(endpoint, route, bodies[number % len(bodies)], due)
        with contextlib.suppress(OSError):  # stderr may have been closed by its reader
            if not sys.stderr.isatty():  # so that an interrupted run leaves its results in the log
                print(f"request {number}: {answer.error or f'{answer.seconds:.2f} s'}", file=sys.stderr, flush=True)
        return answer

    if config.rate is None:
        load = closed_loop(ask, config.num_requests, config.concurrency or CLIENTS)
    else:
        load = open_loop(ask, config.num_requests, config.rate, config.load_seed)
    settings = {each: getattr(config, each) for each in SHOWN_SETTINGS}
    table, as_json = load.markdown(), load.as_json({"model": name, **settings})
    report(table, config.output, {"load.md": f"{table}\n".encode(), "load.json": f"{as_json}\n".encode()})
    if all(answer.error is not None for answer in load.answers):
        raise ReplicaError(f"url={config.url}: no request was answered")


def _check(config: BenchConfig) -> None:
    """Raise ConfigError for settings that have no effect on a load, and for a rate too low to finish."""
    for name, unset in OF_METHODS.items():
        if (value := getattr(config, name)) != unset:
            raise ConfigError(f"{name}={value}: has no effect with url")
    if config.rate is not None and config.num_requests - 1 > config.rate * MAX_SECONDS:
        raise ConfigError(
            f"rate={config.rate}: must be higher; {config.num_requests} requests would take over {MAX_SECONDS} seconds"
        )


def _body(prompt: str | list[int], name: str, config: BenchConfig) -> dict[str, object]:
    """Return a request's body, without `stream`."""
    common: dict[str, object] = {"model": name, "max_tokens": config.max_new_tokens, "temperature": 0}
    common["stream_options"] = {"include_usage": True}
    if config.eos is False:  # sent only if set: servers other than vLLM and this one may refuse it
        common["ignore_eos"] = True
    if config.chat:
        return {**common, "messages": [{"role": "user", "content": prompt}]}
    return {**common, "prompt": prompt}


def _ask(endpoint: Endpoint, route: str, body: dict[str, object], due: float) -> Answer:
    """Send one request, and measure it from `due`, a value of time.perf_counter().

    Never raises: an exception becomes the answer's `error`.
    """
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
    """Whether a streamed choice contains text, reasoning, or a part of a tool call."""
    delta = delta_of(choice)
    return bool(choice.get("text")) or any(delta.get(name) for name in DELTA_FIELDS)


def _counted(event: dict[str, Any]) -> int | None:
    """Return the number of new tokens in an event's `usage`; None if it has none."""
    usage = event.get("usage")
    number = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return number if type(number) is int and number >= 0 else None


def closed_loop(ask: Ask, num_requests: int, num_clients: int) -> Load:
    """Run a closed loop: each client sends its next request when its previous one is answered."""
    load, numbers = Load(), SimpleQueue[int]()
    for number in range(num_requests):
        numbers.put(number)

    def work() -> None:
        with contextlib.suppress(Empty):
            while True:
                load.answers.append(ask(numbers.get_nowait(), time.perf_counter()))

    return _run(load, [work] * min(num_clients, num_requests))


def open_loop(ask: Ask, num_requests: int, rate: float, seed: int) -> Load:
    """Run an open loop: requests arrive as a Poisson process of `rate` per second."""
    load, started = Load(), time.perf_counter()

    def work(number: int, due: float) -> None:
        load.answers.append(ask(number, due))

    def when_due() -> Iterator[Callable[[], None]]:
        for number, moment in enumerate(itertools.islice(arrivals(rate, seed), num_requests)):
            time.sleep(max(0.0, started + moment - time.perf_counter()))
            yield functools.partial(work, number, started + moment)

    return _run(load, when_due())


def _run(load: Load, works: Iterable[Callable[[], None]]) -> Load:
    """Run each work in a thread as it comes; note the time until all have ended."""
    started, threads = time.perf_counter(), []
    for work in works:
        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    load.seconds = time.perf_counter() - started
    return load


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the arrival times, in seconds, of a Poisson process of `rate` per second; the first is 0."""
    rng, now = random.Random(seed), 0.0
    while True:
        yield now
        now += rng.expovariate(rate)
