"""What of a step does not hide behind an accelerator: from the end of a pass on it to the launch of the next one.

    python benchmarks/host_time.py --prompts humaneval.jsonl:prompt --limit 6 --settings 7,5,7 15,5,15 30,5,30 auto

Needs no accelerator. Every prompt is decoded once on this machine, and what each step draws is kept; then again with a
device that is none: a launch returns at once, and so many milliseconds later (--device-ms) the pass is done and what
was kept is there. The host meanwhile does what it does beside a GPU (its caches stay its own; a CPU's forward pass
would empty them): it writes the inputs of a pass of a fixed size, and waits where it would wait. What launching the
graph and copying to and from a GPU take is not in it; with `auto` the device takes as long for 1 token as for 256.

Microseconds a step of one replica, median and 90th percentile over all steps, text decoding and delivery included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch
from common import add_arguments, load_prompts, machine, markdown, parse_setting

from lp_runtime.config import DEMO_MODEL, ModelConfig, RuntimeConfig
from lp_runtime.decoding import Request
from lp_runtime.decoding_loop import DecodingLoop
from lp_runtime.drawings import make_drawing
from lp_runtime.generation import GenerationStream
from lp_runtime.model.drawing import Drawing
from lp_runtime.model.fixed_forward import SIZES, FixedForward
from lp_runtime.model.layout import Layout
from lp_runtime.model.loading import load_tokenizer
from lp_runtime.model.text import TextStream, encode
from lp_runtime.model.tree_model import TreeModel
from lp_runtime.parallel.budget import NUM_TIMED, Learned
from lp_runtime.parallel.exchange import Exchange, Outcome
from lp_runtime.tuning import Tuning
from lp_runtime.worker import ready_model

CPU = torch.device("cpu")


class Flat(Tuning):
    """Steps of up to 256 tokens that all take the same."""

    def times(self, num_tokens: int) -> np.ndarray:
        return np.full((1, num_tokens + 1), 10_000_000)

    def most_tokens(self) -> int:
        return SIZES[-1]


class Keeping(Drawing):
    """Keeps what a real one draws."""

    def __init__(self, real: Drawing):
        self.__dict__ = real.__dict__
        self.kept: list[torch.Tensor] = []

    def draw(self, *args, **options) -> tuple[torch.Tensor, torch.Tensor]:
        values, scores = super().draw(*args, **options)
        self.kept.append(values)
        return values, scores


class Device:
    """Passes that take their time and bring what was kept; a model's timer, too.

    Attributes:
        gaps: seconds between the end of each pass and the launch of the next.
        sizes: tokens fed in each.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._done = 0.0  # when the pass under way will be
        self.gaps: list[float] = []
        self.sizes: list[int] = []

    def begin(self, kept: list[torch.Tensor]) -> None:
        """A request begins, whose passes will bring these."""
        self._kept = iter(kept)
        self._is_first = True

    def run(self, one) -> None:
        """A pass, in place of FixedForward._run."""
        now = time.perf_counter()
        if not self._is_first:
            self.gaps.append(max(0.0, now - self._done))
        self._is_first = False
        one.logits = torch.zeros(one.size, 1)
        one.drawn = next(self._kept)
        self._done = now + self._seconds

    def wait(self) -> None:
        """Until the pass under way is done."""
        while time.perf_counter() < self._done:
            pass

    def start(self) -> None:
        """See PassTimer."""

    stop = start

    def seconds(self) -> float:
        """See PassTimer."""
        return self._seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--device-ms", type=float, default=5.0, help="that a pass takes")
    args = parser.parse_args()
    prompts = load_prompts(args)
    path = str(args.model or DEMO_MODEL)
    model, _ = ready_model(RuntimeConfig(model=ModelConfig(path=path), device="cpu", dtype="float32"), CPU)
    tokenizer = load_tokenizer(ModelConfig(path=path))
    loop = DecodingLoop(model, 0, 1, CPU, Flat(model, 0, 1, CPU, None))
    rows = []
    for setting in args.settings:
        lookahead = replace(parse_setting(setting), memory="request")  # so that the same trees are grown again
        gaps, sizes = measure(model, loop, tokenizer, prompts, lookahead, args)
        deciles = statistics.quantiles(gaps, n=10)
        rows.append(
            [f"({setting})", f"{statistics.mean(sizes):.0f}", *(f"{1e6 * deciles[i]:.0f}" for i in (4, 8)), len(gaps)]
        )
    print(f"{machine()}; {len(prompts)} prompts, {args.max_new_tokens} new tokens each\n")
    print(markdown(["(W, N, G)", "tokens fed a step", "not hidden, us", "90th percentile", "steps"], rows))


def measure(model: TreeModel, loop: DecodingLoop, tokenizer, prompts, lookahead, args) -> tuple[list[float], list[int]]:
    """(gaps, tokens fed) of all steps of all prompts with one setting."""
    loop.prepare(lookahead)
    recorded = []
    for prompt in prompts:
        request = Request(tuple(encode(tokenizer, prompt.value)), lookahead, args.max_new_tokens)
        drawing = Keeping(make_drawing(model, request))
        ready(loop)
        tokens = [token for run in list(loop.run(request, drawing))[:-1] for token in run.token_ids]
        recorded.append((request, tokens, drawing.kept))
    device = Device(args.device_ms / 1000)
    run, forward, finish = FixedForward._run, FixedForward.forward, Exchange.finish

    def counted(fixed: FixedForward, fed: Layout):
        device.sizes.append(len(fed.tokens))
        return forward(fixed, fed)

    def awaited(exchange: Exchange) -> Outcome:
        device.wait()
        return finish(exchange)

    model.fix_sizes(capture=False)
    model.timer = device
    FixedForward._run, FixedForward.forward = lambda _, one: device.run(one), counted
    Exchange.finish = awaited
    try:
        for number, (request, tokens, kept) in enumerate([recorded[0], *recorded]):  # the first one warms up
            device.begin(kept[1:])
            ready(loop)
            stream = GenerationStream(loop.run(request, make_drawing(model, request)), TextStream(tokenizer), None)
            assert [token for piece in stream for token in piece.token_ids] == tokens
            if number == 0:
                device.gaps.clear()
                device.sizes.clear()
    finally:
        FixedForward._run, FixedForward.forward, Exchange.finish = run, forward, finish
        model.timer = None
        model.free_sizes()
    return device.gaps, device.sizes


def ready(loop: DecodingLoop) -> None:
    """Nothing is learned yet, but how long steps take need not be found out first: the same trees are fed again."""
    learned = Learned.nothing(1)
    learned.num_plain = NUM_TIMED
    loop._learned = {(is_auto, True): learned for is_auto in (False, True)}


if __name__ == "__main__":
    main()
