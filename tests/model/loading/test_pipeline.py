"""A model with its layers on several devices of one process: placement of each part, and results."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from accelerate import dispatch_model
from support import reference
from support.small_models import FAMILIES
from transformers import AutoModelForCausalLM

from lp_runtime import LookaheadRuntime
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.errors import ConfigError, ModelError
from lp_runtime.launchers.torchrun import with_split
from lp_runtime.model.checks.self_check import check_model
from lp_runtime.model.loading.loader import load_model, without_memory
from lp_runtime.model.loading.pipeline import Part, device_map_of, load_in_stages, parts_of, stages_of
from lp_runtime.model.runner import ModelRunner

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(2)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_is_on_exactly_one_device(family, tied, random_model):
    name, settings = FAMILIES[family]
    model = random_model(name, **settings | {"tie_word_embeddings": tied})
    parts = parts_of(model)
    devices = device_map_of(parts, GPUS)
    assert sum(part.num_layers for part in parts) == model.config.get_text_config().num_hidden_layers
    assert sum(part.num_bytes for part in parts) == sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    results: dict[int, set[str]] = {}
    for weight, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        (place,) = {devices[part] for part in devices if weight == part or weight.startswith(f"{part}.")}
        results.setdefault(id(tensor), set()).add(place)
    assert all(len(each) == 1 for each in results.values())  # including shared weights
    assert set(devices.values()) == {"cuda:0", "cuda:1"}


def test_pipeline_stages_are_balanced():
    parts = [Part(("embedding",), 500, 0), *(Part((f"layers.{index}",), 100, 1) for index in range(30))]
    for num_gpus in (2, 4, 7):
        stages = stages_of([*parts, Part(("head",), 500, 0)], num_gpus)
        assert stages == sorted(stages) and set(stages) == set(range(num_gpus))
        filled = Counter()
        for stage, part in zip(stages, [*parts, Part(("head",), 500, 0)], strict=True):
            filled[stage] += part.num_bytes
        assert max(filled.values()) <= 4000 / num_gpus + 250  # half of the largest part


def test_model_without_a_layer_list_is_refused(random_model):
    model = random_model()
    model.config.num_hidden_layers = 7
    with pytest.raises(ModelError, match="model.parallelism=pipeline: llama: has no list of its 7 layers"):
        parts_of(model)


def test_two_stage_replica_matches_generate(small_demo_dir):
    """Both stages, of a layer each, run on a CPU, in this process."""
    expected = reference.greedy(small_demo_dir)
    config = ModelConfig(path=str(small_demo_dir), parallelism="pipeline")
    with LookaheadRuntime(config, 2, device="cpu", dtype="float32", gpus_per_replica=2) as runtime:
        assert (runtime.gpus_per_replica, runtime.num_replicas) == (2, 1)
        for prompt, tokens in zip(reference.PROMPTS, expected, strict=True):
            assert runtime.generate(prompt, reference.MAX_NEW_TOKENS, eos=False).token_ids == tokens


def test_hooks_between_stages_do_not_change_results(small_demo_dir):
    """accelerate's hooks, which move inputs between GPUs, are present and do not change results."""
    config = ModelConfig(path=str(small_demo_dir))
    devices = device_map_of(parts_of(without_memory(config, "float32")), [CPU, CPU])
    hooked = dispatch_model(load_model(config, CPU, "float32"), devices, force_hooks=True)
    assert all(hasattr(layer, "_hf_hook") for layer in hooked.model.layers)
    check_model(ModelRunner(hooked, 512, own_attention=True))
    prompt = torch.arange(300, 312)[None]
    plain = AutoModelForCausalLM.from_pretrained(small_demo_dir, dtype=torch.float32)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(hooked.generate(prompt, **options), plain.generate(prompt, **options))


def test_invalid_pipeline_settings_are_refused(demo_model_dir, monkeypatch):
    with pytest.raises(ConfigError, match="model.parallelism=rows: must be one of auto, tensor, pipeline"):
        ModelConfig(parallelism="rows")
    config = ModelConfig(path=str(demo_model_dir), parallelism="pipeline")
    with pytest.raises(ConfigError, match="model.parallelism=pipeline: not under torchrun"):
        with_split(RuntimeConfig(model=config, gpus_per_replica=2), None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="gpus_per_replica=2: the replica needs GPUs 2 to 3, but its process sees 3"):
        load_in_stages(config, torch.device("cuda", 2), 2, "auto")
