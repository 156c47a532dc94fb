"""Packed linear layers give equal products for any number of tokens; other layers are kept."""

from __future__ import annotations

import pytest
import torch
from support.one_slot import OneSlot
from support.thinned import thinned
from torch import nn

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.modules import packed_linear as packing
from lp_runtime.model.modules.packed_linear import LAYOUTS, MKLPackedLinear, PackedLinear, pack_fastest, pack_linears
from lp_runtime.model.runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here")
CLASSES = [PackedLinear, pytest.param(MKLPackedLinear, marks=needs_mkl)]


def packs(kind: type[PackedLinear], dtype: torch.dtype) -> bool:
    """Return whether the library packs this dtype on this CPU; oneDNN packs bfloat16 only with AVX-512."""
    if dtype not in kind.dtypes:
        return False
    try:
        kind(nn.Linear(8, 8).to(dtype))
    except RuntimeError:
        return False
    return True


@pytest.fixture(params=[True, False], ids=["packs bfloat16", "refuses bfloat16"])
def packs_bfloat16(request, monkeypatch) -> bool:
    """Simulate, on any CPU, a library that packs bfloat16, or one that refuses to."""
    pack, forward = PackedLinear._pack, PackedLinear.forward

    def simulated_pack(self: PackedLinear, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype != torch.bfloat16:
            return pack(self, weight)
        if not request.param:
            raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs a cpu with avx512")
        return weight.clone()

    def simulated_forward(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16:
            return forward(self, x)
        return nn.functional.linear(x, self._packed, self.bias)

    monkeypatch.setattr(PackedLinear, "_pack", simulated_pack)
    monkeypatch.setattr(PackedLinear, "forward", simulated_forward)
    return request.param


def test_layers_of_unsupported_dtype_are_not_packed(packs_bfloat16):
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
    assert pack_linears(model) == (3 if packs_bfloat16 else 1)
    kinds = [type(layer) for layer in model]
    assert kinds == ([PackedLinear] * 3 if packs_bfloat16 else [nn.Linear, PackedLinear, nn.Linear])


@pytest.mark.parametrize(
    ("kind", "dtype", "bias", "num_tokens"), thinned(3, CLASSES, TOLERANCES, [True, False], [1, 2, 7, 16, 65, 300])
)
@torch.inference_mode()
def test_packed_product_matches_linear(kind, dtype, bias, num_tokens):
    linear = nn.Linear(80, 33, bias=bias).to(dtype)
    if not packs(kind, dtype):
        assert pack_linears(nn.Sequential(linear), kind) == 0
        return
    packed = kind(linear)
    for shape in ((num_tokens, 80), (1, num_tokens, 80), (num_tokens, 160)):
        x = torch.randn(shape).to(dtype)[..., :80]  # the last one is not contiguous
        torch.testing.assert_close(packed(x), linear(x), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert packed.weight.shape == linear.weight.shape
    assert packed.weight.dtype == dtype


@pytest.mark.parametrize("kind", CLASSES)
@torch.inference_mode()
def test_packed_model_matches_the_original(random_model, kind):
    model = random_model()
    tree = TokenTree([3], max_depth=4)
    for branch in ([1, 2, 3], [1, 5], [7]):
        tree.add_branch(branch)
    nodes = list(range(len(tree)))

    def logits() -> torch.Tensor:
        tree_model = OneSlot(ModelRunner(model, 2048))
        tree_model.begin(40)
        tree_model.prefill([5, 6, 7, 8])
        return tree_model.forward(tree, nodes, nodes)

    before = logits()
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert pack_linears(model, kind) == len(linears)
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    torch.testing.assert_close(logits(), before, rtol=1e-4, atol=1e-5)
    assert pack_linears(model) == 0


def test_tied_embedding_is_unchanged_after_packing(random_model):
    model = random_model(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.clone()
    pack_linears(model)
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.get_input_embeddings().weight, embedding)


class Adapted(nn.Linear):
    """A subclass of linear layers, which may compute something else."""


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, device="meta"), Adapted(8, 8), nn.Embedding(8, 8)],
    ids=["another type", "on no device", "another class", "no linear layer"],
)
def test_unsupported_layers_are_not_packed(layer):
    model = nn.Sequential(layer)
    assert pack_linears(model) == 0
    assert model[0] is layer


def test_computing_with_packed_weights_raises():
    """A model that reads a packed layer's weights itself must fail instead of computing with missing data."""
    packed = PackedLinear(nn.Linear(8, 8))
    assert packed.weight.device.type == "cpu"
    with pytest.raises(TypeError):
        nn.functional.linear(torch.zeros(1, 8), packed.weight)
    with pytest.raises(TypeError):
        torch.zeros(1, 8) @ packed.weight


