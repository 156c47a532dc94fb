"""Simulated device: forward passes take an assumed time and return results that were recorded before.

An engine with the parts of this module does the same host work as with an accelerator. It is one of R replicas; the
others do not exist.
Letters: R replicas, T nodes in the tree, M largest number of tokens with a known time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.decoder.decoder import Decoder
from lp_runtime.distributed.exchange import DIGEST_BITS, HEADER, Exchange, Outcome
from lp_runtime.distributed.partition.partition import Shares
from lp_runtime.distributed.transport.group import CPU, Group, Transport
from lp_runtime.engine.engine import Engine
from lp_runtime.lookahead.state import Stop
from lp_runtime.model.forward.cuda_graph import FixedPass, GraphOptions, PassSet
from lp_runtime.model.forward.fixed_passes import SIZES, FixedPasses
from lp_runtime.model.forward.pass_timer import PassTimer
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sampling.sampler import Sampler, sample_greedily
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.cost_model import interpolate
from lp_runtime.sizing.learned_costs import LearnedCosts

MAX_COMMITTED = 64  # tokens that a step may commit; they are pending in the next step


class AssumedCalibration(Calibration):
    """Calibration with assumed times of forward passes.

    Args:
        model: any replica's model; queried for the vocabulary prior.
        num_replicas: R.
        curve: seconds of a pass by its number of tokens; times in between are interpolated.
        known: earlier measurements of this process; filled in.

    Attributes:
        seconds: [M + 1] seconds of a pass by its number of tokens.
    """

    def __init__(self, model: ModelRunner, num_replicas: int, curve: Mapping[int, float], known: Measured):
        super().__init__(model, Group.alone(), None, known)
        max_nodes = num_replicas * SIZES[-1] + MAX_COMMITTED
        nanoseconds = interpolate(list(curve), [int(1e9 * each) for each in curve.values()], max_nodes)
        self.seconds = nanoseconds / 1e9
        self._times = np.tile(nanoseconds, (num_replicas, 1))

    def times(self, num_tokens: int, num_committed: int = 0) -> np.ndarray:
        return self._times[:, : num_tokens + 1]

    def max_step_tokens(self) -> int:
        return SIZES[-1]

    def harvest_ns(self) -> int:
        return 0


class AssumedClocks:
    """Times that the replicas of a group report while one request is decoded.

    Args:
        seconds: [M + 1] seconds of a pass by its number of tokens.
        host_us: microseconds of a step's other work.
        node_us: microseconds added to `host_us` for each node of the tree.
    """

    def __init__(self, seconds: np.ndarray, host_us: float, node_us: float):
        self._seconds, self._host_us, self._node_us = seconds, host_us, node_us
        self._before: list[int] | None = None

    def __call__(self, shares: Shares) -> list[int]:
        """Return [R] clocks of the previous step, packed like StepTimer.packed; keep those of this step."""
        before = self._before or [0] * len(shares)
        other = int(self._host_us + self._node_us * len(shares.owner))
        self._before = [int(1e6 * self._seconds[size]) << 31 | other for size in shares.sizes]
        return before


class SettledEngine(Engine):
    """Engine whose requests begin as if plain steps had been timed, and nothing else had been learned.

    Args:
        model: the first replica's model.
        num_replicas: R.
        calibration: calibration of the replicas.
        make_exchange: see Engine.
    """

    def __init__(
        self,
        model: ModelRunner,
        num_replicas: int,
        calibration: Calibration,
        make_exchange: Callable[[Group, int, int], Exchange] = Exchange,
    ):
        super().__init__(model, Group(0, num_replicas), calibration, None, True, make_exchange)
        self._num_replicas, self._assumed = num_replicas, calibration

    def open_decoder(self, request: Request, sampler: Sampler, stop: Stop | None = None, tag: int = 0) -> Decoder:
        """Return a decoder whose budget starts from the initial costs; arguments are those of Engine."""
        decoder = super().open_decoder(request, sampler, stop, tag)
        if request.lookahead.is_auto:
            learned = LearnedCosts(self._num_replicas)
            times = self._assumed.times(decoder.drafter.max_nodes + decoder.drafter.max_committed)
            decoder.budget = StepBudget(times, True, decoder.budget.limit, learned, decoder.budget.times_are_late)
        return decoder


class ReplayDevice:
    """Times simulated forward passes; also a model's timer (lp_runtime/model/forward/pass_timer.py).

    Args:
        seconds: [M + 1] seconds of a pass by its number of tokens.

    Attributes:
        values: [T, width] samples of all replicas in the current step.
        gaps: seconds between the end of each pass and the launch of the next.
        sizes: (tokens fed by the first replica, nodes of the tree) of each pass.
    """

    def __init__(self, seconds: np.ndarray):
        self._seconds = seconds
        self._last_seconds = 0.0
        self._done = 0.0  # end of the current pass
        self._steps: Iterator[np.ndarray] = iter(())
        self.values = np.zeros((0, 1), np.int64)
        self.gaps: list[float] = []
        self.sizes: list[tuple[int, int]] = []

    def begin(self, steps: Sequence[np.ndarray]) -> None:
        """Begin a request.

        Args:
            steps: [T, width] samples of all replicas, by step, the prefill's first.
        """
        self._steps = iter(steps)
        self.values = next(self._steps)
        self._done = 0.0

    def launch(self, num_tokens: int, num_nodes: int) -> None:
        """Launch a pass of `num_tokens` tokens of the first replica, from a tree of `num_nodes` nodes."""
        now = time.perf_counter()
        if self._done:
            self.gaps.append(max(0.0, now - self._done))
        self._last_seconds = float(self._seconds[num_tokens])
        self._done = now + self._last_seconds
        self.values = next(self._steps)
        self.sizes.append((num_tokens, num_nodes))

    def wait(self) -> None:
        """Wait until the current pass has ended."""
        while time.perf_counter() < self._done:
            pass

    def start(self) -> None:
        """Do nothing: a pass begins with its launch."""

    def stop(self) -> None:
        """Do nothing: the end of a pass is known at its launch."""

    def seconds(self) -> float:
        """Return the duration of the last pass, in seconds."""
        return self._last_seconds


class ReplayPasses(PassSet):
    """Writes the inputs of passes of fixed sizes, and launches them on the simulated device.

    Args:
        runner: runner whose shares are fed.

    Attributes:
        inputs: inputs of the next pass.
    """

    def __init__(self, runner: ReplayRunner):
        passes = runner.passes
        super().__init__(
            runner.model,
            runner.passes.masks,
            GraphOptions(capture=False),
            passes.keeps_logits,
            passes.cache_name,
            sample_greedily,
        )
        self._replay_device = runner.replay_device
        self.inputs: StepInputs | None = None

    def run_pass(self, one: FixedPass) -> None:
        inputs = self.inputs
        assert inputs is not None
        self._replay_device.launch(len(inputs.nodes), len(inputs.tree))
        one.logits = torch.zeros(len(one.inputs.ids), 1)
        one.presampled = torch.from_numpy(self._replay_device.values[inputs.wanted])


class ReplayRunner(ModelRunner):
    """Model that feeds prompts itself, and sends trees to a simulated device.

    Args:
        model: the runner of a real model, with the attention of attention/tree_attention.py.
        device: simulates the passes of trees.

    Attributes:
        replay_device: `device`.
    """

    def __init__(self, model: ModelRunner, device: ReplayDevice):
        super().__init__(model.model, model.prefill_chunk)
        self.replay_device = device
        self.timer = cast(PassTimer, device)  # it has the same methods
        self._replayed = self.passes.made = ReplayPasses(self)
        self.fixed_passes = FixedPasses(self.passes, self.feed)

    def forward(self, inputs: StepInputs, commit: bool = True, any_size: bool = False) -> StepLogits:
        """Launch a pass of a share, with recorded results. Arguments are those of ModelRunner."""
        self._replayed.inputs = inputs
        return super().forward(inputs, commit, any_size)


class ReplayTransport(Transport):
    """Returns the messages that the simulated replicas would have sent.

    Args:
        num_replicas: R, including the first replica, which sends real rows.
        device: knows the samples of all replicas, and when they are available.
    """

    def __init__(self, num_replicas: int, device: ReplayDevice):
        super().__init__("replay", CPU)
        self._num_replicas, self._replay_device = num_replicas, device
        self._clocks_sent: list[int] = []
        self._shares: Shares | None = None

    def expect(self, shares: Shares, clocks: list[int]) -> None:
        """Note the next exchange: the shares and the reported times of all replicas."""
        self._shares, self._clocks_sent = shares, clocks

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Fill in all rows, and wait for the device."""
        assert self._shares is not None
        rows, mine = received.numpy().reshape(self._num_replicas, -1), sent.numpy()
        rows[0] = mine
        for rank in range(1, self._num_replicas):
            values = self._replay_device.values[self._shares.owner == rank]
            rows[rank, :HEADER] = mine[0] + (rank << DIGEST_BITS), mine[1], self._clocks_sent[rank]
            rows[rank, HEADER : HEADER + values.size] = values.reshape(-1)
        self._replay_device.wait()

    def broadcast(self, data: bytes | None, is_patient: bool) -> bytes:
        """Return the first replica's own bytes: there are no other replicas."""
        assert data is not None
        return data

    def abort(self) -> None:
        """Do nothing: no replica waits."""

    def close(self) -> None:
        """Do nothing: no resources are held."""


class ReplayExchange(Exchange):
    """The first replica's exchange with simulated replicas.

    Args:
        group: group of the first replica.
        capacity: see Exchange.
        width: see Exchange.
        device: knows the samples of all replicas, and when they are available.
        clocks: times that all replicas report.
    """

    def __init__(self, group: Group, capacity: int, width: int, device: ReplayDevice, clocks: AssumedClocks):
        self._transport = ReplayTransport(group.size, device)
        super().__init__(Group(group.rank, group.size, self._transport), capacity, width)
        self._replay_device, self._clocks = device, clocks

    def start(self, shares: Shares, values: torch.Tensor, digest: int, control: int, clock: int = 0) -> None:
        """Begin an exchange with an assumed clock instead of `clock`; arguments are those of Exchange."""
        clocks = self._clocks(shares)
        self._transport.expect(shares, clocks)
        super().start(shares, values, digest, control, clocks[0])

    def finish(self) -> Outcome:
        """Wait for the device, and for the rows of the simulated replicas."""
        if self.group.is_alone:
            self._replay_device.wait()
        return super().finish()
