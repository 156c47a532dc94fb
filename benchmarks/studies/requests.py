"""Times whole requests under conditions that lp-bench does not vary: nucleus, long prefixes, batches.

    python benchmarks/speed.py requests --model 7b --dtype bfloat16 --prefixes 4096 32768 --batch 8

There is a row for each condition and method, shown as soon as it is measured: `plain` is one token per step, `default`
the default settings. `prefill ms` is the prefill; all other figures are of the steps after it. `tokens/s` and `ms a
step` of a batch are of all its requests together, after the last prefill, and `over plain` compares them with one plain
request alone. `host us` is the time of a step without forward pass and exchange. Prompts are built in, and --prompts
adds others; a prefix is a text repeated until it is long enough. The exit status is 1 if a greedy output of `default`
differs from `plain`'s in float32. In half precision the column counts such outputs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from common import GREEDY, Results, Row, tokens_and_report
from models import runner_of

from lp_runtime.bench.prompts import OWN_PROMPTS
from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.batch import Arrival
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import LookaheadError
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.tokenizer import encode
from lp_runtime.replica.loading import choose_device
from lp_runtime.request.output import Event, Report
from lp_runtime.request.request import Request
from lp_runtime.utils.prompt_file import read_prompts

NUCLEUS = SamplingConfig(temperature=0.8, top_p=0.95, seed=1)
METHODS = {"plain": PLAIN, "default": LookaheadConfig()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument(
        "--model", default="demo", help="demo, a shape, a model with random weights (models.py), or a directory"
    )
    parser.add_argument("--vocabulary", type=int, default=None, help="size to which embedding and head are padded")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", default="auto", choices=["off", "auto"])
    parser.add_argument("--conditions", nargs="+", default=["greedy", "nucleus", "prefix", "batch"])
    parser.add_argument("--prefixes", nargs="+", type=int, default=[4096, 32768], help="tokens")
    parser.add_argument("--batch", type=int, default=8, help="requests that are decoded together")
    parser.add_argument("--prompts", nargs="+", default=[], metavar="FILE:FIELD", help="added to the built-in ones")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each file, and of the built-in ones")
    parser.add_argument("--max-new-tokens", type=int, default=128)


@dataclass(frozen=True)
class Decoded:
    """Requests that were decoded, one after another or together.

    Attributes:
        outputs: new tokens of each.
        reports: report of each.
        seconds: from the end of the last prefill to the last token, of all together.
        num_tokens: new tokens in that time.
        num_steps: steps in that time; a step of several requests counts once.
    """

    outputs: list[list[int]]
    reports: list[Report]
    seconds: float
    num_tokens: int
    num_steps: int

    @property
    def rate(self) -> float:
        """Tokens per second, without those of the prefills."""
        return self.num_tokens / self.seconds


def read_batch(
    events: Iterable[tuple[Hashable, Event | LookaheadError]],
    num_requests: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Decoded:
    """Read the events of a batch, whose keys count the requests from 0; time starts with the last first token."""
    outputs: list[list[int]] = [[] for _ in range(num_requests)]
    num_steps = [0] * num_requests
    ends: dict[Hashable, Report] = {}
    started, num_before = clock(), 0
    for key, event in events:
        if isinstance(event, LookaheadError):
            raise event
        if isinstance(event, Report):
            ends[key] = event
            continue
        place = cast(int, key)
        is_last_first = not outputs[place] and sum(map(bool, outputs)) == num_requests - 1
        outputs[place] += event.token_ids
        num_steps[place] += 1
        if is_last_first:
            started, num_before, num_steps = clock(), sum(map(len, outputs)), [0] * num_requests
    reports = [ends[key] for key in range(num_requests)]
    return Decoded(outputs, reports, clock() - started, sum(map(len, outputs)) - num_before, max(num_steps))


class Requests:
    """A model and its engine.

    Args:
        args: arguments of the study.
    """

    def __init__(self, args: argparse.Namespace):
        device = choose_device("auto", 0)
        config = RuntimeConfig(dtype=args.dtype, compile=args.compile)
        self.model = runner_of(args.model, config, device, args.vocabulary)
        path = args.model if "/" in args.model else None
        self._tokenizer = load_tokenizer(ModelConfig(path=path))
        self._engine = Engine(self.model, Group.alone(), Calibration(self.model, Group.alone(), None))
        self._num_new = args.max_new_tokens
        texts: list[str | list[int]] = list(OWN_PROMPTS[: args.limit])
        for source in args.prompts:
            file, _, field = source.rpartition(":")
            texts += [prompt.value for prompt in read_prompts(file, field, args.limit)]
        self.prompts = [
            tuple(encode(self._tokenizer, text)) if isinstance(text, str) else tuple(text) for text in texts
        ]

    def prefix(self, length: int) -> tuple[int, ...]:
        """Return a prompt of `length` tokens: the prompts one after another, repeatedly."""
        whole = [token for prompt in self.prompts for token in prompt]
        return tuple((whole * (length // len(whole) + 1))[:length])

    def request(self, prompt: Sequence[int], lookahead: LookaheadConfig, sampling: SamplingConfig) -> Request:
        """Return a request that ends only at its length."""
        return Request(tuple(prompt), lookahead, self._num_new, sampling=sampling)

    def one_by_one(self, requests: Sequence[Request]) -> Decoded:
        """Decode requests one after another; the first twice, as its first run compiles and measures."""
        outputs: list[list[int]] = []
        reports: list[Report] = []
        for request in [requests[0], *requests]:
            token_ids, report = tokens_and_report(self._engine.run(request))
            outputs.append(token_ids)
            reports.append(report)
        seconds = sum(each.seconds - each.prefill_seconds for each in reports[1:])
        num_tokens, num_steps = (
            sum(len(each) - 1 for each in outputs[1:]),
            sum(each.num_steps - 1 for each in reports[1:]),
        )
        return Decoded(outputs[1:], reports[1:], seconds, num_tokens, num_steps)

    def together(self, requests: Sequence[Request]) -> Decoded:
        """Decode requests in common forward passes; all twice, as the first run compiles and captures."""
        for _ in range(2):
            decoded = self._batch(requests)
        return decoded

    def _batch(self, requests: Sequence[Request]) -> Decoded:
        coming = [[Arrival(number, request) for number, request in enumerate(requests)]]
        return read_batch(self._engine.run_batch(lambda: coming.pop() if coming else []), len(requests))


def conditions(args: argparse.Namespace, bench: Requests) -> Iterator[tuple[str, list[tuple[int, ...]], bool, bool]]:
    """Yield (name, prompts, whether tokens are sampled, whether the requests are decoded together)."""
    for name in args.conditions:
        if name == "greedy":
            yield "greedy", bench.prompts, False, False
        elif name == "nucleus":
            yield "nucleus, top_p=0.95", bench.prompts, True, False
        elif name == "prefix":
            for length in args.prefixes:
                yield f"prefix {length}", [bench.prefix(length)], False, False
        elif name == "batch":
            prompts = (bench.prompts * args.batch)[: args.batch]
            yield f"batch of {args.batch}", prompts, False, True
        else:
            raise SystemExit(f"--conditions {name}: must be greedy, nucleus, prefix or batch")


def row_of(decoded: Decoded) -> Row:
    """Return the figures of some requests."""
    reports = decoded.reports
    steps = sum(each.num_steps - 1 for each in reports)
    tokens = sum(len(each) - 1 for each in decoded.outputs)
    return {
        "tokens/s": decoded.rate,
        "ms a step": 1e3 * decoded.seconds / max(1, decoded.num_steps),
        "S": tokens / steps,
        "tokens fed": statistics.mean(each.step_tokens for each in reports),
        "host us": 1e6 * sum(each.times.other for each in reports) / steps,
        "prefill ms": 1e3 * statistics.median(each.prefill_seconds for each in reports),
    }


def run(args: argparse.Namespace) -> int:
    """Measure every condition."""
    bench = Requests(args)
    formats = {"tokens/s": ".1f", "host us": ".0f", "prefill ms": ".0f", "tokens fed": ".1f"}
    results = Results("requests", args.output, formats)
    num_wrong = 0
    for name, prompts, is_sampled, is_together in conditions(args, bench):
        plain: Decoded | None = None
        alone = 0.0
        for method, lookahead in METHODS.items():
            sampling = NUCLEUS if is_sampled else GREEDY
            requests = [bench.request(prompt, lookahead, sampling) for prompt in prompts]
            decoded = bench.together(requests) if is_together else bench.one_by_one(requests)
            if plain is None:
                plain = decoded
                alone = bench.one_by_one(requests[:1]).rate if is_together else decoded.rate
            differ = sum(a != b for a, b in zip(decoded.outputs, plain.outputs, strict=True))
            row: Row = {"condition": name, "method": method, **row_of(decoded)}
            results.add(row | {"over plain": decoded.rate / alone, "outputs that differ": differ})
            num_wrong += differ
    vocabulary = bench.model.vocabulary_size
    captured = "captured" if bench.model.graphs else "not captured"
    results.finish(f"{args.model}, {args.dtype}, V={vocabulary}, {captured}, {args.max_new_tokens} new tokens each")
    return 1 if num_wrong and str(bench.model.dtype) == "torch.float32" else 0
