"""Tests of the inflated model: it has the small model's outputs at the cost of a larger model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lp_runtime.config.settings import DEMO_MODEL

SCRIPT = Path(__file__).parents[2] / "experiments" / "inflate_model.py"
sys.path.insert(0, str(SCRIPT.parent))  # as Python does for a script
spec = importlib.util.spec_from_file_location("inflate_model", SCRIPT)
inflate_model = importlib.util.module_from_spec(spec)
sys.modules["inflate_model"] = inflate_model
spec.loader.exec_module(inflate_model)

SHAPES = {
    "wider and deeper": inflate_model.Shape(384, 8, 1024, 8, 4, 64),
    "no shared keys": inflate_model.Shape(384, 7, 800, 6, 6, 64),
    "larger heads": inflate_model.Shape(512, 6, 704, 4, 4, 128),
    "larger groups": inflate_model.Shape(256, 6, 704, 8, 2, 64),
    "the same": inflate_model.Shape(256, 6, 704, 4, 2, 64),
}


@pytest.fixture(scope="module")
def small():
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


# Each shape takes seconds, and most of them differ only in sizes: the others are slow tests.
FEW = ("wider and deeper", "larger heads")


@pytest.fixture(params=[name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES])
def big(request, tmp_path):
    shape = SHAPES[request.param]
    count = inflate_model.inflate(DEMO_MODEL, tmp_path, shape, "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert sum(weight.numel() for weight in model.parameters()) == count
    return model


PROMPT = "def fibonacci(n):\n    "


@torch.inference_mode()
def test_inflated_model_matches_the_small_model(small, big):
    ids = AutoTokenizer.from_pretrained(DEMO_MODEL)(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    torch.testing.assert_close(big(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)
    assert generated(small, ids) == generated(big, ids)


@torch.inference_mode()
def test_model_inflated_in_memory_equals_the_saved_model(tmp_path):
    shape = SHAPES["wider and deeper"]
    cpu = torch.device("cpu")
    inflate_model.inflate(DEMO_MODEL, tmp_path, shape, "float32", cpu)
    written = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    made = inflate_model.inflated(DEMO_MODEL, shape, "float32", cpu)
    assert not made.training and made.dtype == torch.float32
    assert inflate_model.shape_of(made.config) == shape and made.config.rms_norm_eps == written.config.rms_norm_eps
    states = made.state_dict(), written.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    ids = torch.arange(2, 40)[None]  # compares buffers, too, which no checkpoint has
    assert torch.equal(made(ids).logits, written(ids).logits)


@pytest.mark.slow
@torch.inference_mode()
def test_inflated_mixture_of_experts_matches_the_small_model(small, tmp_path):
    shape, mixture = SHAPES["wider and deeper"], inflate_model.Mixture(4, 2)
    count = inflate_model.inflate(DEMO_MODEL, tmp_path, shape, "float32", kind=mixture)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert sum(weight.numel() for weight in model.parameters()) == count
    ids = AutoTokenizer.from_pretrained(DEMO_MODEL)(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    chosen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, result: chosen.append(result[2]))
    torch.testing.assert_close(model(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)
    sent = torch.cat(chosen)
    assert sent.shape == (shape.layers * ids.shape[1], 2)
    assert sent.flatten().bincount(minlength=4).min() > 0.05 * sent.numel()  # every expert gets tokens
    assert len({tuple(row) for row in sent.tolist()}) > 4  # and the choice depends on the token
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(experts[0], experts[3]) and experts.stride(0) == experts[0].numel()  # separate copies
    assert generated(model, ids) == generated(small, ids)
    made = inflate_model.inflated(DEMO_MODEL, shape, "float32", torch.device("cpu"), mixture)
    assert torch.equal(made(ids).logits, model(ids).logits)


@pytest.mark.slow
@torch.inference_mode()
def test_inflated_hybrid_matches_the_small_model(small, tmp_path):
    shape, kind = inflate_model.Shape(384, 13, 1024, 8, 4, 64), inflate_model.Hybrid(2)
    count = inflate_model.inflate(DEMO_MODEL, tmp_path, shape, "float32", kind=kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert sum(weight.numel() for weight in model.parameters()) == count
    assert [layer.mamba is None for layer in model.model.layers] == 6 * [False, True] + [False]
    ids = AutoTokenizer.from_pretrained(DEMO_MODEL)(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    read = []
    for layer in model.model.layers[::2]:
        layer.mamba.out_proj.register_forward_hook(lambda _, args, result: read.append(args[0]))
    torch.testing.assert_close(model(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)
    assert len(read) == 7 and all(each.isfinite().all() and each.std() > 0.1 for each in read)  # the states are in use
    assert generated(model, ids) == generated(small, ids)
    made = inflate_model.inflated(DEMO_MODEL, shape, "float32", torch.device("cpu"), kind)
    assert torch.equal(made(ids).logits, model(ids).logits)


def generated(model, ids) -> list[int]:
    return model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0].tolist()


@pytest.mark.slow
def test_inflated_weights_have_full_rank_and_few_zeros(big):
    hidden, D = big.config.hidden_size, big.config.head_dim
    for name, weight in big.named_parameters():
        if weight.dim() == 1 or "embed" in name or "o_proj" in name or "down_proj" in name:
            continue
        empty = (weight == 0).all(dim=1)
        if "q_proj" not in name or D == 64:
            assert not empty.any(), name
            assert torch.linalg.matrix_rank(weight.double()) == min(weight.shape), name
        assert (weight == 0).float().mean() <= 0.5, name
    assert not big.config.tie_word_embeddings
    assert big.lm_head.weight.shape[1] == hidden


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "100"], "--hidden=100: must be at least 256"),
        (["--layers", "5"], "--layers=5: must be at least 6"),
        (["--head-dim", "96"], "--head-dim=96: must be a multiple of 64"),
        (["--heads", "4"], "--heads=4: must be a multiple of --kv-heads=8"),
        (["--heads", "2", "--kv-heads", "2"], "--kv-heads=2: too few"),
        (["--heads", "24"], "--hidden=1024: must be a multiple of --heads=24"),
        (["--from", "nowhere"], "nowhere"),
        (["--experts", "1"], "--experts=1: must be at least 2"),
        (["--experts", "4", "--experts-per-token", "5"], "--experts-per-token=5: must be 1 to --experts=4"),
        (["--attention-every", "1"], "--attention-every=1: must be at least 2"),
        (["--attention-every", "4"], "--layers=22: must be at least 24 with --attention-every=4"),
        (["--attention-every", "3", "--experts", "4"], "--attention-every=3: not with --experts"),
        (["--kv-heads", "0"], "--kv-heads=0: must be at least 1"),
        (["--out", str(DEMO_MODEL)], "has a model in it"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(arguments, message, tmp_path):
    with pytest.raises(SystemExit) as caught:
        inflate_model.main(["--out", str(tmp_path / "out"), *arguments])
    assert message in caught.value.code  # Python prints it and exits with status 1
    assert len(caught.value.code.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_paper_model_shapes_have_the_published_sizes():
    """The decoder layers have the published numbers of parameters: 6.5, 12.7 and 33.2 billion."""
    sizes = {}
    for name in ("7b", "13b", "34b"):
        shape = inflate_model.SHAPES[name]
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        layer = 2 * shape.hidden * width + 2 * shape.hidden * kv_width + 3 * shape.hidden * shape.intermediate
        sizes[name] = round(shape.layers * layer / 1e9, 1)
    assert sizes == {"7b": 6.5, "13b": 12.7, "34b": 33.2}
