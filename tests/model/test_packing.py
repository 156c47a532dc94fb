"""Packed linear layers: the same products, for any number of tokens; what cannot be packed stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.packing import PackedLinear, pack_linears
from lp_runtime.model.tree_model import TreeModel

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 65, 300])
@torch.inference_mode()
def test_products_are_those_of_a_linear_layer(dtype, bias, num_tokens):
    linear = nn.Linear(80, 33, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    for shape in ((num_tokens, 80), (1, num_tokens, 80)):
        x = torch.randn(shape).to(dtype)
        torch.testing.assert_close(packed(x), linear(x), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert packed.weight.shape == linear.weight.shape
    assert packed.weight.dtype == dtype


@torch.inference_mode()
def test_a_packed_model_computes_the_same(random_model):
    model = random_model()
    tree = TokenTree([3], max_depth=4)
    for branch in ([1, 2, 3], [1, 5], [7]):
        tree.add_branch(branch)
    nodes = list(range(len(tree)))

    def logits() -> torch.Tensor:
        tree_model = TreeModel(model, 2048)
        tree_model.begin(40)
        tree_model.prefill([5, 6, 7, 8])
        return tree_model.forward(tree, nodes, nodes)

    before = logits()
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert pack_linears(model) == len(linears)
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    torch.testing.assert_close(logits(), before, rtol=1e-4, atol=1e-5)
    assert pack_linears(model) == 0


def test_an_embedding_that_is_tied_to_the_last_layer_stays(random_model):
    model = random_model(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.clone()
    pack_linears(model)
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.get_input_embeddings().weight, embedding)


class Adapted(nn.Linear):
    """A linear layer that does more than one."""


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, device="meta"), Adapted(8, 8), nn.Embedding(8, 8)],
    ids=["another type", "on no device", "another class", "no linear layer"],
)
def test_what_cannot_be_packed_stays(layer):
    model = nn.Sequential(layer)
    assert pack_linears(model) == 0
    assert model[0] is layer


def test_packed_weights_cannot_be_computed_with():
    """A model that reads a layer's weights itself must fail, and not compute with what is not there."""
    packed = PackedLinear(nn.Linear(8, 8))
    assert packed.weight.device.type == "cpu"
    with pytest.raises(TypeError):
        nn.functional.linear(torch.zeros(1, 8), packed.weight)
    with pytest.raises(TypeError):
        torch.zeros(1, 8) @ packed.weight


def test_layers_stay_where_the_packed_product_is_wrong(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8))
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(len(x), 8))
    assert pack_linears(model) == 0
    assert type(model[0]) is nn.Linear
