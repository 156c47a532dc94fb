"""Tests of how many GPUs a replica gets by default, given the free memory of simulated GPUs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.causal_configs import small_config
from support.causal_types import small_model
from support.small_models import FAMILIES, SHAPE
from support.versions import needs_sliced_vocabulary
from transformers import AutoConfig

from lp_runtime import launchers
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.errors import ConfigError, LaunchError, ModelError
from lp_runtime.launchers import split, torchrun
from lp_runtime.launchers.ray_booking import gpus_of_cluster
from lp_runtime.launchers.split import choose_split, free_of_this_machine, keep_speeds
from lp_runtime.model.capacity import NCCL_BYTES, bytes_of_tokens, tokens_in
from lp_runtime.model.checks.make_runner import make_runner
from lp_runtime.model.loading.sizes import ModelSize, size_of_model

GIB = 1 << 30
# Weights and cached tokens of the size of Llama 3 70B's, with a quarter of its layers, which are built in less time.
LARGE = {
    "hidden_size": 16384, "intermediate_size": 55976, "num_hidden_layers": 20, "num_attention_heads": 64,
    "num_key_value_heads": 16, "vocab_size": 64128, "max_position_embeddings": 131072, "dtype": "bfloat16",
}  # fmt: skip
LARGE_WEIGHTS = 2 * (
    20 * (2 * 16384**2 + 2 * 16384 * 4096 + 3 * 16384 * 55976 + 2 * 16384) + 2 * 64128 * 16384 + 16384
)  # bytes, computed by hand


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> str:
    """Return a directory with the configuration of a 70B model and without weights."""
    folder = tmp_path_factory.mktemp("large")
    AutoConfig.for_model("llama", **LARGE).save_pretrained(folder)
    return str(folder)


def chosen(path: str, free: float | list[float], gpus: int | None = None, num_gpus: int = 8, **options) -> int:
    """Return the number of GPUs per replica of a model, with `free` GiB free on each GPU."""
    free = free if isinstance(free, list) else [free] * num_gpus
    config = RuntimeConfig(model=ModelConfig(path=path), gpus=gpus, device="cuda", **options)
    result = choose_split(config, num_gpus, lambda: [int(each * GIB) for each in free])
    assert result.is_split_chosen and result.num_gpus % result.num_shards == 0
    return result.num_shards


def way(path: str, free: float, gpus: int, parallelism: str = "auto") -> tuple[int, str]:
    """Return the number of GPUs per replica and the kind of parallelism of the model on them."""
    given = RuntimeConfig(model=ModelConfig(path=path, parallelism=parallelism), gpus=gpus, device="cuda")
    config = choose_split(given, gpus, lambda: [int(free * GIB)] * gpus)
    return config.replica_gpus, config.model.parallelism


@pytest.fixture(scope="module", autouse=True)
def sizes_by_configuration() -> Iterator[None]:
    """Compute each size once: the 70B model is built for it on the meta device, which takes a second."""
    sizes: dict[str, ModelSize | None] = {}

    def size_of(config: ModelConfig, dtype: str, context_tokens: int | None = None) -> ModelSize | None:
        key = f"{config.location} {dtype}"
        if key not in sizes:
            sizes[key] = size_of_model(config, dtype)
        size = sizes[key]
        return size and size._replace(context_tokens=context_tokens or size.context_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "size_of_model", size_of)
        yield


@needs_sliced_vocabulary
def test_weight_and_cache_bytes_are_divided_by_shards(large):
    size = split.size_of_model(ModelConfig(path=large), "auto")
    buffers = size.weight_bytes(1) - LARGE_WEIGHTS
    assert 0 <= buffers < 4096  # rotary frequencies
    norms = 2 * (2 * 20 + 1) * 16384
    assert size.weight_bytes(8) == (LARGE_WEIGHTS - norms) // 8 + norms + buffers
    assert [size.cache_bytes_per_token(shards) for shards in (1, 2, 8)] == [327680, 163840, 40960]


@pytest.mark.parametrize(
    ("gpus", "free", "expected"),
    [
        (8, 200, 1),  # 131 GiB of weights
        (8, 134, 2),  # one GPU leaves too little for the context
        (8, 79, 2),
        (8, 60, 4),
        (8, 24, 8),
        (None, 79, 2),
        (None, 60, 4),  # 3 would hold it, but do not divide the heads
        (6, 79, 2),
        (1, 24, 1),  # there is no choice; loading reports that memory does not suffice
    ],
)
def test_split_uses_the_fewest_gpus_that_hold_the_model(large, gpus, free, expected):
    assert chosen(large, free, gpus) == expected


def test_split_depends_on_the_fullest_gpu_in_use(large):
    assert chosen(large, [79, 79, 40, 79], 4, 4) == 4
    assert chosen(large, [79, 79, 79, 79, 1, 1, 1, 1], 4) == 2


@pytest.mark.slow
def test_longer_context_takes_more_gpus(large):
    assert chosen(large, 79, 8) == chosen(large, 79, 8, context_tokens=8192) == 2
    assert chosen(large, 79, 8, context_tokens=131072) == 4


@pytest.mark.slow
def test_chosen_split_holds_exactly_the_requested_tokens(large):
    """With the needed bytes the requested tokens fit next to the weights; with one byte less they do not."""
    size = split.size_of_model(ModelConfig(path=large), "auto", 5000)
    needed = size.needed_bytes(2, NCCL_BYTES)
    kept = needed - size.weight_bytes(2) - size.pass_bytes - NCCL_BYTES
    assert tokens_in(kept, size.cache_bytes_per_token(2)) == 5000
    for free, expected in ((needed, 2), (needed - 1, 4)):
        config = RuntimeConfig(model=ModelConfig(path=large), gpus=4, context_tokens=5000)
        assert choose_split(config, 4, lambda free=free: [free] * 4).num_shards == expected


@pytest.mark.parametrize("token_bytes", [1, 7, 327680])
@pytest.mark.parametrize("num_tokens", [1, 100, 8191])
def test_bytes_of_tokens_returns_the_smallest_sufficient_size(num_tokens, token_bytes):
    num_bytes = bytes_of_tokens(num_tokens, token_bytes)
    assert tokens_in(num_bytes, token_bytes) >= num_tokens > tokens_in(num_bytes - 2, token_bytes)


def test_model_too_large_for_all_gpus_is_refused_in_one_line(large):
    with pytest.raises(ModelError) as caught:
        chosen(large, 10, 8)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(f"model.path={large}: does not fit")
    assert "8192 tokens" in line and "on each of 8 GPUs, and 10.0 GiB are free" in line


@pytest.mark.slow
def test_unsliceable_model_uses_pipeline_parallelism(tmp_path, large):
    """If tensor parallelism is requested by name, it is refused with the reason."""
    AutoConfig.for_model("gpt2", n_embd=8192, n_layer=64, n_head=64, dtype="bfloat16").save_pretrained(tmp_path)
    path = str(tmp_path)
    for gpus, free, expected in ((8, 200, (1, "tensor")), (8, 79, (2, "pipeline")), (8, 30, (4, "pipeline"))):
        assert way(path, free, gpus) == expected
    assert way(large, 79, 3) == (3, "pipeline")
    assert way(large, 79, 8, "pipeline") == (2, "pipeline")
    with pytest.raises(
        ModelError, match=r"102.0 GiB on a GPU, .* \(gpus_per_replica=2: gpt2: transformers has no tensor"
    ):
        way(path, 79, 8, "tensor")
    with pytest.raises(ModelError, match=r"on a GPU, .*=3: llama: num_attention_heads=64: must be a multiple of"):
        way(large, 79, 3, "tensor")
    with pytest.raises(ModelError, match="on each of 8 GPUs, and 5.0 GiB are free$"):
        way(path, 5, 8)


def test_parallelism_is_chosen_for_given_gpus_per_replica(tmp_path, large):
    AutoConfig.for_model("gpt2", n_embd=64, n_layer=2, n_head=4).save_pretrained(tmp_path)

    def lies(path: str, num_gpus: int, **model) -> tuple[str, int, int, int]:
        given = RuntimeConfig(model=ModelConfig(path=path, **model), gpus=4, gpus_per_replica=2)
        config = choose_split(given, num_gpus, list)
        return config.model.parallelism, config.num_shards, config.num_stages, config.num_replicas

    assert lies(large, 8) == ("tensor", 2, 1, 2)
    assert lies(str(tmp_path), 8) == ("pipeline", 1, 2, 2)
    assert lies(str(tmp_path), 0) == ("tensor", 2, 1, 2)  # on CPUs, where it is refused
    assert lies(large, 8, parallelism="pipeline") == ("pipeline", 1, 2, 2)
    assert lies(large, 8, quantization_config={"quant_method": "bitsandbytes"}) == ("pipeline", 1, 2, 2)
    with pytest.raises(ConfigError, match="only with gpus_per_replica=1, or model.parallelism=pipeline"):
        lies(large, 8, quantization_config={"quant_method": "bitsandbytes"}, parallelism="tensor")


def write_weights(path: Path, num_bytes: int) -> None:
    weight = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"weight": weight}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


def write_quantized_config(folder: Path) -> None:
    name, own = FAMILIES["llama"]
    config = AutoConfig.for_model("llama", **SHAPE | own)
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)


def test_size_of_quantized_checkpoint_is_that_of_its_files(tmp_path):
    write_quantized_config(tmp_path)
    write_weights(tmp_path / "model.safetensors", 1000)
    assert size_of_model(ModelConfig(path=str(tmp_path)), "auto").weight_bytes(1) == 1000
    assert way(str(tmp_path), 1, 2) == (1, "tensor")
    with pytest.raises(ModelError, match="a quantized model cannot be sliced"):
        way(str(tmp_path), 0, 2, "tensor")


def test_size_of_quantized_checkpoint_counts_the_loaded_files_only(tmp_path):
    """Mistral's releases have the same weights in another layout, in consolidated.safetensors."""
    write_quantized_config(tmp_path)
    write_weights(tmp_path / "consolidated.safetensors", 1000)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard in shards:
        write_weights(tmp_path / shard, 500)
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert size_of_model(ModelConfig(path=str(tmp_path)), "auto").weight_bytes(1) == 1000
    write_weights(tmp_path / "model.safetensors", 700)
    assert size_of_model(ModelConfig(path=str(tmp_path)), "auto").weight_bytes(1) == 700


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3_text", "qwen3_5_text"])
def test_cached_bytes_are_known_without_weights(tmp_path, name):
    model = small_model(small_config(name))
    model.save_pretrained(tmp_path)
    runner = make_runner(model, 64, None, own_attention=True)
    with runner.slots.borrowed() as slot:
        runner.begin(slot, 64)
        runner.prefill(slot, range(8, 40))
        actual = slot.cache.bytes_per_token
    size = size_of_model(ModelConfig(path=str(tmp_path)), "float32")
    assert size.cache_bytes_per_token(1) == actual


