"""Logits stay on their shards: successors are found in slices, and logits are gathered only if read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.shards import run_shards
from transformers.generation import logits_process as library

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.shards import ShardPlace
from lp_runtime.errors import ShardError
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.head import ReadRows
from lp_runtime.model.forward.passes import Pass
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.loading import ready_follower, ready_model
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sampling.step_logits import StepLogits

CPU = torch.device("cpu")
PROMPT = list(range(3, 15))
NUCLEUS = [library.TemperatureLogitsWarper(0.7), library.TopPLogitsWarper(0.8)]


def config_of(folder: Path, exactness: str) -> RuntimeConfig:
    config = RuntimeConfig(model=ModelConfig(path=str(folder), prefill_chunk=5), dtype="float32", device="cpu")
    return replace(config, exactness=exactness)


def samplers(model: ModelRunner) -> list[tuple[Sampler, bool]]:
    """Return samplers, each with whether it reads all logits."""
    size = model.vocabulary_size

    def sampler(processors: list, seed: int | None = None, with_logprobs: bool = False) -> Sampler:
        noise = None if seed is None else GumbelNoise(seed, 0, size, CPU)
        return Sampler(TreeProcessors(processors, CPU), noise, with_logprobs, K)

    return [
        (sampler([]), False),
        (sampler([], seed=3), False),
        (sampler(NUCLEUS[:1], seed=3), False),
        (sampler(NUCLEUS, seed=3), True),
        (sampler([], with_logprobs=True), True),
    ]


def play(place: ShardPlace, folder: Path, exactness: str) -> object:
    config = config_of(folder, exactness)
    if not place.is_leader:
        with pytest.raises(ShardError):
            for _ in ready_follower(config, CPU, place).messages():
                pass
        return None
    model, _ = ready_model(config, CPU, place=place)
    kinds, feed = [], model.feed

    def counted(work: Pass, *arguments: object) -> torch.Tensor:
        kinds.append(type(work))
        return feed(work, *arguments)

    model.feed = counted
    kept, tree, nodes = [], TokenTree([4], max_depth=3), [0, 1, 2, 3]
    tree.add_branch([7, 8, 9])
    slots = [CacheSlot(), CacheSlot()]
    for slot in slots:
        model.begin(slot, 40)
        model.prefill(slot, PROMPT)
    for sampler, reads in samplers(model):
        for batch in [slots[:1], slots] if model.supports_batching else [slots[:1]]:
            kinds.clear()
            for actual in model.forward_batch([StepInputs.whole(slot, tree) for slot in batch], commit=False):
                packed, scores = sampler.sample(actual, tree, nodes, [*PROMPT, 4])
                assert (ReadRows in kinds) == reads
                kept.append((sampler, packed, actual.logits, scores()))
                kinds.clear()
    model.leading.close()
    for sampler, packed, logits, scores in kept:  # sampling from the gathered logits gives the same result
        expected, processed = sampler.sample(StepLogits(logits), tree, nodes, [*PROMPT, 4])
        assert packed.tolist() == expected.tolist()
        assert torch.equal(scores, processed())
    return kept[0][2]


@pytest.mark.parametrize(
    ("name", "exactness"),
    [("Llama", "fast"), ("Gemma2", "fast"), pytest.param("Llama", "strict", marks=pytest.mark.slow)],
)
def test_sharded_logits_are_gathered_only_if_read(make_model_dir, name, exactness):
    """Gemma 2 is tested because it caps its logits after the head."""
    folder = make_model_dir(name)
    logits, _ = run_shards(play, 2, folder, exactness)
    whole, _ = ready_model(config_of(folder, exactness), CPU)
    slot, tree = CacheSlot(), TokenTree([4], max_depth=3)
    tree.add_branch([7, 8, 9])
    whole.begin(slot, 40)
    whole.prefill(slot, PROMPT)
    expected = whole.forward(StepInputs.whole(slot, tree)).logits
    assert torch.allclose(logits, expected, atol=2e-5, rtol=1e-4)