def test_layers_with_wrong_packed_product_are_not_packed(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8))
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(len(x), 8))
    assert pack_linears(model) == 0
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("fastest", [nn.Linear, *CLASSES])
def test_small_model_gets_the_fastest_layout(random_model, monkeypatch, fastest):
    model = random_model("Llama")
    plain = [each for each in model.modules() if type(each) is nn.Linear]
    asked = []

    def layers() -> list[nn.Module]:
        return [each for each in model.modules() if isinstance(each, nn.Linear | PackedLinear)]

    def seconds(model: nn.Module) -> float:
        (kind,) = {type(each) for each in layers()}
        asked.append(kind)
        return 1.0 if kind is fastest else 2.0

    monkeypatch.setattr(packing, "_seconds_of_a_pass", seconds)
    monkeypatch.setattr(packing, "NUM_TRIALS", 5)  # other tests have one
    layout = pack_fastest(model)
    assert layout is not None and LAYOUTS[layout] is (None if fastest is nn.Linear else fastest)
    assert [type(each) for each in layers()] == [fastest] * len(plain)
    if fastest is nn.Linear:
        assert layers() == plain
    kinds = asked[: len(set(asked))]
    assert asked == kinds * (len(asked) // len(kinds)) and len(asked) > 4 * len(kinds)  # in turn
    assert {nn.Linear, PackedLinear} <= set(kinds)


@needs_mkl
def test_layers_of_mixed_dtypes_get_the_library_that_supports_them(monkeypatch, packs_bfloat16):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
    monkeypatch.setattr(packing, "_seconds_of_a_pass", lambda model: 1.0 + (type(model[0]) is not MKLPackedLinear))
    assert pack_fastest(model) == "MKL"
    assert [type(each) for each in model] == [MKLPackedLinear, PackedLinear if packs_bfloat16 else nn.Linear]


@needs_mkl
@pytest.mark.parametrize("fastest", CLASSES)
def test_large_model_is_timed_on_a_few_layers(random_model, monkeypatch, fastest, packs_bfloat16):
    model = random_model("Llama")
    model.lm_head.to(torch.bfloat16)
    linears = [each for each in model.modules() if type(each) is nn.Linear]
    tried = []

    def seconds(layers: list[nn.Module]) -> float:
        tried.append(len(layers))
        return 1.0 if type(layers[0]) is fastest else 2.0

    monkeypatch.setattr(packing, "NUM_TRIALS", 5)
    monkeypatch.setattr(packing, "SMALL_BYTES", 0)
    monkeypatch.setattr(packing, "SAMPLE_BYTES", 2 * linears[0].weight.nbytes)
    monkeypatch.setattr(packing, "_seconds_of_a_pass", lambda model: pytest.fail("the whole model is tried"))
    monkeypatch.setattr(packing, "_seconds_of_layers", seconds)
    pack_fastest(model)
    kinds = [type(each) for each in model.modules() if isinstance(each, nn.Linear | PackedLinear)]
    assert kinds == [fastest] * (len(kinds) - 1) + [PackedLinear if packs_bfloat16 else nn.Linear]
    assert len(set(tried)) == 1 < tried[0] < len(linears) and len(tried) > 8


def test_large_model_that_no_library_packs_is_left_plain(random_model, monkeypatch):
    monkeypatch.setattr(packing, "SMALL_BYTES", 0)
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(len(x), self.out_features))
    assert pack_fastest(random_model("Llama").bfloat16()) == "plain"


def test_seconds_of_layers_are_positive():
    layers = [PackedLinear(nn.Linear(8, 4)), PackedLinear(nn.Linear(64, 8))]
    assert packing._seconds_of_layers(layers) > 0


def test_model_that_cannot_be_timed_is_packed_with_onednn(random_model, monkeypatch):
    def fails(*args, **options):
        raise ValueError("foreign")

    model = random_model("Llama")
    monkeypatch.setattr(model, "forward", fails)
    assert pack_fastest(model) == "oneDNN"
    assert not any(type(each) is torch.nn.Linear for each in model.modules())


def test_timing_runs_the_real_model_with_its_hooks(random_model):
    """The real model is run: its hooks are called."""
    model, seen = random_model("Llama"), []
    model.register_forward_hook(lambda *_: seen.append(1))
    before = model(torch.arange(5)[None]).logits
    seen.clear()
    pack_fastest(model)
    num_choices = 3 if torch.backends.mkl.is_available() else 2
    assert len(seen) >= 2 * num_choices  # the first round initializes the libraries
    torch.testing.assert_close(model(torch.arange(5)[None]).logits, before)
