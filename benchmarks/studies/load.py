"""Queries lp-serve by many clients at once: is every answer right, and how soon does it arrive?

    python benchmarks/resilience.py load --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --gpus 2 --clients 64 1

There is a row for each number of clients and each scheduling policy (latency: LP at its maximum; throughput: LP 1;
fair: elastic). Clients send requests to a server of spawned replicas through the openai client, one after another:
greedy and sampled in turns, streamed or whole at random. With --constrained a third of the requests must answer with
JSON of one of three schemas. Every answer is compared with that of the same prompt alone on one replica. The columns
are tokens/s; percentiles (50, 90, 99) of the latency and of the time to the first token; the memory of driver and
replicas at the start and at the end of each quarter; and the time from a client's disconnecting until nothing runs any
more (median and worst). The exit status is 1 if an answer is wrong or a request fails.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import openai
import psutil
from common import Results, Row, add_prompt_arguments, load_prompts, replica_processes
from support.serving import served

from lp_runtime import ConstraintConfig, LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig

FIXED = LookaheadConfig(7, 5, 7, prior="none")
SAMPLED = {"temperature": 0.8, "seed": 7}
GREEDY = {"temperature": 0.0}
NUM_ABANDONED = 11  # streams whose clients disconnect
NUM_QUARTERS = 4
MAX_WAITING = 10_000  # length of the scheduler's queue: no request is refused
CASE_STRIDE = 17  # cases between two requests of a client, so that no two clients have the same order

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3, "maxItems": 5},
    {
        "type": "object",
        "properties": {
            "is_new": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
        },
        "required": ["is_new", "tags"],
        "additionalProperties": False,
    },
]
PLAIN_CASES = 2  # cases without a constraint per case with one


class Case(NamedTuple):
    """A request of a client.

    Attributes:
        prompt: text.
        is_sampled: whether it is sampled or decoded greedily.
        schema: index in SCHEMAS of the schema that the answer must satisfy; None for a text.
    """

    prompt: str
    is_sampled: bool
    schema: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling settings."""
        return SAMPLED if self.is_sampled else GREEDY


class Expected(NamedTuple):
    """Text of the right answer, and its number of tokens."""

    text: str
    num_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests of all clients.

    Attributes:
        cases: prompts, each greedy and sampled.
        expected: the right answers by case.
        max_new_tokens: limit of every request.
        seconds: how long clients send requests.
    """

    cases: list[Case]
    expected: dict[Case, Expected]
    max_new_tokens: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser, limit=8, max_new_tokens=48)
    parser.add_argument("--gpus", nargs="+", type=int, default=[2])
    parser.add_argument("--clients", nargs="+", type=int, default=[64, 1])
    parser.add_argument("--policies", nargs="+", default=["latency", "throughput", "fair"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--constrained", action="store_true", help="give a third of the requests a JSON schema")
    parser.add_argument("--auto", action="store_true", help="lookahead=auto instead of 56 guesses per request")


def requests_of(number: int, cases: Sequence[Case]) -> Iterator[tuple[Case, bool]]:
    """Yield without end the cases that a client asks for, and whether the answer is streamed."""
    rng = random.Random(number)  # turns would give a case, or all sampled ones, the same way each time
    for place in itertools.count(number, CASE_STRIDE):
        yield cases[place % len(cases)], rng.random() < 0.5


class Client(threading.Thread):
    """Thread that sends one request after another until the workload's time is up.

    Args:
        number: number of the client; selects its first case.
        url: base URL of the API.
        workload: requests to send.

    Attributes:
        latencies: seconds of each request.
        firsts: seconds to the first token of each streamed request.
        num_tokens: tokens of the right answers to all requests.
        faults: wrong answers and errors.
    """

    def __init__(self, number: int, url: str, workload: Workload):
        super().__init__(daemon=True)
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
        self._number, self._workload = number, workload
        self.latencies: list[float] = []
        self.firsts: list[float] = []
        self.num_tokens = 0
        self.faults: list[str] = []

    def run(self) -> None:
        workload = self._workload
        until = time.perf_counter() + workload.seconds
        for case, is_streamed in requests_of(self._number, workload.cases):
            started = time.perf_counter()
            if started >= until:
                return
            try:
                self.num_tokens += workload.expected[case].num_tokens
                if self._ask(case, is_streamed, started) != workload.expected[case].text:
                    self.faults.append("another text")
            except openai.OpenAIError as error:
                self.faults.append(str(error))
            self.latencies.append(time.perf_counter() - started)

    def _ask(self, case: Case, is_streamed: bool, started: float) -> str:
        extra: dict[str, Any] = {"ignore_eos": True}
        if case.schema is not None:
            extra = {"structured_outputs": {"json": SCHEMAS[case.schema]}}
        options: dict[str, Any] = {"model": "demo", "prompt": case.prompt, "extra_body": extra, **case.sampling}
        options["max_tokens"] = self._workload.max_new_tokens
        if not is_streamed:
            whole: str = self._client.completions.create(**options).choices[0].text
            return whole
        text = ""
        for chunk in self._client.completions.create(stream=True, **options):
            if not text:
                self.firsts.append(time.perf_counter() - started)
            text += chunk.choices[0].text
        return text


def resident_mib() -> float:
    """Return the memory of this process and of its replicas, in MiB."""
    return sum(each.memory_info().rss for each in (psutil.Process(), *replica_processes())) / 2**20


def seconds_until_free(url: str, prompt: str) -> float:
    """Abandon a stream; return the seconds until /metrics reports that nothing runs."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    options: dict[str, Any] = {
        "max_tokens": 900,
        "extra_body": {"ignore_eos": True, "lookahead": {"W": 0, "N": 2, "G": 0}},
    }
    stream = client.completions.create(model="demo", prompt=prompt, stream=True, **options)
    next(iter(stream))
    started = time.perf_counter()
    stream.close()
    while 'lp_requests_running{model_name="demo"} 0.0' not in urllib.request.urlopen(f"{url}/metrics").read().decode():
        time.sleep(0.002)
    return time.perf_counter() - started


