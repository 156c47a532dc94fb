"""What of a step does not hide behind an accelerator: from the end of a pass on it to the launch of the next one.

    python benchmarks/host_time.py --prompts humaneval.jsonl:prompt --limit 6 --settings 7,5,7 15,5,15 30,5,30 auto
    python benchmarks/host_time.py --prompts humaneval.jsonl:prompt --limit 6 --settings 15,5,15 auto --gpus 1 2 4 8

Needs no accelerator. Every prompt is decoded once on this machine, and what each step draws is kept; then again with a
device that is none: a launch returns at once, and some milliseconds later the pass is done and what was kept is there,
of the other replicas, too: the one that is timed is the first. The host meanwhile does what it does beside a GPU (its
caches stay its own; a CPU's forward pass would empty them): it writes the inputs of a pass of a fixed size, waits where
it would wait, and merges what all have found. What launching the graph, the collective and copying take is not in it.

A pass of one token takes --device-ms, one of more what CURVE says, which `auto` sizes its steps by. So that the same
trees are grown again, both runs are told that the host takes --host-us and --node-us for each node.

Microseconds a step of one replica, median and 90th percentile over all steps, text decoding and delivery included.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
import unittest.mock
from dataclasses import replace

import numpy as np
import torch
from common import add_arguments, load_prompts, machine, markdown, parse_setting

from lp_runtime.config.settings import DEMO_MODEL, ModelConfig, RuntimeConfig
from lp_runtime.distributed.exchange import HEADER, Exchange, Outcome
from lp_runtime.distributed.partition import Shares
from lp_runtime.engine.calibration import Calibration
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.generation import GenerationStream
from lp_runtime.engine.replica import ready_model
from lp_runtime.engine.request import Request
from lp_runtime.engine.sampler_factory import make_sampler
from lp_runtime.engine.sequence import Sequence
from lp_runtime.model.cuda_graph import SIZES, CudaGraphRunner
from lp_runtime.model.kv_cache.slots import Fed
from lp_runtime.model.loader import load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.tokenizer import TextStream, encode
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sizing.budget import NUM_TIMED, LearnedCosts
from lp_runtime.sizing.cost_model import interpolate

CPU = torch.device("cpu")
MAX_RUN = 64  # tokens that a step commits, and that are pending in the next
CURVE = {1: 1.0, 64: 1.11, 128: 1.26, 256: 2.1}  # of one token's time: what is aimed at on an H200 with 7B parameters


class Assumed(Calibration):
    """Replicas whose passes take what CURVE says.

    Args:
        model: any replica's.
        num_replicas: how many.
        seconds: of a pass of one token.
    """

    def __init__(self, model: ModelRunner, num_replicas: int, seconds: float):
        super().__init__(model, 0, 1, CPU, None)
        most = num_replicas * SIZES[-1] + MAX_RUN  # nodes of a tree
        curve = interpolate(list(CURVE), [int(1e9 * seconds * each) for each in CURVE.values()], most)
        self.curve = curve / 1e9
        self._times = np.tile(curve, (num_replicas, 1))

    def times(self, num_tokens: int) -> np.ndarray:
        return self._times[:, : num_tokens + 1]

    def max_step_tokens(self) -> int:
        return SIZES[-1]


class Keeping(Sampler):
    """Keeps what a real one draws."""

    def __init__(self, real: Sampler):
        self.__dict__ = real.__dict__
        self.kept: list[torch.Tensor] = []

    def draw(self, *args, **options) -> tuple[torch.Tensor, torch.Tensor]:
        values, scores = super().draw(*args, **options)
        self.kept.append(values)
        return values, scores


class Peers:
    """What a group of replicas says of its time, and a step's shares.

    Args:
        curve: [M + 1] seconds of a pass of so many tokens.
        host_us, node_us: microseconds of a step's other work, and of that for each node.
    """

    def __init__(self, curve: np.ndarray, host_us: float, node_us: float):
        self._curve, self._host_us, self._node_us = curve, host_us, node_us
        self.shares: Shares | None = None
        self._clocks: list[int] = []

    def begin(self) -> None:
        """A request begins."""
        self._clocks = []

    def seconds(self) -> float:
        """Of the first one's pass."""
        return float(self._curve[self.shares.sizes[0]])

    def clocks(self) -> list[int]:
        """[R] of the step before, in whose place this one is kept; see StepTimer.packed."""
        before = self._clocks or [0] * len(self.shares)
        other = int(self._host_us + self._node_us * len(self.shares.owner))
        self._clocks = [int(1e6 * self._curve[size]) << 31 | other for size in self.shares.sizes]
        return before

    def found_by(self, rank: int, found: np.ndarray) -> np.ndarray:
        """Of what was found of all nodes from the root on, what one of them finds."""
        owner = self.shares.owner
        return found[owner[owner >= 0] == rank]