def test_model_of_unknown_size_gets_one_gpu(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    assert size_of_model(ModelConfig(path=str(tmp_path)), "auto") is None
    assert chosen(str(tmp_path), 1, 8) == 1


@pytest.mark.parametrize(
    ("settings", "num_gpus"),
    [
        ({"device": "cpu", "gpus": 4}, 0),  # CPUs
        ({}, 1),  # one GPU
        ({"gpus": 4}, 2),  # replicas that share GPUs
        ({"model": ModelConfig(device_map="auto")}, 8),
        ({"model": ModelConfig(quantization_config={"quant_method": "bitsandbytes"}), "gpus": 8}, 8),
    ],
)
def test_free_memory_is_not_queried_without_a_choice(settings, num_gpus):
    def survey():
        raise AssertionError("asked")

    assert choose_split(RuntimeConfig(**settings), num_gpus, survey).num_shards == 1
    given = RuntimeConfig(gpus=8, gpus_per_replica=4)
    assert choose_split(given, 0, survey).num_shards == 4


def test_launcher_starts_the_chosen_number_of_shards(large, monkeypatch):
    """On four GPUs of 79 GiB, the local launcher would spawn two replicas of two shards."""
    started = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(split, "free_of_this_machine", lambda: [79 * GIB] * 4)
    monkeypatch.setattr("lp_runtime.launchers.spawn.SpawnLauncher", started.append)
    launchers.launch(RuntimeConfig(model=ModelConfig(path=large), gpus=4, lookahead=LookaheadConfig()))
    (config,) = started
    assert (config.num_replicas, config.num_shards, config.gpus_per_replica) == (2, 2, 2)


@pytest.mark.slow
def test_torchrun_rank_0_chooses_the_split_by_its_free_memory(large, monkeypatch):
    """Rank 0 queries its own GPU; if no split fits, all ranks refuse with the same error."""
    world = SimpleNamespace(rank=0, num_replicas=8, num_local=8, device_index=0)
    config = RuntimeConfig(model=ModelConfig(path=large))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torchrun, "said_by_first", lambda world, name, value, *place: value())
    for free, expected in ((200, 1), (79, 2), (24, 8)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index, free=free: (free * GIB, 0))
        assert torchrun.with_split(config, world).num_shards == expected
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (GIB, 0))
    with pytest.raises(ModelError, match="does not fit"):
        torchrun.with_split(config, world)


