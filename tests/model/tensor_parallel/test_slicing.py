"""Models sliced across two or three processes compute the same as the whole models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from support.shards import run_shards
from support.small_models import FAMILIES, SHAPE
from support.versions import VERSION, needs_sliced_vocabulary
from transformers import AutoConfig

from lp_runtime.config.settings import ModelConfig
from lp_runtime.distributed.process_group import new_segment_name
from lp_runtime.distributed.shards import ShardLink, ShardPlace
from lp_runtime.errors import ModelError
from lp_runtime.model.forward.passes import FeedText
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.loading.sizes import size_of_model
from lp_runtime.model.modules.fusing import fuse_blocks
from lp_runtime.model.modules.packed_linear import PackedLinear, pack_linears
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.tensor_parallel.slicing import check_shards, slice_model

CPU = torch.device("cpu")
TEXT = [5, 3, 62, 17, 40, 41, 8, 8, 1, 30, 59, 2]
TIED = {"tie_word_embeddings": True}
CASES = {
    "llama": {},
    "llama, tied": TIED,
    "llama, a vocabulary of 63, tied": {"vocab_size": 63} | TIED,
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, an MLP of 45": {"intermediate_size": 45},
    "llama, all of these": {"vocab_size": 63, "attention_bias": True, "mlp_bias": True, "intermediate_size": 45} | TIED,
    "qwen2": {},
    "qwen3": {},
    "gemma3": TIED,
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "phi3": {},
    "olmo2": {},
}
if VERSION < (5, 21):  # these versions do not split a vocabulary, or only one that the shards divide
    del CASES["llama, a vocabulary of 63, tied"]
    del CASES["llama, all of these"]["vocab_size"]
ALSO_SLOW = (*(case for case in CASES if case.startswith("llama") and case != "llama, all of these"), "qwen2", "qwen3")
WHOLE_ATTENTION = ("phi3", "olmo2")  # their plans gather queries, keys and values on every shard


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["most", "others"])
def model_dirs(request, tmp_path_factory, random_model) -> dict[str, Path]:
    """Save a checkpoint for each case, with nontrivial biases and norms."""
    folders = {}
    for case, settings in CASES.items():
        if (case in ALSO_SLOW) != request.param:
            continue
        name, family = FAMILIES[case.partition(",")[0]]
        model = random_model(name, **family | settings)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        folders[case] = tmp_path_factory.mktemp("model")
        model.save_pretrained(folders[case])
    return folders


def logits_of(model: ModelRunner) -> torch.Tensor:
    slot = CacheSlot()
    model.begin(slot, 64)
    chunk = model.prefill(slot, TEXT[:8])
    assert slot.cache.bytes_per_token
    return torch.cat([chunk, model.prefill(slot, TEXT[8:]), model.feed(FeedText(TEXT, len(TEXT)))])


def computed_by_shard(place: ShardPlace, folders: dict[str, Path]) -> dict[str, tuple]:
    """Slice each model for one shard and run it.

    Return for each model: the logits of the sliced model; the logits after fusing and packing; the number of weights;
    the bytes of a cached token; the number of packed layers; the bytes of the weights.
    """
    results = {}
    for case, folder in folders.items():
        own = dataclasses.replace(place, segment=f"{place.segment}-{list(folders).index(case)}")
        loaded = load_model(ModelConfig(path=str(folder)), CPU, "float32", own)
        link = ShardLink(own, CPU, 60.0)
        slice_model(loaded, link)
        num_weights = sum(each.numel() for each in loaded.parameters())
        num_bytes = sum(each.numel() * each.element_size() for each in [*loaded.parameters(), *loaded.buffers()])
        before = logits_of(ModelRunner(loaded, 2048, own_attention=True))
        fuse_blocks(loaded)
        pack_linears(loaded)
        runner = ModelRunner(loaded, 2048, own_attention=True)
        slot = CacheSlot()
        runner.begin(slot, 64)
        runner.prefill(slot, TEXT)
        packed = sum(isinstance(each, PackedLinear) for each in loaded.modules())
        results[case] = before, logits_of(runner), num_weights, slot.cache.bytes_per_token, packed, num_bytes
        link.close()
    return results


def test_two_shards_match_the_whole_model(model_dirs):
    actual = run_shards(computed_by_shard, 2, model_dirs)
    for case, folder in model_dirs.items():
        runner = ModelRunner(load_model(ModelConfig(path=str(folder)), CPU, "float32"), 2048, own_attention=True)
        whole, slot = logits_of(runner), CacheSlot()
        runner.begin(slot, 64)
        runner.prefill(slot, TEXT)
        first, second = (each[case] for each in actual)
        for logits in (*first[:2], *second[:2]):
            assert torch.allclose(logits, whole, atol=2e-5, rtol=1e-4), case
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]), case
        if case not in WHOLE_ATTENTION:
            assert 2 * first[3] == slot.cache.bytes_per_token, case
        num_weights = sum(each.numel() for each in runner.model.parameters())
        norms = sum(each.numel() for name, each in runner.model.named_parameters() if "proj" not in name)
        assert first[2] + second[2] < num_weights + 2 * norms, case
        assert first[4] and second[4], case
        size = size_of_model(ModelConfig(path=str(folder)), "float32")  # known without reading weights
        if VERSION >= (5, 21) or case != "gpt_oss":  # before 5.21, our plan does not slice the embedding
            assert (size.weight_bytes(2), size.cache_bytes_per_token(2)) == (first[5], first[3]), case
        assert size.weight_bytes(1) == sum(
            each.numel() * 4 for each in [*runner.model.parameters(), *runner.model.buffers()]
        )
        assert size.cache_bytes_per_token(1) == slot.cache.bytes_per_token, case


@needs_sliced_vocabulary
def test_three_shards_match_the_whole_model(tmp_path, random_model):
    model = random_model(vocab_size=64, hidden_size=36, num_attention_heads=9, num_key_value_heads=3)
    model.save_pretrained(tmp_path)
    runner = ModelRunner(model, 2048)
    for before, after, *_ in (each["model"] for each in run_shards(computed_by_shard, 3, {"model": tmp_path})):
        assert torch.allclose(before, logits_of(runner), atol=2e-5, rtol=1e-4)
        assert torch.allclose(after, logits_of(runner), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "settings", "num_shards", "message"),
    [
        ("llama", {}, 3, "num_attention_heads=4: must be a multiple of gpus_per_replica"),
        ("llama", {}, 4, "num_key_value_heads=2: must be a multiple of gpus_per_replica"),
        ("gpt2", {}, 2, "gpt2: transformers has no tensor-parallel plan for models of this type"),
        ("mixtral", {"intermediate_size": 45}, 2, "intermediate_size=45: must be a multiple"),
        ("qwen3_moe", {"moe_intermediate_size": 15}, 2, "moe_intermediate_size=15: must be a multiple"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, 2, "a quantized model cannot be sliced"),
        (
            "llama",
            {"base_model_tp_plan": {"layers.*.self_attn.kv_a_proj": "mla_kv_a_proj"}},
            2,
            "layers layers.*.self_attn.kv_a_proj are split as mla_kv_a_proj, which is not supported",
        ),
    ],
)
def test_unsupported_configuration_is_refused(family, settings, num_shards, message):
    name, own = FAMILIES[family]
    config = AutoConfig.for_model(family, **SHAPE | own)
    for key, value in settings.items():
        setattr(config, key, value)
    with pytest.raises(ModelError) as caught:
        check_shards(config, num_shards)
    assert str(caught.value).startswith(f"gpus_per_replica={num_shards}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "field"), [("llama", "num_key_value_heads"), ("mixtral", "intermediate_size")], ids=["heads", "experts"]
)
def test_layers_of_different_sizes_are_not_sliced(family, field):
    config = AutoConfig.for_model(family, **SHAPE | FAMILIES[family][1])
    config.per_layer_config = {0: {field: 4}}
    with pytest.raises(ModelError, match=f"^{family}: its layers have different values of {field}, which is not"):
        check_shards(config, 2)


def test_unsliceable_model_is_refused_before_its_weights_are_loaded(tmp_path):
    AutoConfig.for_model("llama", **SHAPE).save_pretrained(tmp_path)  # there are no weights
    with pytest.raises(ModelError, match="num_key_value_heads=2"):
        load_model(ModelConfig(path=str(tmp_path)), CPU, "float32", ShardPlace(0, 4, new_segment_name()))
