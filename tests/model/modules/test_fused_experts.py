"""Mixtures of experts on a GPU: which experts and routers are replaced, and when the replaced block computes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.small_models import FAMILIES, random_model
from support.stand_ins import KERNELS
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.model.modules import fused_experts, fusing
from lp_runtime.model.modules.fused_attention import FusedAttention
from lp_runtime.model.modules.fused_blocks import FusedLayer
from lp_runtime.model.modules.fused_experts import FusedExperts, FusedRouter
from lp_runtime.model.modules.fusing import fuse_blocks
from lp_runtime.model.tensor_parallel.layers import SummedOutputs
from lp_runtime.replica.loading import prepare_model

CPU = torch.device("cpu")
IDS = torch.arange(20)[None]
SIGMOIDS = {  # routers with groups
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 0, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


@pytest.fixture
def used(monkeypatch) -> Counter:
    """Use torch's operations in place of the kernels, as on a GPU; return the calls of each."""
    used: Counter = Counter()

    def counted(name: str):
        return lambda *args: (used.update([name]), getattr(KERNELS, name)(*args))[1]

    counting = {name: counted(name) for name in ("feed_experts", "choose_experts")}
    kernels = SimpleNamespace(**vars(KERNELS) | counting)
    for module in (fusing, fused_experts):
        monkeypatch.setattr(module, "kernels_for", lambda device: kernels)
    return used


def num_fused(model) -> tuple[int, int]:
    return tuple(sum(isinstance(each, kind) for each in model.modules()) for kind in (FusedExperts, FusedRouter))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_and_known_routers_are_replaced(family, dtype, used):
    name, settings = FAMILIES.get(family, ("DeepseekV3", SIGMOIDS))
    model = random_model(name, seed=1, initializer_range=0.3, **settings).to(dtype)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("correction_bias"):
            buffer.copy_(torch.linspace(-1, 1, len(buffer)))
    before, names = model(IDS).logits, set(model.state_dict())
    fuse_blocks(model)
    assert num_fused(model) == (2, 2)
    if dtype == torch.float32:  # with 16 bits, rounding sends some tokens to other experts
        torch.testing.assert_close(model(IDS).logits, before, rtol=2e-4, atol=2e-4)
    assert {each for each in names if ".experts." in each} <= set(model.state_dict())
    assert fuse_blocks(model) == 0, "a second time"


def test_long_input_is_left_to_the_replaced_block(used, monkeypatch):
    name, settings = FAMILIES["mixtral"]
    model = random_model(name, **settings)
    before = model(IDS).logits
    fuse_blocks(model)
    used.clear()
    for max_tokens, num_calls in ((20, 2), (19, 0)):
        used.clear()
        monkeypatch.setattr(fused_experts.kernels_for(CPU), "MAX_TOKENS", max_tokens)
        torch.testing.assert_close(model(IDS).logits, before, rtol=2e-4, atol=2e-4)
        assert used["feed_experts"] == num_calls


class OtherExperts(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


@pytest.mark.parametrize("change", ["hook", "class", "result"])
def test_changed_experts_are_kept(change, used, monkeypatch):
    name, settings = FAMILIES["mixtral"]
    model = random_model(name, **settings)
    experts = model.model.layers[0].mlp.experts
    if change == "hook":
        experts.register_forward_hook(lambda *_: None)
    elif change == "class":
        experts.__class__ = OtherExperts
    else:
        right = FusedExperts.forward
        monkeypatch.setattr(FusedExperts, "forward", lambda *args: 1.01 * right(*args))
    fuse_blocks(model)
    assert num_fused(model) == (0 if change == "result" else 1, 2)


def test_experts_of_a_shard_are_replaced(used):
    name, settings = FAMILIES["mixtral"]
    model = random_model(name, **settings)
    doubling = SimpleNamespace(all_reduce=lambda states: 2 * states)
    for layer in model.model.layers:
        layer.mlp.experts = SummedOutputs(layer.mlp.experts, doubling)
    before = model(IDS).logits
    fuse_blocks(model)
    assert num_fused(model) == (2, 2)
    torch.testing.assert_close(model(IDS).logits, before, rtol=2e-4, atol=2e-4)


def test_replica_fuses_attention_and_layers_of_gpt_oss():
    """transformers loads gpt-oss with eager attention, which no fused block calls."""
    name, settings = FAMILIES["gpt_oss"]
    model = random_model(name, attention="eager", **settings)
    runner, _ = prepare_model(model, RuntimeConfig(dtype="float32", cache_dir=None), CPU)
    kinds = Counter(type(each) for each in runner.model.modules())
    assert kinds[FusedAttention] == kinds[FusedLayer] == 2