def percentiles(values: Sequence[float]) -> list[float] | None:
    """Return the median, 90th and 99th percentile; None for fewer than two values."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=100)
    return [cuts[49], cuts[89], cuts[98]]


def serve(config: RuntimeConfig, policy: str, num_clients: int, workload: Workload) -> tuple[Row, list[str]]:
    """Serve all clients until the workload's time is up; return a row of results, and the faults."""
    with LookaheadRuntime.from_config(config) as runtime, served(runtime, MAX_WAITING, policy) as (url, _):
        started = time.perf_counter()
        clients = [Client(number, f"{url}/v1", workload) for number in range(num_clients)]
        for client in clients:
            client.start()
        sizes = []
        for _ in range(NUM_QUARTERS):  # the last quarter ends with the last answer
            sizes.append(resident_mib())
            time.sleep(workload.seconds / NUM_QUARTERS)
        for client in clients:
            client.join()
        seconds = time.perf_counter() - started
        sizes.append(resident_mib())
        waits = [seconds_until_free(url, workload.cases[0].prompt) for _ in range(NUM_ABANDONED)]
    latencies = [each for client in clients for each in client.latencies]
    faults = [each for client in clients for each in client.faults]
    row: Row = {"replicas": config.gpus, "clients": num_clients, "policy": policy, "requests": len(latencies)}
    row |= {"wrong or failed": len(faults), "tokens/s": sum(client.num_tokens for client in clients) / seconds}
    row |= {"latency s": percentiles(latencies)}
    row |= {"first token s": percentiles([each for client in clients for each in client.firsts]), "MiB": sizes}
    return row | {"freed s": [statistics.median(waits), max(waits)]}, faults


def cases_of(prompts: Sequence[str], constrained: bool) -> list[Case]:
    """Return the cases of every prompt, greedy and sampled.

    Args:
        prompts: texts.
        constrained: whether one in PLAIN_CASES + 1 cases has a schema.
    """
    cases = [Case(prompt, is_sampled) for prompt in prompts for is_sampled in (False, True)]
    if constrained:
        period = PLAIN_CASES + 1
        schemas = [number // period % len(SCHEMAS) if number % period == 0 else None for number in range(len(cases))]
        cases = [case._replace(schema=schema) for case, schema in zip(cases, schemas, strict=True)]
    return cases


def run(args: argparse.Namespace) -> int:
    """Serve with every policy; return 1 if any answer is wrong."""
    cases = cases_of([prompt.turns[0] for prompt in load_prompts(args)], args.constrained)
    lookahead = LookaheadConfig() if args.auto else FIXED
    config = RuntimeConfig(
        model=ModelConfig(path=args.model), gpus=1, device="cpu", dtype="float32", lookahead=lookahead
    )
    workload = Workload(cases, {}, args.max_new_tokens, args.seconds)
    with LookaheadRuntime.from_config(config) as runtime:
        for case in cases:
            schema = None if case.schema is None else ConstraintConfig(json_schema=SCHEMAS[case.schema])
            done = runtime.generate(
                case.prompt,
                args.max_new_tokens,
                eos=schema is not None,
                sampling=SamplingConfig(**case.sampling),
                constraint=schema,
            )
            workload.expected[case] = Expected(done.text, len(done.token_ids))
    results = Results("load", args.output, {"tokens/s": ".1f", "MiB": ".0f", "freed s": ".3f"})
    num_wrong = 0
    for gpus in args.gpus:
        config.gpus = gpus
        for num_clients in args.clients:
            for policy in args.policies:
                row, faults = serve(config, policy, num_clients, workload)
                results.add(row)
                num_wrong += len(faults)
                for message in sorted(set(faults)):
                    print(message, file=sys.stderr)
    results.finish(f"{args.max_new_tokens} tokens a request, {args.seconds:g} s each")
    return 1 if num_wrong else 0
