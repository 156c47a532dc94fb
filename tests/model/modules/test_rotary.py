"""Rotary factors that depend on the text's length: each token has the same factors as in transformers."""

import copy

import pytest
import torch
from support.causal_configs import small_config
from support.causal_types import small_model
from support.small_models import DYNAMIC, LONG, ROPE_THRESHOLD
from support.thinned import slow
from support.versions import needs_rotary_by_length
from torch._subclasses.fake_tensor import FakeTensorMode

from lp_runtime.errors import ModelError
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.model.checks.chain_check import check_chains
from lp_runtime.model.checks.self_check import check_model
from lp_runtime.model.hf.rotary_lengths import UNCHANGING, RotaryLengths
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.modules import rotary
from lp_runtime.model.modules.rotary import RotaryByLength, replace_rotaries, view_for_length
from lp_runtime.model.runner import ModelRunner

pytestmark = needs_rotary_by_length
MODELS = {
    "dynamic": ("Llama", DYNAMIC, RotaryLengths(32, 97)),
    "longrope": ("Llama", LONG, RotaryLengths(32, 2)),
    "re-feeding": ("Phi3", LONG, RotaryLengths(32, 2, refeeds=True)),
}
MOST = slow(MODELS, ["longrope"])  # it has the model of the first and the rotation of the last
RANGE = {"initializer_range": 0.3}
X = torch.zeros(1)


def positions(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers])


@pytest.fixture(params=MODELS)
def kind(request, random_model):
    """Return (random model, its RotaryLengths)."""
    name, settings, lengths = MODELS[request.param]
    return random_model(name, seed=3, **RANGE, **settings), lengths


def test_rotary_factors_equal_transformers_bitwise(kind):
    """This holds for prompts of any length and for each later token, whatever else is in its pass."""
    model, lengths = kind
    library = model.model.rotary_emb
    assert replace_rotaries(model) == lengths
    ours = model.model.rotary_emb
    last = lengths.threshold + lengths.num_rows - 1
    seen = set()
    for length in (1, 20, 31, 32, 33, 34, 50, last - 1):
        fresh = copy.deepcopy(library)
        prompt = fresh(X, torch.arange(length)[None])
        assert all(
            map(torch.equal, prompt, view_for_length(model, length).model.rotary_emb(X, torch.arange(length)[None]))
        )
        seen.add(tuple(prompt[0][0, min(1, length - 1)].tolist()))
        # `generate` feeds the next token alone; our pass also has tokens of a tree and of another sequence.
        alone, among = fresh(X, positions(length)), ours(X, positions(3, length, 120, length + 7, 40))
        assert all(torch.equal(a[:, 0], b[:, 1]) for a, b in zip(alone, among, strict=True))
    assert len(seen) == (6 if lengths.num_rows > 2 else 3), "the factors differ"


