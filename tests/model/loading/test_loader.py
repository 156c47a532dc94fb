"""Loading of checkpoints; each broken checkpoint gives a one-line error that names model.path."""

import gc
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TorchAoConfig

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import ModelError
from lp_runtime.model.checks.self_check import check_model
from lp_runtime.model.hf.differences import TOLERANCES
from lp_runtime.model.hf.location import check_location
from lp_runtime.model.loading.loader import eos_token_ids, load_model, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

CPU = torch.device("cpu")


@pytest.fixture
def model_dir(tiny_model_dir, tmp_path):
    """A copy of the tiny model that a test may break."""
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def assert_refused(path, words: str, load=lambda config: load_model(config, CPU, "float32")) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load(ModelConfig(path=str(path)))
    message = str(caught.value)
    assert message.startswith(f"model.path={path}: ")
    assert len(message.splitlines()) == 1


def edit_weights(path, edit) -> None:
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_model_loads_in_eval_mode_with_its_weights(tiny_model_dir, dtype, expected):
    model = load_model(ModelConfig(path=str(tiny_model_dir)), CPU, dtype)
    assert not model.training
    assert model.dtype == getattr(torch, expected)
    saved = load_file(tiny_model_dir / "model.safetensors")["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, saved.to(model.dtype))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_requested_attention_implementation_is_used(tiny_model_dir, attention):
    model = load_model(ModelConfig(path=str(tiny_model_dir), attn_implementation=attention), CPU, "float32")
    assert model.config._attn_implementation == attention


def test_missing_directory_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", "no such directory")
    assert_refused(tmp_path / "nowhere", "no such directory", check_location)
    assert_refused(tmp_path / "nowhere", "no such directory", load_tokenizer)


def test_file_instead_of_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    assert_refused(tmp_path / "file", "no such directory")


def test_directory_without_config_is_refused(model_dir):
    (model_dir / "config.json").unlink()
    assert_refused(model_dir, "no config.json")


@pytest.mark.parametrize("text", ["{ this is not json", "", "[]", "{}", '{"model_type": "no_such_architecture"}'])
def test_invalid_config_is_refused(model_dir, text):
    (model_dir / "config.json").write_text(text)
    assert_refused(model_dir, "cannot be loaded")


def test_missing_weights_are_refused(model_dir):
    (model_dir / "model.safetensors").unlink()
    assert_refused(model_dir, "cannot be loaded")


def test_pickled_weights_load_only_with_use_safetensors_false(model_dir):
    weights = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    torch.save(weights, model_dir / "pytorch_model.bin")
    for load in (check_location, lambda config: load_model(config, CPU, "float32")):
        assert_refused(model_dir, "has pickled weights only.* model.use_safetensors=false$", load)
    model = load_model(ModelConfig(path=str(model_dir), use_safetensors=False), CPU, "float32")
    assert torch.equal(model.model.norm.weight, weights["model.norm.weight"])


def test_truncated_weights_are_refused(model_dir):
    weights = model_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(model_dir, "cannot be loaded")


def test_missing_weight_is_named(model_dir):
    edit_weights(model_dir, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    assert_refused(model_dir, "the weights lack model.layers.1.mlp.up_proj.weight$")


def test_several_missing_weights_are_counted(model_dir):
    def edit(weights):
        for name in [name for name in weights if "layers.1" in name]:
            del weights[name]

    edit_weights(model_dir, edit)
    assert_refused(model_dir, "the weights lack model.layers.1.* and 8 more$")


def test_weight_of_wrong_shape_is_named(model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    assert_refused(model_dir, "wrong shape for .*model.layers.0.mlp.down_proj.weight")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_position_embeddings": None}, "cannot be loaded: .*'max_position_embeddings': .*None"),
        ({"rope_scaling": {"type": "su"}}, "cannot be loaded: KeyError: 'su'"),
    ],
)
def test_wrong_value_of_the_config_is_shown(model_dir, values, words):
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("rope_parameters", None)
    (model_dir / "config.json").write_text(json.dumps(config | values))
    assert_refused(model_dir, words)


def test_missing_tokenizer_is_refused(tiny_model_dir):
    assert_refused(tiny_model_dir, "no usable tokenizer", load_tokenizer)


def test_invalid_tokenizer_is_refused(model_dir):
    (model_dir / "tokenizer.json").write_text("{ broken")
    assert_refused(model_dir, "no usable tokenizer", load_tokenizer)


def test_eos_token_ids_prefer_the_generation_config(random_model):
    model = random_model()
    assert eos_token_ids(model) == frozenset()
    model.config.eos_token_id = 5
    assert eos_token_ids(model) == {5}
    model.generation_config.eos_token_id = [3, 4]
    assert eos_token_ids(model) == {3, 4}
    model.generation_config.eos_token_id = [3, None]
    assert eos_token_ids(model) == {3}


def assert_decodes_as_transformers(model) -> None:
    tree_model = ModelRunner(model, prefill_chunk=2048)
    assert check_model(tree_model) < TOLERANCES[torch.float32]
    prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    request = Request(tuple(prompt[0].tolist()), LookaheadConfig(5, 4, 5), 16)
    *outputs, _ = Engine(tree_model, Group.alone()).run(request)
    assert [token for output in outputs for token in output.token_ids] == expected[0, 7:].tolist()


@pytest.mark.slow
def test_quantized_checkpoint_matches_generate(demo_model_dir, tmp_path):
    """BitNet has ternary weights and 8-bit activations; transformers runs it on CPUs by itself."""
    pytest.importorskip("accelerate")
    folder = shutil.copytree(demo_model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(ModelConfig(path=str(folder)), CPU, "float32")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "AutoBitLinear"
    assert_decodes_as_transformers(model)


TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
}


def test_model_quantized_on_loading_matches_generate(demo_model_dir):
    """The quantization may be given as a transformers object or as its fields."""
    torchao = pytest.importorskip("torchao.quantization", reason="needs torchao, which CI's job `versions` has")
    for given in (TorchAoConfig(quant_type=torchao.Int8WeightOnlyConfig()), TORCHAO):
        model = load_model(ModelConfig(path=str(demo_model_dir), quantization_config=given), CPU, "float32")
        assert type(model.model.layers[0].mlp.up_proj.weight).__module__.startswith("torchao")
        assert_decodes_as_transformers(model)


def test_missing_quantization_library_is_named(demo_model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ModelError, match="cannot be loaded: .*torchao") as caught:
        load_model(ModelConfig(path=str(demo_model_dir), quantization_config=TORCHAO), CPU, "float32")
    assert "\n" not in str(caught.value)


def test_device_map_is_passed_to_from_pretrained(demo_model_dir, monkeypatch):
    pytest.importorskip("accelerate")
    given = {}
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: given.update(k) or load(*a, **k))
    load_model(ModelConfig(path=str(demo_model_dir), device_map={"": "cpu"}), CPU, "float32")
    assert given["device_map"] == {"": "cpu"}


def test_unknown_quantization_method_is_refused(demo_model_dir):
    config = ModelConfig(path=str(demo_model_dir), quantization_config={"quant_method": "nonsense"})
    with pytest.raises(ModelError, match="cannot be loaded: .*nonsense"):
        load_model(config, CPU, "float32")


def _own_bytes() -> int:
    """Return this process's resident memory that no file backs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_loading_maps_weights_instead_of_copying_them(random_model, tmp_path):
    """Files are mapped, not copied: eight replicas that load for eight GPUs need the memory of one model."""
    size = 96 << 20
    model = random_model("Llama", vocab_size=size // 2 // 4 // 32)  # half in its embedding, half in its last layer
    model.save_pretrained(tmp_path)
    del model
    gc.collect()
    before = _own_bytes()
    loaded = load_model(ModelConfig(path=str(tmp_path)), CPU, "float32")
    sums = [float(each.detach().sum()) for each in loaded.parameters()]  # reads all weights
    assert len(sums) > 10
    assert _own_bytes() - before < size // 2
