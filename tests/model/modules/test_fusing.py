"""Fused blocks give the same results as the known blocks that they replace; other blocks are kept."""

from __future__ import annotations

import random
import weakref
from collections import Counter

import pytest
import torch
from support.one_slot import OneSlot
from support.small_models import FAMILIES, random_model
from support.thinned import thinned
from torch import nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.errors import ModelError
from lp_runtime.kernels import numba_cpu
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.checks.self_check import check_model
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.modules.fused_attention import FusedAttention, rotate
from lp_runtime.model.modules.fused_blocks import FusedLayer, FusedMLP, FusedNorm
from lp_runtime.model.modules.fusing import TOLERANCES, fuse_blocks
from lp_runtime.model.modules.packed_linear import PackedLinear, pack_as, pack_linears
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica import loading

ATTENTION, MLP, NORM, LAYER = FusedAttention, FusedMLP, FusedNorm, FusedLayer
FUSED = {  # in two layers; norms: two or four per layer, the last one, and for some models one each of queries and keys
    "llama": {ATTENTION: 2, MLP: 2, NORM: 5, LAYER: 2},
    "mistral": {ATTENTION: 2, MLP: 2, NORM: 5, LAYER: 2},
    "mixtral": {ATTENTION: 2, NORM: 5, LAYER: 2},
    "qwen2": {ATTENTION: 2, MLP: 2, NORM: 5, LAYER: 2},
    "qwen3": {ATTENTION: 2, MLP: 2, NORM: 9, LAYER: 2},
    "qwen3_moe": {ATTENTION: 2, NORM: 9, LAYER: 2},
    "gemma": {ATTENTION: 2, MLP: 2, NORM: 5, LAYER: 2},
    "gemma2": {MLP: 2, NORM: 9},
    "gemma3": {ATTENTION: 2, MLP: 2, NORM: 13, LAYER: 2},
    "granite": {ATTENTION: 2, MLP: 2, NORM: 5},
    "phi3": {ATTENTION: 2, MLP: 2, NORM: 5, LAYER: 2},
    "smollm3": {MLP: 2, NORM: 5},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {ATTENTION: 2, NORM: 5, LAYER: 2},
    "olmo2": {MLP: 2, NORM: 9},
}

# The other families have the same blocks as one of these or of those that rotate a part, or none that is known.
ALWAYS = (*(FUSED.keys() - {"mistral", "gemma", "gpt_neox", "qwen3_moe"}), "phi3_longrope", "llama4")


def blocks_of(model: nn.Module) -> dict[type, int]:
    return dict(Counter(type(each) for each in model.modules() if type(each) in (ATTENTION, MLP, NORM, LAYER)))


def logits_of(model: nn.Module, strict_tokens: int | None = None, own_attention: bool = True) -> list[torch.Tensor]:
    """Return the logits of a prompt in chunks, of a tree, and of two sequences, in a batch if the model supports it."""
    tree_model = ModelRunner(model, 5, strict_tokens, own_attention)
    rng = random.Random(0)
    tree = TokenTree([3, 4], max_depth=8)
    while len(tree) < 20:
        tree.add(rng.randrange(tree.root, len(tree)), rng.randrange(60))
    nodes = list(range(len(tree)))
    parts, logits = [], []
    for length in (12, 3):
        slot = tree_model.slots.acquire()
        tree_model.begin(slot, 100)
        logits.append(tree_model.prefill(slot, list(range(length))))
        parts.append(StepInputs.whole(slot, tree))
    logits.append(tree_model.forward(StepInputs(parts[0].slot, tree, nodes, nodes), commit=False).logits)
    batches = [parts] if tree_model.supports_batching else [[part] for part in parts]
    return logits + [actual.logits.clone() for batch in batches for actual in tree_model.forward_batch(batch)]


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.slow) for each in FAMILIES]
)
def test_fused_model_matches_the_original(family):
    name, settings = FAMILIES[family]
    model = random_model(name, seed=1, initializer_range=0.3, **settings)
    before = logits_of(model)
    assert fuse_blocks(model) == sum(blocks_of(model).values())
    if family in FUSED:
        assert blocks_of(model) == FUSED[family]
    for actual, expected in zip(logits_of(model), before, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)
    check_model(ModelRunner(model, 2048, own_attention=True))