class Device:
    """Passes that take their time and bring what was kept; a model's timer, too.

    Attributes:
        gaps: seconds between the end of each pass and the launch of the next.
        sizes: tokens fed in each; of the whole trees.
    """

    def __init__(self, peers: Peers):
        self._peers = peers
        self._done = 0.0  # when the pass under way will be
        self.gaps: list[float] = []
        self.sizes: list[tuple[int, int]] = []

    def begin(self, kept: list[torch.Tensor]) -> None:
        """A request begins, whose passes will bring these."""
        self._kept = iter(kept)
        self.found: torch.Tensor | None = None  # of all nodes of the step from the root on
        self._done = 0.0

    def run(self, one) -> None:
        """A pass, in place of CudaGraphRunner._run."""
        now = time.perf_counter()
        if self._done:
            self.gaps.append(max(0.0, now - self._done))
        self._done = now + self._peers.seconds()
        self.found = next(self._kept)
        shares = self._peers.shares
        self.sizes.append((shares.sizes[0], len(shares.owner)))
        one.logits = torch.zeros(one.size, 1)
        one.drawn = torch.from_numpy(self._peers.found_by(0, self.found.numpy()))

    def wait(self) -> None:
        """Until the pass under way is done."""
        while time.perf_counter() < self._done:
            pass

    def start(self) -> None:
        """See PassTimer."""

    stop = start

    def seconds(self) -> float:
        """See PassTimer."""
        return self._peers.seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1], metavar="R", help="replicas")
    parser.add_argument("--device-ms", type=float, default=4.0, help="that a pass of one token takes")
    parser.add_argument("--host-us", type=float, default=100.0, help="that `auto` takes the host for, a step")
    parser.add_argument("--node-us", type=float, default=1.0, help="and a node")
    args = parser.parse_args()
    prompts = load_prompts(args)
    path = str(args.model or DEMO_MODEL)
    model, _ = ready_model(RuntimeConfig(model=ModelConfig(path=path), device="cpu", dtype="float32"), CPU)
    tokenizer = load_tokenizer(ModelConfig(path=path))
    rows = []
    for num_replicas, setting in itertools.product(args.gpus, args.settings):
        lookahead = replace(parse_setting(setting), draft_tables="request")  # so that the same trees are grown again
        tokens, gaps, sizes = measure(model, num_replicas, tokenizer, prompts, lookahead, args)
        deciles = statistics.quantiles(gaps, n=10)
        means = [f"{statistics.mean(each):.0f}" for each in zip(*sizes, strict=True)]
        ratio = f"{tokens / (len(gaps) + 2 * len(prompts)):.2f}"  # neither a prefill nor what comes behind it has a gap
        rows.append([f"({setting})", num_replicas, *means, ratio, *(f"{1e6 * deciles[i]:.0f}" for i in (4, 8))])
    print(f"{machine()}; {len(prompts)} prompts, {args.max_new_tokens} new tokens each\n")
    columns = ["(W, N, G)", "replicas", "tokens fed", "nodes", "S", "not hidden, us", "90th percentile"]
    print(markdown(columns, rows))