@pytest.mark.parametrize(
    ("model_type", "speeds", "num_local", "expected"),
    [
        ("llama", {1: 1.0, 2: 2.0, 4: 3.0}, 4, 4),
        ("llama", {1: 1.0, 2: 2.0, 4: 3.0}, 2, 2),  # on two machines
        ("gpt2", {1: 1.0, 2: 2.0, 4: 3.0}, 4, 1),  # measured as pipelines, since it cannot be sliced
        ("gpt2", {2: 2.0, 4: 3.0}, 4, r"fastest: none of the measured ones \(4, 2\) is possible"),
        ("llama", {}, 4, "fastest: nothing was measured .* run lp-bench splits=auto gpus=4"),
    ],
)
def test_torchrun_takes_the_fastest_split_that_it_can_start(
    tmp_path, monkeypatch, model_type, speeds, num_local, expected
):
    """lp-bench has measured with the same settings under the local launcher."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    AutoConfig.for_model(model_type, **sizes).save_pretrained(tmp_path)
    settings = {"model": ModelConfig(path=str(tmp_path)), "cache_dir": str(tmp_path)}
    if speeds:
        keep_speeds(RuntimeConfig(**settings, gpus=4), speeds)
    monkeypatch.setattr(torchrun, "said_by_first", lambda world, name, value, *place: value())
    world = SimpleNamespace(rank=0, num_replicas=4, num_local=num_local, device_index=0)
    config = RuntimeConfig(**settings, gpus_per_replica="fastest")
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            torchrun.with_split(config, world)
    else:
        split = torchrun.with_split(config, world)
        assert (split.num_shards, split.num_gpus, split.model.parallelism) == (expected, 4, "tensor")


def test_failure_of_rank_0_to_choose_the_split_reaches_all_ranks(large, monkeypatch):
    def fail(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: the device is busy")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    monkeypatch.setattr(torchrun, "said_by_first", lambda world, name, value, *place: value())
    world = SimpleNamespace(rank=0, num_replicas=2, num_local=2, device_index=0)
    with pytest.raises(LaunchError, match="gpus_per_replica=auto: RuntimeError: CUDA error: the device is busy"):
        torchrun.with_split(RuntimeConfig(model=ModelConfig(path=large)), world)


def test_gpus_of_cluster_counts_all_and_those_of_the_smallest_node():
    nodes = [{"Alive": alive, "Resources": {"GPU": number}} for alive, number in ((True, 8), (True, 4), (False, 1))]
    ray = SimpleNamespace(
        nodes=lambda: [*nodes, {"Alive": True, "Resources": {}}], cluster_resources=lambda: {"GPU": 12}
    )
    assert gpus_of_cluster(ray, "auto") == gpus_of_cluster(ray, "cuda") == (12, 4)
    assert gpus_of_cluster(ray, "cpu") == (0, 0)


@pytest.mark.slow
def test_failed_query_of_free_memory_is_reported(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise RuntimeError('not the module of the standard library')")
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available():
        assert free_of_this_machine() == []
    monkeypatch.setattr(split.sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchError, match="cannot read the GPUs' free memory"):
        free_of_this_machine()


def test_bad_gpus_per_replica_and_context_tokens_are_refused():
    assert RuntimeConfig().gpus_per_replica == "auto" and RuntimeConfig().num_shards == 1
    for value in ("some", 0, True, 1.5, None, [2]):
        with pytest.raises(ConfigError, match=r"gpus_per_replica=.*: must be auto, fastest or an integer >= 1"):
            RuntimeConfig(gpus_per_replica=value)
    with pytest.raises(ConfigError, match="context_tokens=0: must be an integer >= 1"):
        RuntimeConfig(context_tokens=0)
