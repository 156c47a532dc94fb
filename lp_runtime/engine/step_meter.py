"""Measures how long a replica's steps take, by their number of tokens."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from lp_runtime.lookahead.drafters.best_first.tables import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.step_inputs import StepInputs
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens of measured steps
CONTEXT_TOKENS = 256  # cached while steps are measured
MEASURE_SECONDS = 2.0  # that measuring may take, about
MIN_MEASURED_TOKENS = 16  # steps of so many tokens are measured whatever it takes
MIN_ROUNDS, MAX_ROUNDS = 2, 5  # besides the first, in which steps of all sizes are compiled
NUM_WARM = 4  # steps of one token that are not timed, in each round: those behind a long pass are slow on a CPU
MAX_COST_MULTIPLE = 12  # no step is measured that costs this multiple of one token's: none so large ever pays
BRANCH_TOKENS = 8  # of a measured tree's branches, as drafted trees have about
MAX_POINTS = 64  # measured steps of a replica
HARVESTED_TOKENS = 32  # of the prompts whose prefill is timed with and without their top-k candidates
HARVEST_ROUNDS = 3


class StepMeasurement(NamedTuple):
    """Measured steps of one replica.

    Attributes:
        tokens: [points] tokens of each measured step, ascending.
        nanoseconds: [points] the shortest duration of each.
        num_padded: [] up to so many tokens a pass is padded to the next of `tokens`; 0 for none.
        harvest_ns: [] how much longer a prefill takes for each token whose top-k candidates are found.
    """

    tokens: np.ndarray
    nanoseconds: np.ndarray
    num_padded: np.ndarray
    harvest_ns: np.ndarray


def row_of(steps: StepMeasurement) -> np.ndarray:
    """Return measured steps as [2 + 2 MAX_POINTS] int64, for a gather."""
    row = np.zeros(2 + 2 * MAX_POINTS, dtype=np.int64)
    num_points = len(steps.tokens)
    row[0], row[1], row[2 : 2 + num_points] = steps.num_padded, steps.harvest_ns, steps.tokens
    row[2 + MAX_POINTS :][:num_points] = steps.nanoseconds
    return row


def measurement_of(row: np.ndarray) -> StepMeasurement:
    """Return measured steps from what `row_of` returned."""
    tokens, nanoseconds = row[2:].reshape(2, MAX_POINTS)
    num_points = int((tokens > 0).sum())
    return StepMeasurement(tokens[:num_points], nanoseconds[:num_points], row[0], row[1])


def make_greedy_sampler(model: ModelRunner) -> Sampler:
    """Return a sampler of a model's likeliest tokens, with K top-k candidates."""
    return Sampler(TreeProcessors([], model.device), None, num_top_k=K)


def measure_steps(model: ModelRunner) -> StepMeasurement:
    """Measure how long this replica takes to feed a tree, sample the successors and read them back."""
    with model.slots.borrowed() as slot:
        return _StepMeter(model, slot).measure()


class _StepMeter:
    """Times steps of various sizes behind a short context.

    Args:
        model: this replica's.
        slot: is fed; its content is lost.
    """

    def __init__(self, model: ModelRunner, slot: CacheSlot):
        self._model, self._slot, self._sampler = model, slot, make_greedy_sampler(model)
        num_context = max(1, min(CONTEXT_TOKENS, (model.context_length or CONTEXT_TOKENS) // 4))
        self._context = [i % model.vocabulary_size for i in range(num_context)]
        # A step commits a token, and there are three of each size: positions stay within a short context, too.
        length = model.context_length
        max_tokens = GRID[-1] if length is None else length - num_context - 3 * len(GRID) - 8
        # A pass of a fixed size costs what it is padded to: those sizes are measured, and no others among them.
        limit = max(1, min(GRID[-1], max_tokens))
        padded = [size for size in model.pass_sizes if size <= limit]
        self._num_padded = padded[-1] if padded else 0
        self._sizes = [*padded, *(size for size in GRID if self._num_padded < size <= limit)]

    def measure(self) -> StepMeasurement:
        """Return the durations of steps, as many as there is time for: of each size the shortest that was seen.

        What disturbs a step makes it longer, and one that seems dear is never taken, so nothing later would tell.
        """
        durations, deadline = self._first_round()
        sizes = self._sizes[: len(durations)]
        for number in range(MAX_ROUNDS):
            if number >= MIN_ROUNDS and time.perf_counter() > deadline:
                break
            self._begin()
            for _ in range(NUM_WARM):
                self._step(1)
            for place, size in enumerate(sizes):
                if size > MIN_MEASURED_TOKENS and time.perf_counter() > deadline:
                    break
                durations[place] = min(durations[place], self._step(size))
        return StepMeasurement(
            np.array(sizes), np.array(durations), np.array(self._num_padded), np.array(self._harvest_ns())
        )

    def _first_round(self) -> tuple[list[int], float]:
        """Run steps of every size that may pay and fits into the memory and, beyond some, into the time.

        Returns:
            ([points] nanoseconds of the sizes, the time of `time.perf_counter` at which measuring should end).
        """
        deadline = time.perf_counter() + MEASURE_SECONDS
        self._begin()
        durations: list[int] = []
        for size in self._sizes:
            try:
                warming_up = time.perf_counter()
                self._step(size)  # the first of each size compiles and captures, whatever that takes
                deadline += time.perf_counter() - warming_up
                durations.append(min(self._step(size), self._step(size)))
            except torch.OutOfMemoryError:
                break
            is_late = time.perf_counter() > deadline and size >= MIN_MEASURED_TOKENS
            if is_late or durations[-1] > MAX_COST_MULTIPLE * durations[0]:
                break
        return durations, deadline

    def _harvest_ns(self) -> int:
        """Return how many nanoseconds longer a prefill takes for each token whose top-k candidates are found."""
        prompt = self._context[:HARVESTED_TOKENS]
        durations: dict[bool, list[int]] = {False: [], True: []}
        for _ in range(HARVEST_ROUNDS):
            for harvests, times in durations.items():
                self._model.begin(self._slot, len(prompt))
                start = time.perf_counter_ns()
                logits = self._model.feed_prompt(self._slot, prompt, range(len(prompt)) if harvests else None)
                self._sampler.pack_candidates(logits).cpu()
                times.append(time.perf_counter_ns() - start)
        return max(0, min(durations[True]) - min(durations[False])) // len(prompt)

    def _begin(self) -> None:
        self._model.begin(self._slot, len(self._context) + 3 * len(self._sizes) + NUM_WARM + self._sizes[-1])
        self._model.prefill(self._slot, self._context)

    def _step(self, size: int) -> int:
        """Run a step of so many tokens; return its nanoseconds."""
        model = self._model
        nodes = np.arange(size)
        branch_tokens = size if model.feeds_chains else BRANCH_TOKENS
        parents = np.where(nodes % branch_tokens == 1, 0, nodes - 1) if branch_tokens > 1 else nodes - 1
        depths = np.where(nodes > 0, (nodes - 1) % branch_tokens + 1, 0)
        tree = TokenTree.from_arrays(nodes % model.vocabulary_size, parents, depths, nodes, 0, max_depth=branch_tokens)
        inputs = StepInputs(self._slot, tree, nodes.tolist(), nodes.tolist())
        start = time.perf_counter_ns()
        found = model.forward(inputs)
        self._sampler.sample(found, tree, inputs.nodes, self._context)[0].cpu()
        return time.perf_counter_ns() - start
