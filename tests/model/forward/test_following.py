"""Followers run the passes that shard 0 announces, and their caches change as shard 0's do."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support.shards import run_shards
from support.small_models import LONG
from support.versions import needs_rotary_by_length

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.shards import ShardPlace
from lp_runtime.errors import ShardError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.passes import Passes
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.rotary_lengths import UNCHANGING
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.tensor_parallel.layers import RowwiseLinear
from lp_runtime.replica.loading import ready_follower, ready_model

CPU = torch.device("cpu")
PROMPT = list(range(3, 15))
REFED_AT = len(PROMPT) + 2  # tokens; the text of `story` exceeds this with the root of its second tree
REFED = LONG | {"original_max_position_embeddings": REFED_AT}


def config_of(folder: Path) -> RuntimeConfig:
    return RuntimeConfig(model=ModelConfig(path=str(folder), prefill_chunk=5), dtype="float32", device="cpu")


def tree_of(root: list[int]) -> TokenTree:
    tree = TokenTree(root, max_depth=3)
    tree.add_branch([7, 8, 9])
    tree.add_branch([7, 20])
    return tree


def story(model: ModelRunner) -> list[torch.Tensor]:
    """Return logits of a sequence that grows, is truncated, is resumed and is batched with another one."""
    results = []
    first, second = CacheSlot(), CacheSlot()
    model.begin(first, 20)
    results.append(model.prefill(first, PROMPT))
    results.append(model.forward(StepInputs.whole(first, tree_of([4]))).logits)
    results.append(model.forward(StepInputs.whole(first, tree_of([7, 8]))).logits)
    for _ in model.resume(first, PROMPT, [4, 7, 20, 21, 22], 90):  # cached tokens differ from the third one on
        pass
    assert first.cache.capacity >= 90
    results.append(model.forward(StepInputs.whole(first, tree_of([22]))).logits)
    model.begin(second, 40)
    results.append(model.prefill(second, PROMPT[::-1]))
    both = [StepInputs.whole(first, tree_of([30])), StepInputs.whole(second, tree_of([31]))]
    results += [each.logits for each in model.forward_batch(both)]
    model.begin(second, 7)
    results.append(model.logits_after_each(second, [[1, 2], [1, 3], [4, 2]], [5]).logits)
    return [each.clone() for each in results]


def play(place: ShardPlace, folder: Path) -> object:
    if not place.is_leader:
        follower = ready_follower(config_of(folder), CPU, place)
        counts = []
        with pytest.raises(ShardError):
            for message in follower.messages():
                assert message == "count"
                counts.append(len(follower._caches))
        return counts
    model, difference = ready_model(config_of(folder), CPU, place=place)
    assert model.leading is not None and difference < 1e-5 and model.supports_batching
    actual = story(model)
    gc.collect()
    model.slots.clear()  # the slots that the self-check has used
    slot = CacheSlot()
    model.begin(slot, 20)
    model.prefill(slot, PROMPT)  # announces the dropped caches
    model.leading.tell("count")
    model.leading.close()
    return actual


@pytest.mark.parametrize(
    ("name", "settings"), [("Llama", {}), pytest.param("Phi3", REFED, marks=[needs_rotary_by_length, pytest.mark.slow])]
)
def test_followers_mirror_the_caches_of_shard_0(make_model_dir, name, settings):
    """If rotary factors depend on the prompt's length, followers receive that length, too."""
    folder = make_model_dir(name, **settings)
    result, counts = run_shards(play, 2, folder)
    whole = ModelRunner(load_model(ModelConfig(path=str(folder)), CPU, "float32"), 5, own_attention=True)
    assert whole.rotary_lengths.refed_at == (REFED_AT if settings else None)
    for actual, expected in zip(result, story(whole), strict=True):
        assert torch.allclose(actual, expected, atol=2e-5, rtol=1e-4)
    assert counts == [1]


def lack_memory(owner: type, name: str, at_end: bool) -> None:
    """Make the second call of a method raise an out-of-memory error, before or after its work."""
    method, calls = getattr(owner, name), iter(range(1 << 20))

    def call(*args, **options):
        number = next(calls)
        actual = method(*args, **options) if at_end or number != 1 else None
        if number == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return actual

    setattr(owner, name, call)  # never undone: this process ends with the test


def play_without_memory(place: ShardPlace, folder: Path, who: str, owner: type, name: str, at_end: bool) -> object:
    is_short = who in ("all", "leader" if place.is_leader else "follower")
    if not place.is_leader:
        follower = ready_follower(config_of(folder), CPU, place)
        with pytest.raises(ShardError):
            for message in follower.messages():
                assert message == "lack memory"
                if is_short:
                    lack_memory(owner, name, at_end)
        return None
    model, _ = ready_model(config_of(folder), CPU, place=place)
    assert model.leading is not None
    model.leading.tell("lack memory")
    if is_short:
        lack_memory(owner, name, at_end)
    slot = CacheSlot()
    model.begin(slot, 20)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model.prefill(slot, PROMPT)
    assert raised.value.__context__ is None, "the frames of another error would keep the pass's tensors"
    model.free_memory()
    actual = story(model)
    model.leading.close()
    return actual


@pytest.mark.parametrize(
    ("who", "owner", "name", "at_end"),
    [
        ("leader", RowwiseLinear, "forward", False),
        pytest.param("follower", RowwiseLinear, "forward", False, marks=pytest.mark.slow),
        pytest.param("all", RowwiseLinear, "forward", False, marks=pytest.mark.slow),
        ("follower", Passes, "run", True),
        pytest.param("leader", Passes, "run", True, marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_pass_is_aborted_on_all_shards(make_model_dir, who, owner, name, at_end):
    """The other shards may be anywhere in the pass; the next passes are correct."""
    folder = make_model_dir("Llama")
    result, _ = run_shards(play_without_memory, 2, folder, who, owner, name, at_end)
    whole = ModelRunner(load_model(ModelConfig(path=str(folder)), CPU, "float32"), 5, own_attention=True)
    for actual, expected in zip(result, story(whole), strict=True):
        assert torch.allclose(actual, expected, atol=2e-5, rtol=1e-4)


def fail(place: ShardPlace, folder: Path) -> str:
    if not place.is_leader:
        follower = ready_follower(config_of(folder), CPU, place)
        try:
            for _ in follower.messages():
                pass
        except ShardError as error:
            return str(error)
    model, _ = ready_model(config_of(folder), CPU, place=place)
    slot = CacheSlot()
    model.begin(slot, 20)
    model.passes = Broken()
    try:
        model.prefill(slot, PROMPT)
    except ShardError as error:
        return str(error)


class Broken:
    """Passes that fail; only shard 0 has them."""

    lengths = UNCHANGING

    are_captured = False

    def run(self, *args: object) -> torch.Tensor:
        raise RuntimeError("an illegal memory access")


def test_pass_failure_on_shard_0_ends_the_replica(tiny_model_dir):
    """The other shards wait inside the pass and must not wait forever."""
    mine, theirs = run_shards(fail, 2, tiny_model_dir)
    assert mine == "a pass failed on shard 0: an illegal memory access"
    assert "rank 0 is gone" in theirs