def measure(
    model: ModelRunner, num_replicas: int, tokenizer, prompts, lookahead, args
) -> tuple[int, list[float], list[tuple[int, int]]]:
    """(tokens, gaps, sizes) of all prompts with one setting; see Device."""
    assumed = Assumed(model, num_replicas, args.device_ms / 1000)
    loop = Engine(model, 0, num_replicas, CPU, assumed, reports_times_late=True)
    loop.prepare(lookahead)
    peers = Peers(assumed.curve, args.host_us, args.node_us)
    requests = [Request(tuple(encode(tokenizer, each.value)), lookahead, args.max_new_tokens) for each in prompts]
    recorded = [record(model, loop, peers, request) for request in requests]
    device = Device(peers)
    with replaced(
        (CudaGraphRunner, "_run", lambda _, one: device.run(one)),
        (Sequence, "_set", seen_by(peers)),
        (Exchange, "start", told_by(peers)),
        (Exchange, "finish", awaited(device)),
        (Exchange, "_gather", lambda exchange, received, sent: gather(exchange, device, peers, received, sent)),
        (model, "timer", device),
    ):
        model.fix_sizes(capture=False)
        pairs = list(zip(requests, recorded, strict=True))
        for number, (request, (tokens, kept)) in enumerate([pairs[0], *pairs]):
            ready(loop)
            peers.begin()
            device.begin(kept[1:])
            stream = GenerationStream(loop.run(request, make_sampler(model, request)), TextStream(tokenizer), None)
            assert [token for piece in stream for token in piece.token_ids] == tokens
            if number == 0:  # the first one warms up
                device.gaps.clear()
                device.sizes.clear()
    model.free_sizes()
    return sum(len(tokens) for tokens, _ in recorded), device.gaps, device.sizes


def record(model: ModelRunner, loop: Engine, peers: Peers, request: Request) -> tuple[list[int], list[torch.Tensor]]:
    """(tokens, what was found of each step's nodes) of a request; this replica feeds what all would."""
    drawing = Keeping(make_sampler(model, request))
    set_share, capacity_for = seen_by(peers), model.capacity_for

    def set_all(decoding: Sequence, proposal) -> None:
        set_share(decoding, proposal)
        tree = proposal.tree
        decoding.fed = Fed(decoding.text, tree, np.arange(len(tree)), np.arange(tree.root, len(tree)))

    def start(exchange: Exchange, shares, values, digest, control, clock=0) -> None:
        exchange.outcome = Outcome(values.numpy(), control, peers.clocks())
        exchange.num_before = len(shares.owner) - len(values)

    def finish(exchange: Exchange) -> Outcome:
        before = np.full((exchange.num_before, exchange.width), -1)
        return replace(exchange.outcome, values=np.concatenate([before, exchange.outcome.values]))

    ready(loop)
    peers.begin()
    with replaced(
        (Sequence, "_set", set_all),
        (Exchange, "start", start),
        (Exchange, "finish", finish),
        (model, "capacity_for", lambda tokens: capacity_for(tokens + loop._member.num_replicas * SIZES[-1])),
    ):
        tokens = [token for run in list(loop.run(request, drawing))[:-1] for token in run.token_ids]
    return tokens, drawing.kept


def seen_by(peers: Peers):
    """Sequence._set, whose shares these see."""
    real = Sequence._set

    def set_share(decoding: Sequence, proposal) -> None:
        real(decoding, proposal)
        peers.shares = decoding._shares

    return set_share


def told_by(peers: Peers):
    """Exchange.start, with what these say of their time."""
    real = Exchange.start

    def start(exchange: Exchange, shares, values, digest, control, clock=0) -> None:
        exchange.said = peers.clocks()
        real(exchange, shares, values, digest, control, exchange.said[0])

    return start


def awaited(device: Device):
    """Exchange.finish, which waits for a device."""
    real = Exchange.finish

    def finish(exchange: Exchange) -> Outcome:
        if exchange.num_replicas == 1:
            device.wait()
        return real(exchange)

    return finish


def gather(exchange: Exchange, device: Device, peers: Peers, received: torch.Tensor, sent: torch.Tensor) -> None:
    """The collective: what all have found is there when the pass is done."""
    rows = received.numpy().reshape(exchange.num_replicas, -1)
    rows[0] = sent.numpy()
    if device.found is not None:
        for rank, row in enumerate(rows):
            values = peers.found_by(rank, device.found.numpy())
            row[HEADER : HEADER + values.size] = values.reshape(-1)
    for row, clock in zip(rows, exchange.said, strict=True):
        row[:HEADER] = sent[0], sent[1], clock
    device.wait()


@contextlib.contextmanager
def replaced(*attributes):
    """With attributes of objects replaced, for a while: (object, name, value)."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in attributes:
            stack.enter_context(unittest.mock.patch.object(owner, name, value))
        yield


def ready(loop: Engine) -> None:
    """Nothing is learned yet, but how long steps take need not be found out first: the same trees are fed again."""
    learned = LearnedCosts.nothing(loop._member.num_replicas)
    learned.num_plain = NUM_TIMED
    loop._learned = {(is_auto, True): learned for is_auto in (False, True)}


if __name__ == "__main__":
    main()
