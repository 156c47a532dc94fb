"""Sampling from slices of a vocabulary gives the same bits as sampling from the whole vocabulary."""

from __future__ import annotations

import pickle
import weakref
from functools import partial

import pytest
import torch
from support.thinned import thinned
from transformers.generation import logits_process as library

from lp_runtime.kernels.types import Packing
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sampling import slices
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sampling.slices import MAX_NOISES, SampleRequest, SlicedLogits, VocabularySlice
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sampling.truncation import Truncation

CPU = torch.device("cpu")
SIZES = [(200, 100), (67, 67, 66), (101, 101, 101, 0), (5, 5, 3)]
NODES, TOKENS = [0, 1, 2], [5, 3]


def tree() -> TokenTree:
    tree = TokenTree([3], max_depth=4)
    tree.add_branch([1, 2])
    return tree


def scores_of(kind: str, size: int) -> torch.Tensor:
    random = 2 * torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    places = torch.tensor([1, size - 1])
    return {
        "random": random,
        "bfloat16": random.bfloat16(),
        "equal": torch.zeros(3, size),
        "few": torch.full((3, size), -torch.inf).index_fill_(1, places, 1.0),
        "none": torch.full((3, size), -torch.inf),
        "infinite": random.clone().index_fill_(1, places, torch.inf),
        "no number": random.clone().index_fill_(1, places, torch.nan),
    }[kind]


class Sliced:
    """Logits in slices; counts how often the whole logits are read."""

    def __init__(self, logits: torch.Tensor, sizes: tuple[int, ...]):
        self._logits, self._slices = logits, logits.split(sizes, dim=1)
        self._parts = [VocabularySlice(index, sizes, CPU) for index in range(len(sizes))]
        self.num_read = 0

    def _read(self, start: int, stop: int) -> torch.Tensor:
        self.num_read += 1
        return self._logits[start:stop]

    def _find(self, start: int, stop: int, draw: SampleRequest) -> torch.Tensor:
        draw = pickle.loads(pickle.dumps(draw))  # as when sent to other shards
        return torch.stack(
            [part.find(each[start:stop], draw) for part, each in zip(self._parts, self._slices, strict=True)]
        )

    def step_logits(self) -> SlicedLogits:
        return SlicedLogits(self._parts[0], self._read, self._find, range(len(self._logits)))


def outcome(logits: StepLogits, processors: list, seed: int | None, num_top_k: int, size: int, steps: int = 2) -> list:
    noise = None if seed is None else GumbelNoise(seed, 1, size, CPU)
    sampler = Sampler(TreeProcessors(processors, CPU), noise, num_top_k=num_top_k)
    packed = []
    for step in range(steps):  # noise is cached between steps
        tokens = [*TOKENS, *range(step)]
        packed.append(sampler.sample(logits, tree(), NODES, tokens)[0].tolist())
        packed.append(sampler.sample(logits, tree(), NODES, tokens, with_top_k=False)[0].tolist())
        packed.append(sampler.sample(logits.first(2), tree(), NODES[:2], tokens)[0].tolist())
        none, _ = sampler.sample(logits.first(0), tree(), [], tokens)  # a replica may own no nodes
        assert none.shape == (0, sampler.width)
    return packed


@pytest.mark.parametrize(
    ("sizes", "kind", "seed", "num_top_k", "temperature"),
    thinned(
        11,
        SIZES,
        ["random", "bfloat16", "equal", "few", "none", "infinite", "no number"],
        [None, 7, (1 << 63) + 5],
        [0, 3, K],
        [None, 0.7, 1.3],
    ),
)
def test_slices_match_the_whole_vocabulary(sizes, kind, seed, num_top_k, temperature):
    logits = scores_of(kind, sum(sizes))
    processors = [] if temperature is None else [library.TemperatureLogitsWarper(temperature)]
    sliced = Sliced(logits, sizes)
    outcome_of = partial(outcome, processors=processors, seed=seed, num_top_k=num_top_k, size=sum(sizes))
    assert outcome_of(sliced.step_logits()) == outcome_of(StepLogits(logits))
    assert sliced.num_read == 0


@pytest.mark.parametrize("processor", [library.TopPLogitsWarper(0.8), library.RepetitionPenaltyLogitsProcessor(1.2)])
def test_processor_that_needs_all_logits_reads_them(processor):
    logits = scores_of("random", 300)
    sliced = Sliced(logits, (150, 150))
    expected = outcome(StepLogits(logits), [processor], 7, K, 300)
    assert outcome(sliced.step_logits(), [processor], 7, K, 300) == expected
    assert sliced.num_read


def test_logprobs_and_scores_of_slices_match_the_whole_vocabulary():
    logits = scores_of("random", 300)
    sampler = Sampler(TreeProcessors([library.TemperatureLogitsWarper(0.5)], CPU), None, True, K, num_top_logprobs=3)
    results = []
    for step_logits in (StepLogits(logits), Sliced(logits, (150, 150)).step_logits()):
        packed, scores = sampler.sample(step_logits, tree(), NODES, TOKENS)
        results.append((packed.tolist(), scores()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_split_returns_the_rows_of_each_part():
    logits = scores_of("random", 300)
    first, second = Sliced(logits, (200, 100)).step_logits().split([1, 2])
    assert torch.equal(first.logits, logits[:1]) and torch.equal(second.copy().logits, logits[1:])
    assert len(second) == 2 and second.device == CPU


def test_slice_keeps_the_noise_of_the_latest_requests_only(monkeypatch):
    kept: weakref.WeakSet[GumbelNoise] = weakref.WeakSet()

    class TrackedNoise(GumbelNoise):
        def __init__(self, *args):
            super().__init__(*args)
            kept.add(self)

    monkeypatch.setattr(slices, "GumbelNoise", TrackedNoise)
    part, logits = VocabularySlice(0, (6, 5), CPU), torch.zeros(1, 6)
    for seed in range(MAX_NOISES + 9):
        part.find(logits, SampleRequest(Packing(0, 1), Truncation(), (seed, 0), [3]))
    assert {noise.seed for noise in kept} == set(range(9, MAX_NOISES + 9))
