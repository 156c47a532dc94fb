"""Measurement of a replica's step durations by number of tokens."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.capacity import free_bytes
from lp_runtime.model.forward.passes import Pretend
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sizing.cost_model import PREFIX_UNIT
from lp_runtime.utils.memory import is_out_of_memory

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens of measured steps
CONTEXT_TOKENS = 256  # cached while steps are measured
MEASURE_SECONDS = 2.0  # approximate time limit of measuring
MIN_MEASURED_TOKENS = 16  # steps of up to this many tokens are measured even past the time limit
MIN_ROUNDS, MAX_ROUNDS = 1, 5  # not counting the first round, which compiles steps of all sizes
NUM_WARM = 4  # untimed one-token steps at the start of each round: on a CPU, steps after a long pass are slow
MAX_ESTIMATED_MULTIPLE = 4  # where time ran out, times are estimated up to this multiple of the largest measured size
MAX_COST_MULTIPLE = 12  # stop at steps that cost this multiple of a one-token step: none that large ever pays
BRANCH_TOKENS = 8  # length of a measured tree's branches, about that of drafted trees
MAX_POINTS = 64  # largest number of step sizes measured on a replica
HEADER = 4  # integers of a row before the points
LONG_TOKENS = 4096  # cached tokens while the cost of a long context is measured
LONG_SIZES = (1, 16)  # tokens of the steps measured with a long context
LONG_ROUNDS = 3
NOISE_SHARE = 20  # a difference of less than 1/20 between two steps counts as noise
MAX_LONG_NS = 100_000_000  # the long context is not measured if a one-token step takes longer than this
MAX_LONG_SHARE = 8  # the long context may use 1/8 of the free memory
HARVESTED_TOKENS = 32  # length of the prompts whose prefill is timed with and without top-k candidates
HARVEST_ROUNDS = 3


class StepMeasurement(NamedTuple):
    """Measured step durations of one replica.

    Attributes:
        tokens: [points] tokens of each measured step, ascending; the last ones may be estimated.
        nanoseconds: [points] shortest duration of each.
        num_padded: [] passes of up to this many tokens are padded to the next size in `tokens`; 0 for none.
        harvest_ns: [] additional prefill time for each token whose top-k candidates are collected.
        prefix_ns: [2] what PREFIX_UNIT more committed tokens add to a step of one token, and to each further token.
    """

    tokens: np.ndarray
    nanoseconds: np.ndarray
    num_padded: np.ndarray
    harvest_ns: np.ndarray
    prefix_ns: np.ndarray


def checked_measurement(saved: Mapping[str, np.ndarray]) -> StepMeasurement:
    """Return the measured steps in a file; ValueError if they cannot have been measured."""
    steps = StepMeasurement(**saved)
    points, num_points = (steps.tokens, steps.nanoseconds), steps.tokens.size
    are_points = all(each.shape == (num_points,) and (each > 0).all() for each in points)
    if not (are_points and 0 < num_points <= MAX_POINTS and (np.diff(steps.tokens) > 0).all()):
        raise ValueError("the points do not fit")
    if [each.shape for each in steps[2:]] != [(), (), (2,)] or not all(each.dtype.kind == "i" for each in steps):
        raise ValueError("the costs do not fit")
    return steps


def row_of(steps: StepMeasurement) -> np.ndarray:
    """Pack measured steps into [HEADER + 2 * MAX_POINTS] int64, for a gather."""
    row = np.zeros(HEADER + 2 * MAX_POINTS, dtype=np.int64)
    row[0], row[1], row[2:HEADER] = steps.num_padded, steps.harvest_ns, steps.prefix_ns
    points = row[HEADER:].reshape(2, MAX_POINTS)
    points[:, : len(steps.tokens)] = steps.tokens, steps.nanoseconds
    return row


def measurement_of(row: np.ndarray) -> StepMeasurement:
    """Unpack measured steps from a row made by `row_of`."""
    tokens, nanoseconds = row[HEADER:].reshape(2, MAX_POINTS)
    num_points = int((tokens > 0).sum())
    return StepMeasurement(tokens[:num_points], nanoseconds[:num_points], row[0], row[1], row[2:HEADER])


def make_greedy_sampler(model: ModelRunner) -> Sampler:
    """Return a greedy sampler that reports K top-k candidates."""
    return Sampler(TreeProcessors([], model.device), None, num_top_k=K)


def num_context_tokens(model: ModelRunner) -> int:
    """Return how many tokens are cached while a model's steps are measured."""
    return max(1, min(CONTEXT_TOKENS, (model.context_length or CONTEXT_TOKENS) // 4))


def _clearly_more(duration: int, other: int) -> int:
    """Return how much longer `duration` is than `other`; 0 if the difference may be noise."""
    return duration - other if duration > other + other // NOISE_SHARE else 0


def dummy_tree(size: int, branch_tokens: int, vocabulary_size: int) -> TokenTree:
    """Return a tree of `size` tokens whose branches of `branch_tokens` tokens start at the root."""
    nodes = np.arange(size)
    parents = np.where(nodes % branch_tokens == 1, 0, nodes - 1) if branch_tokens > 1 else nodes - 1
    depths = np.where(nodes > 0, (nodes - 1) % branch_tokens + 1, 0)
    return TokenTree.from_arrays(nodes % vocabulary_size, parents, depths, nodes, 0, max_depth=branch_tokens)


def measure_steps(model: ModelRunner) -> StepMeasurement:
    """Measure how long this replica takes to feed trees, sample the successors and read them back."""
    with model.slots.borrowed() as slot:
        return _StepMeter(model, slot).measure()


class _StepMeter:
    """Times steps of various sizes after a short context; the slot's content is overwritten."""

    def __init__(self, model: ModelRunner, slot: CacheSlot):
        self._model = model
        self._slot = slot
        self._sampler = make_greedy_sampler(model)
        num_context = num_context_tokens(model)
        self._context = [i % model.vocabulary_size for i in range(num_context)]
        # Each step commits a token and each size runs three times; keep positions within a model's short context.
        length = model.context_length
        max_tokens = GRID[-1] if length is None else length - num_context - 3 * len(GRID) - 8
        # A padded pass costs as much as its padded size, so up to the largest one only those sizes are measured.
        limit = max(1, min(GRID[-1], max_tokens))
        padded = [size for size in model.pass_sizes if size <= limit]
        self._num_padded = padded[-1] if padded else 0
        self._sizes = [*padded, *(size for size in GRID if self._num_padded < size <= limit)]

    def measure(self) -> StepMeasurement:
        """Measure as many steps as time allows."""
        # The shortest of several counts: a size that seems too slow would never be used, and never be corrected.
        durations, deadline, is_late = self._first_round()
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
        harvest_ns, prefix_ns = self._harvest_ns(), self._prefix_ns(dict(zip(sizes, durations, strict=True)))
        if is_late:
            durations += self._estimates(durations)
            sizes = self._sizes[: len(durations)]
        return StepMeasurement(
            np.array(sizes), np.array(durations), np.array(self._num_padded), np.array(harvest_ns), np.array(prefix_ns)
        )

    def _estimates(self, durations: list[int]) -> list[int]:
        """Return nanoseconds of the next sizes, on the line through the first and the last of the `durations`.

        A machine that is busy now may be faster later, and steps show what they take: larger sizes should be possible.
        """
        first, last = self._sizes[0], self._sizes[len(durations) - 1]
        # A disturbed first size may seem slower than the last one.
        slope = max(0, durations[-1] - durations[0]) / max(1, last - first)
        larger = [size for size in self._sizes[len(durations) :] if size <= MAX_ESTIMATED_MULTIPLE * last]
        estimates = [int(durations[-1] + slope * (size - last)) for size in larger]
        return [estimate for estimate in estimates if estimate <= MAX_COST_MULTIPLE * durations[0]]

    def _first_round(self) -> tuple[list[int], float, bool]:
        """Run steps of every size, up to limits of cost, memory and (after MIN_MEASURED_TOKENS) time.

        Returns ([points] nanoseconds of the sizes, the `time.perf_counter` value at which measuring should end, whether
        the limit of time was reached).
        """
        deadline = time.perf_counter() + MEASURE_SECONDS
        self._begin()
        durations: list[int] = []
        is_late = False
        for size in self._sizes:
            try:
                warming_up = time.perf_counter()
                self._step(size)  # the first step of a size compiles and captures; this time does not count
                deadline += time.perf_counter() - warming_up
                durations.append(self._step(size))
                if time.perf_counter() < deadline:
                    durations[-1] = min(durations[-1], self._step(size))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                break
            is_late = time.perf_counter() > deadline and size >= MIN_MEASURED_TOKENS
            if is_late or durations[-1] > MAX_COST_MULTIPLE * durations[0]:
                break
        return durations, deadline, is_late

    def _harvest_ns(self) -> int:
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

    def _prefix_ns(self, durations: Mapping[int, int]) -> tuple[int, int]:
        """Return `StepMeasurement.prefix_ns`, given the durations after the short context by number of tokens."""
        num_long, num_short = self._num_long(), len(self._context)
        one, several = LONG_SIZES
        if num_long < 2 * num_short or not durations.keys() >= set(LONG_SIZES) or durations[one] > MAX_LONG_NS:
            return 0, 0
        longer = dict.fromkeys(LONG_SIZES, sys.maxsize)
        slot = self._slot
        self._slot = CacheSlot()  # its keys and values are dummies, and its memory is freed afterwards
        try:
            self._begin(num_long)
            for _ in range(NUM_WARM):
                self._step(one)
            for _ in range(LONG_ROUNDS):
                for size in LONG_SIZES:
                    longer[size] = min(longer[size], self._step(size))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return 0, 0
        finally:
            self._slot = slot
        of_one, of_several = (_clearly_more(longer[size], durations[size]) for size in LONG_SIZES)
        each = max(0, of_several - of_one) // (several - one)
        return of_one * PREFIX_UNIT // (num_long - num_short), each * PREFIX_UNIT // (num_long - num_short)

    def _num_long(self) -> int:
        """Return the length of the dummy context for measuring a long context's cost; 0 or less for none."""
        model = self._model
        if not self._can_pretend:
            return 0
        longest = min(model.context_length or sys.maxsize, model.rotary_lengths.threshold)
        free = free_bytes(model.device) or 0
        affordable = free // MAX_LONG_SHARE // max(1, self._slot.cache.bytes_per_token)
        return min(LONG_TOKENS, affordable, longest - LONG_ROUNDS * sum(LONG_SIZES) - NUM_WARM - 8)

    def _begin(self, num_pretended: int = 0) -> None:
        """Reset the slot to the context, or to `num_pretended` copies of its first token's keys and values."""
        num_tokens = max(len(self._context), num_pretended)
        self._model.begin(self._slot, num_tokens + 3 * len(self._sizes) + NUM_WARM + self._sizes[-1])
        if not self._can_pretend:
            self._model.prefill(self._slot, self._context)
            return
        self._model.prefill(self._slot, self._context[:1])
        self._model.feed(Pretend(num_tokens), [self._slot.cache])
        self._slot.tokens = [0] * num_tokens

    @property
    def _can_pretend(self) -> bool:
        """Whether a slot can hold dummy keys and values: not on several GPUs, whose free memory is unknown."""
        return not self._model.feeds_chains and self._model.leading is None

    def _step(self, size: int) -> int:
        """Return the duration, in ns, of a step of `size` tokens."""
        model = self._model
        tree = dummy_tree(size, size if model.feeds_chains else BRANCH_TOKENS, model.vocabulary_size)
        inputs = StepInputs(self._slot, tree, list(range(size)), list(range(size)))
        start = time.perf_counter_ns()
        logits = model.forward(inputs)
        self._sampler.sample(logits, tree, inputs.nodes, self._context)[0].cpu()
        return time.perf_counter_ns() - start