def test_rotary_forward_runs_on_fake_tensors(kind):
    """A captured pass must not read the values of a tensor on the host."""
    model, _ = kind
    replace_rotaries(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        cos, _ = model.model.rotary_emb(mode.from_tensor(X), mode.from_tensor(positions(5, 31, 32, 90)))
        assert cos.shape == (1, 4, 8)


@pytest.mark.parametrize("kind", MOST, indirect=True)
def test_view_leaves_the_model_unchanged(kind):
    model, lengths = kind
    before = {name: module for name, module in model.named_modules()}
    state = dict(vars(model.model.rotary_emb)), model.model.rotary_emb.inv_freq.clone()
    runner = ModelRunner(view_of(model), 8)
    check_model(runner)
    assert runner.rotary_lengths == lengths
    assert dict(model.named_modules()) == before
    assert vars(model.model.rotary_emb) == state[0] and torch.equal(model.model.rotary_emb.inv_freq, state[1])


def test_replacement_ignores_earlier_use_of_the_module(kind):
    model, _ = kind
    used = copy.deepcopy(model)
    used(torch.arange(60)[None])
    for each in (model, used):
        replace_rotaries(each)
    for places in (positions(3), positions(90)):
        assert all(map(torch.equal, model.model.rotary_emb(X, places), used.model.rotary_emb(X, places)))


@pytest.mark.parametrize("kind", MOST, indirect=True)
def test_second_runner_does_not_wrap_rotary_modules_twice(kind):
    model, lengths = kind
    runners = [ModelRunner(model, 8), ModelRunner(model, 8)]
    assert [each.rotary_lengths for each in runners] == [lengths] * 2
    replaced = [each for each in model.modules() if isinstance(each, RotaryByLength)]
    assert len(replaced) == 1 and not isinstance(replaced[0].library, RotaryByLength)
    assert check_model(runners[1]) < 1e-5


def test_context_is_cut_if_rotary_modules_are_not_replaced(random_model, monkeypatch, caplog):
    """Modules stay if they have hooks, factors per layer type, or code that does more than read factors.

    They also stay if `generate` drops the model's cache at the length and the text cannot be re-fed.
    """
    assert ModelRunner(random_model("Phi3", **LONG), 8, strict_tokens=16).context_length == ROPE_THRESHOLD
    assert [each.message for each in caplog.records] == [
        "Phi3ForCausalLM: its context ends where its rotary factors change"
    ]
    hooked = random_model("Phi3", **LONG)
    hooked.model.rotary_emb.register_forward_hook(lambda module, inputs, output: output)
    assert ModelRunner(hooked, 8).context_length == ROPE_THRESHOLD
    monkeypatch.setattr(rotary.transformers, "__version__", "5.19.1")
    assert ModelRunner(random_model("Phi3", **LONG), 8).context_length == ROPE_THRESHOLD
    assert ModelRunner(random_model("Llama", **LONG), 8).context_length == 256
    by_layer = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    by_layer["full_attention"] = LONG["rope_parameters"]
    gemma = random_model("Gemma3", head_dim=8, rope_parameters=by_layer)
    assert replace_rotaries(gemma) == UNCHANGING
    assert ModelRunner(gemma, 8).context_length == ROPE_THRESHOLD
    moe = LONG["rope_parameters"] | {"short_mscale": 1.2, "long_mscale": 1.3}
    phimoe = random_model("Phimoe", original_max_position_embeddings=32, rope_parameters=moe, num_local_experts=4)
    assert replace_rotaries(phimoe) == UNCHANGING, "it has other scales beyond the length"
    assert ModelRunner(phimoe, 8).context_length == ROPE_THRESHOLD


def test_context_is_cut_where_generate_loses_the_text():
    """Phi-4 multimodal's `generate` drops the cache at the length, and then feeds the last token alone."""
    runner = ModelRunner(small_model(small_config("phi4_multimodal", LONG)), 8)
    assert runner.context_length == ROPE_THRESHOLD
    assert check_model(runner) < 1e-5


def test_self_check_crosses_the_rotary_threshold(kind, monkeypatch):
    """The check compares with transformers' modules, so it finds each missing part."""
    model, lengths = kind
    assert check_model(ModelRunner(model, 8)) < 1e-5
    with monkeypatch.context() as patch:
        patch.setattr(RotaryLengths, "rope_length", lambda self, prompt_length, start: 0)
        with pytest.raises(ModelError, match="around .*max_position_embeddings=32"):
            check_model(ModelRunner(model, 8))
    with monkeypatch.context() as patch:
        patch.setattr(RotaryByLength, "forward", lambda self, x, position_ids: self.library(x, position_ids))
        patch.setattr(rotary, "_agrees", lambda replacement: True)
        with pytest.raises(ModelError, match="around .*max_position_embeddings=32"):
            check_model(ModelRunner(model, 8))
    if lengths.refeeds:
        monkeypatch.setattr(rotary, "CACHE_DROPPING_TYPES", ())
        assert ModelRunner(model, 8).rotary_lengths == lengths._replace(refeeds=False)


def test_chain_check_crosses_the_rotary_threshold(random_model, monkeypatch):
    settings = DYNAMIC | {"max_position_embeddings": 64}
    runner = ChainRunner(random_model("Llama", seed=3, **RANGE, **settings), 8)
    assert runner.rotary_lengths.threshold == 64 and check_chains(runner) < 1e-5
    monkeypatch.setattr(
        RotaryByLength, "forward", lambda self, x, position_ids: rotary._fresh(self.library)(x, position_ids)
    )
    with pytest.raises(ModelError, match="around max_position_embeddings=64"):
        check_chains(runner)
    with pytest.raises(ModelError, match="a context of 32 tokens is too short"):
        check_chains(ChainRunner(random_model("Llama", **DYNAMIC), 8))


def test_rotary_lengths_map_text_lengths_to_rows():
    dynamic, refed = RotaryLengths(32, 10), RotaryLengths(32, 2, refeeds=True)
    assert [dynamic.row(length) for length in (1, 32, 33, 40, 41, 99)] == [0, 0, 1, 8, 9, 9]
    assert [dynamic.num_shared(length, 60) for length in (5, 32, 36, 41, 50)] == [32, 32, 36, 60, 60]
    assert [dynamic.rope_length(length, 3) for length in (3, 32, 33)] == [0, 0, 33] and dynamic.rope_length(40, 40) == 0
    assert [dynamic.prompt_length(5, length) for length in (5, 32, 33)] == [5, 5, 5]
    assert [refed.prompt_length(5, length) for length in (5, 32, 33)] == [5, 5, 33]
    assert [refed.num_together(start, 4) for start in (20, 28, 29, 31, 32, 40)] == [4, 4, 3, 1, 4, 4]
    assert dynamic.num_together(31, 4) == 4 and (refed.refed_at, dynamic.refed_at) == (32, None)
    assert UNCHANGING.row(10**9) == UNCHANGING.rope_length(10**9, 0) == 0 and UNCHANGING.num_shared(3, 10**9) == 10**9