@pytest.mark.parametrize(("packed", "strict_tokens"), thinned(2, [True, False], [None, 8]))
def test_fused_model_matches_with_sdpa_strict_and_packing(packed, strict_tokens):
    model = random_model("Qwen3", head_dim=8)
    before = logits_of(model, strict_tokens, own_attention=False)
    fuse_blocks(model)
    if packed:
        pack_linears(model)
    for actual, expected in zip(logits_of(model, strict_tokens, own_attention=False), before, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_fused_norm_matches_llama_rms_norm(dtype):
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data.uniform_(-2, 2)
    fused = FusedNorm(norm)
    for scale in (1e-3, 1.0, 1e3):
        x = scale * torch.randn(2, 7, 96).to(dtype)
        assert fused(x).dtype == dtype
        torch.testing.assert_close(fused(x), norm(x), rtol=2 * TOLERANCES[dtype], atol=2 * TOLERANCES[dtype])
    assert torch.equal(fused(torch.zeros(1, 96, dtype=dtype)), torch.zeros(1, 96, dtype=dtype))


def test_rotate_matches_apply_rotary_pos_emb():
    states, (cos, sin) = torch.randn(1, 5, 3, 16), torch.randn(2, 1, 5, 16)
    expected, _ = apply_rotary_pos_emb(states, states, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(states, cos, sin), expected)
    other = torch.randn(1, 5, 16)
    expected, _ = apply_rotary_pos_emb(states, states, cos, other, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(states, cos, other), expected)  # does not reuse the sines of another pass


def test_original_weights_are_freed_block_by_block():
    model = random_model("Llama", num_hidden_layers=3)
    weights = [weakref.ref(layer.mlp.gate_proj.weight) for layer in model.model.layers]
    num_alive = []

    class Watched(FusedMLP):
        def __init__(self, mlp):
            num_alive.append(sum(weight() is not None for weight in weights))
            super().__init__(mlp)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lp_runtime.model.modules.fusing.FusedMLP", Watched)
        fuse_blocks(model)
    assert num_alive == [3, 2, 1]
    assert all(weight() is None for weight in weights)


class OtherMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    model.model.norm.forward = model.model.norm.forward


def adapted(model):
    for block, name in ((model.model.layers[0].mlp, "up_proj"), (model.model.layers[0].self_attn, "v_proj")):
        setattr(block, name, nn.Sequential(getattr(block, name)))
    model.model.norm = nn.Identity()


def of_another_class(model):
    layer = model.model.layers[0]
    layer.mlp = OtherMLP(model.config)
    layer.self_attn.more = nn.Identity()
    model.model.norm = nn.LayerNorm(model.config.hidden_size)


@pytest.mark.parametrize("change", [hooked, adapted, of_another_class])
def test_unknown_blocks_are_not_fused(change):
    model = random_model("Llama")
    change(model)
    before = logits_of(model)
    fuse_blocks(model)
    assert blocks_of(model) == {ATTENTION: 1, MLP: 1, NORM: 4, LAYER: 1}
    for actual, expected in zip(logits_of(model), before, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


class TableNorm(LlamaRMSNorm):
    """A norm with the same code, but with a separate weight for each place."""

    def __init__(self, norm):
        super().__init__(norm.weight.shape[0])
        self.weight = nn.Parameter(torch.ones(5, norm.weight.shape[0]))


def test_block_that_cannot_be_compared_is_not_fused():
    model = random_model("Llama")
    model.model.norm = TableNorm(model.model.norm)
    fuse_blocks(model)
    assert blocks_of(model) == {ATTENTION: 2, MLP: 2, NORM: 4, LAYER: 2}


PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("name", "settings", "num_layers"),
    [
        ("Phi3", {}, 2),
        ("Glm4", {"head_dim": 8}, 2),
        ("Glm4", {"head_dim": 12}, 2),
        ("Glm4Moe", {"use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, 2),
        ("Ernie4_5", {"head_dim": 8, "rope_parameters": None}, 2),
        ("Cohere", {"use_qk_norm": True, "rope_parameters": None}, 0),  # its layers add attention and MLP at once
        ("Nemotron", {}, 0),
    ],
)
def test_attention_that_rotates_a_part_or_neighbors_is_fused(name, settings, num_layers):
    model = random_model(name, initializer_range=0.3, **{"rope_parameters": PARTIAL} | settings)
    before = logits_of(model)
    fuse_blocks(model)
    blocks = blocks_of(model)
    assert (blocks[ATTENTION], blocks.get(LAYER, 0)) == (2, num_layers)
    for actual, expected in zip(logits_of(model), before, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


def test_eager_attention_is_not_fused():
    model = random_model("Llama", attention="eager")
    fuse_blocks(model)
    assert blocks_of(model) == {MLP: 2, NORM: 5}


@pytest.mark.parametrize("wrong", [ATTENTION, MLP, NORM, LAYER])
def test_blocks_with_wrong_fused_results_are_not_fused(wrong, monkeypatch):
    right = wrong.forward

    def forward(self, *args, **kwargs):
        output = right(self, *args, **kwargs)
        return (1.01 * output[0], None) if wrong is ATTENTION else 1.01 * output

    monkeypatch.setattr(wrong, "forward", forward)
    model = random_model("Llama")
    fuse_blocks(model)
    # A fused layer consists of fused norms and attention.
    assert set(blocks_of(model)) == {ATTENTION, MLP, NORM, *([LAYER] if wrong is MLP else [])} - {wrong}


def test_layers_with_hooks_are_not_fused():
    for change in (lambda layer: layer, lambda layer: layer.mlp, lambda layer: layer.input_layernorm):
        model, seen = random_model("Llama"), []
        fuse_blocks(model)  # the fused layers are taken apart again below; the other blocks stay fused
        for index, layer in enumerate(model.model.layers):
            plain = llama.LlamaDecoderLayer(model.config, index)
            for name, block in layer.named_children():
                setattr(plain, name, block)
            model.model.layers[index] = plain
        change(model.model.layers[0]).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert fuse_blocks(model) == 1
        model(torch.arange(5)[None])
        assert seen == [1]


@pytest.mark.parametrize("strict_tokens", [None, 8])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_new_and_reused_caches_hold_equal_bits(name, strict_tokens):
    """The bits are equal: replicas that have decoded other requests before must not differ."""
    model = random_model(name, initializer_range=0.3)
    fuse_blocks(model)
    tree_model = OneSlot(ModelRunner(model, 512, strict_tokens, own_attention=True))
    seen = []
    for _ in range(2):
        tree_model.begin(200)
        logits = tree_model.prefill(list(range(1, 20)))
        keys = [layer.keys[:, :, :19].clone() for layer in tree_model.slot.cache.layers]
        seen.append([logits, *keys])
    assert all(map(torch.equal, *seen))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
def test_cpu_kernels_match_torch(name, monkeypatch):
    model = random_model(name, initializer_range=0.3)
    fuse_blocks(model)
    used = Counter()
    for kernel in ("norm", "add_and_norm", "rotate_and_write"):
        inner = getattr(numba_cpu, kernel)
        monkeypatch.setattr(
            numba_cpu, kernel, lambda *args, kernel=kernel, inner=inner: (used.update([kernel]), inner(*args))[1]
        )
    with_kernels = logits_of(model)
    assert used.keys() == {"norm", "add_and_norm", "rotate_and_write"}
    used.clear()
    monkeypatch.setattr(numba_cpu, "supports", lambda states: False)
    for actual, expected in zip(with_kernels, logits_of(model), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    assert not used


def test_fusing_can_be_turned_off(tiny_model_dir):
    for fusing in ("auto", "off"):
        config = RuntimeConfig(model=ModelConfig(path=str(tiny_model_dir), fusing=fusing, packing="off"))
        model, _ = loading.ready_model(config, torch.device("cpu"))
        assert bool(blocks_of(model.model)) == (fusing == "auto")


def test_failed_check_suggests_settings_to_turn_off(tiny_model_dir, monkeypatch):
    def fail(model):
        raise ModelError("wrong")

    monkeypatch.setattr(loading, "check_runner", fail)
    monkeypatch.setattr(loading, "pack_fastest", lambda model: pack_linears(model) and "oneDNN")  # not measured
    for settings, hint in (
        ({}, "try model.fusing=off model.packing=off"),
        ({"packing": "off"}, "try model.fusing=off"),
        ({"packing": "off", "fusing": "off"}, "wrong"),
    ):
        config = RuntimeConfig(model=ModelConfig(path=str(tiny_model_dir), **settings), cache_dir=None)
        with pytest.raises(ModelError, match=hint):
            loading.ready_model(config, torch.device("cpu"))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_weight_layout_is_measured_once(tiny_model_dir, tmp_path, monkeypatch):
    measured = []

    def pack(model) -> str:
        measured.append(pack_as(model, "oneDNN"))
        return "oneDNN"

    monkeypatch.setattr(loading, "pack_fastest", pack)
    config = RuntimeConfig(model=ModelConfig(path=str(tiny_model_dir)), device="cpu", cache_dir=str(tmp_path))
    for _ in range(2):
        model, _ = loading.ready_model(config, torch.device("cpu"))
        packed = [each for each in model.model.modules() if type(each) is PackedLinear]
        assert measured == [len(packed)] and packed
