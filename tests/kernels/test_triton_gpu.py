"""Triton's kernels: interpreted if there is no GPU, and compiled for GPUs that need not be present."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.engines import engine_of
from support.one_slot import OneSlot
from support.small_models import FAMILIES
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.kernels import numba_cpu
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.checks.self_check import check_model
from lp_runtime.model.forward import cuda_graph, fixed_passes
from lp_runtime.model.modules import fused_blocks, fused_experts, fusing
from lp_runtime.model.modules.fusing import fuse_blocks
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sampling import sampler
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.step_logits import StepLogits

kernels = pytest.importorskip("lp_runtime.kernels.triton_gpu", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter has no products in bfloat16
if DEVICE == "cuda":
    TOLERANCES[torch.bfloat16] = 3e-2
MAX_SHARED_BYTES = 99 << 10  # available to a program on all GPUs of compute capability 8.0 and above
CAPABILITIES = ("80", "89", "90", "100", "120")
MAX_STACK_BYTES = 64  # allows for a few spilled registers


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("num_tokens", "size", "name"),
    [(1, 8, "silu"), (3, 1500, "gelu_tanh"), (5, kernels.GATE_BLOCK, "silu"), (2, 40, "gelu_tanh")],
)
def test_gate_matches_the_activation_of_transformers(num_tokens, size, name, dtype):
    gate_up = 3 * torch.randn(1, num_tokens, 2 * size, device=DEVICE).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    expected = ACT2FN[{"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[name]](gate) * up
    actual = kernels.gate(gate_up, name)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


class Launches(TorchDispatchMode):
    """Counts torch operations that launch work: no views, empty tensors or conversions to the same dtype."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        is_view = not isinstance(output, torch.Tensor) or (
            not name.endswith("_") and isinstance(args[0], torch.Tensor) and output.data_ptr() == args[0].data_ptr()
        )
        if not is_view and "empty" not in name:
            self.counts[name] += 1
        return output


SIZES = (1, 24)  # tokens of a pass
COUNTED = ("llama", "qwen3", "gemma", "gemma3", "phi3", "glm4", "mixtral", "qwen3_moe", "gpt_oss")
OF_ALL_LAYERS = {"rotate_and_write": 1, "attend": 1, "add_and_norm": 2}


def counted_kernels(launches: Launches) -> SimpleNamespace:
    """Return the kernels, with each call counted as one launch."""

    def counted(name: str):
        kernel = getattr(kernels, name)

        def call(*args):
            before = launches.counts.copy()
            output = kernel(*args)
            launches.counts = before + Counter([name])  # without the interpreter's operations
            return output

        return call

    names = [
        "rotate_and_write",
        "write",
        "attend",
        "attend_strictly",
        "gate",
        "norm",
        "add_and_norm",
        "sample_and_pack",
        "choose_experts",
        "feed_experts",
    ]
    others = ("can_norm", "can_add_and_norm", "can_cut", "MAX_TOKENS", "can_choose", "ExpertWeights")
    checks = {name: getattr(kernels, name) for name in others}
    return SimpleNamespace(launches=launches, **checks, **{name: counted(name) for name in names})


def use_kernels(patch, kernels) -> None:
    """Make fused models and passes of fixed sizes use these kernels."""
    patch.setattr(cuda_graph, "kernels_for", lambda device: kernels)
    patch.setattr(fused_blocks, "kernels_for", lambda device: kernels)
    patch.setattr(fused_experts, "kernels_for", lambda device: kernels)
    patch.setattr(fusing, "kernels_for", lambda device: kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Llama", {}),
        pytest.param("Qwen3", {"head_dim": 8}, marks=pytest.mark.slow),
        pytest.param("Phi3", {}, marks=pytest.mark.slow),
        pytest.param("Gemma", {"head_dim": 8}, marks=pytest.mark.slow),
        pytest.param("Gemma3", {"head_dim": 8, "sliding_window": 8}, marks=pytest.mark.slow),
    ],
)
def test_steps_with_kernels_match_the_unchanged_model(random_model, name, settings, monkeypatch):
    """Passes of fixed sizes with fused blocks, as on a GPU, give the logits of the unchanged model."""
    counted = counted_kernels(Launches())
    use_kernels(monkeypatch, counted)
    monkeypatch.setattr(fixed_passes, "SIZES", SIZES)  # the self-check makes passes of all sizes
    monkeypatch.setattr(fixed_passes, "MIN_LARGEST", SIZES[-1])
    free, fixed = (
        OneSlot(ModelRunner(random_model(name, seed=3, **settings).to(DEVICE), 512, own_attention=True))
        for _ in range(2)
    )
    fuse_blocks(fixed.model)
    fixed.enable_graphs(capture=False)
    rng = random.Random(0)
    for model in (free, fixed):
        model.begin(300)
        model.prefill(list(range(40)))
    for num_pending, num_guesses in ((1, 0), (3, 4), (2, 20), (1, 9)):
        tree = TokenTree([rng.randrange(60) for _ in range(num_pending)], max_depth=16)
        while len(tree) < num_pending + num_guesses:
            tree.add(rng.randrange(tree.root, len(tree)), rng.randrange(60))
        nodes = list(range(len(tree)))
        unpacked, packed = (model.runner.forward(model.inputs(tree, nodes, nodes)) for model in (free, fixed))
        torch.testing.assert_close(unpacked.logits, packed.logits, rtol=1e-4, atol=1e-4)
        greedy = sampler.Sampler(TreeProcessors([], packed.logits.device), None, num_top_k=K)
        expected, _ = greedy.sample(StepLogits(packed.logits), tree, nodes, [0])
        assert packed.presampled.tolist() == expected.tolist() and unpacked.presampled is None
    assert counted.launches.counts["attend"] == 4 * 2
    assert check_model(fixed.runner) < 1e-4


WITH_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")


# Gemma 3 uses every kernel of a dense layer: norms after attention and MLP, and of queries and keys; GELU.
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each == "gemma3" else [pytest.mark.slow]) for each in FAMILIES]
)
def test_families_with_kernels_match_eager_attention(random_model, family, monkeypatch):
    """A step of each family is compared with eager attention, if the model supports it."""
    name, settings = FAMILIES[family]
    use_kernels(monkeypatch, kernels)
    eager = OneSlot(ModelRunner(random_model(name, seed=1, attention="eager", **settings).to(DEVICE), 512))
    fixed = OneSlot(ModelRunner(random_model(name, seed=1, **settings).to(DEVICE), 512, own_attention=True))
    if not fixed.passes.masks.is_own:
        pytest.skip("has an attention of its own: its passes are not captured")
    fuse_blocks(fixed.model)
    experts = sum(isinstance(each, fused_experts.FusedExperts) for each in fixed.model.modules())
    assert experts == (2 if family in WITH_EXPERTS else 0)
    fixed.enable_graphs(capture=False)
    tree = TokenTree([1, 2], max_depth=4)
    for branch in ([3], [4]):
        tree.add_branch(branch)
    nodes = list(range(len(tree)))
    logits = []
    for model in (eager, fixed):
        model.begin(100)
        model.prefill([7, 8, 9])
        logits.append(model.forward(tree, nodes, nodes))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "logprobs"),
    [pytest.param(0.0, False, marks=pytest.mark.slow), pytest.param(0.0, True, marks=pytest.mark.slow), (0.8, False)],
)
def test_decoding_with_kernels_gives_the_same_tokens(random_model, temperature, logprobs, monkeypatch):
    """Tokens that a pass has sampled itself are used if the request needs no more than those."""
    use_kernels(monkeypatch, kernels)
    were_presampled, sample = [], sampler.Sampler.sample

    def watched(self, result, *args):
        packed, scores = sample(self, result, *args)
        were_presampled.append(result.presampled is not None and packed.data_ptr() == result.presampled.data_ptr())
        return packed, scores

    monkeypatch.setattr(sampler.Sampler, "sample", watched)
    sampling = SamplingConfig(temperature=temperature, seed=1)
    lookahead = LookaheadConfig(W=2, N=3, G=2, prior="none")
    request = Request((5, 6, 7, 5, 6), lookahead, 12, sampling=sampling, logprobs=logprobs)
    texts = []
    for fixed in (False, True):
        were_presampled.clear()
        model = ModelRunner(random_model("Llama", initializer_range=0.3).to(DEVICE), 512, own_attention=True)
        if fixed:
            fuse_blocks(model.model)
            model.enable_graphs(capture=False)
        *outputs, _ = engine_of(model).run(request)
        texts.append([token for output in outputs for token in output.token_ids])
    assert texts[0] == texts[1] and len(texts[0]) == 12
    is_greedy = temperature == 0 and not logprobs
    assert were_presampled == [False] + [is_greedy] * (len(were_presampled) - 1)  # the prefill does not presample


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="counts a CPU's operations")
@pytest.mark.parametrize("family", COUNTED)
def test_layer_launches_the_expected_kernels(random_model, family, monkeypatch):
    """A layer launches matrix products and our kernels; the norm kernels do the additions.

    Attention counts once here, but it is two launches, and experts are three.
    """
    name, settings = FAMILIES[family]
    monkeypatch.setattr(numba_cpu, "supports", lambda states: False)
    counts = []
    for num_layers in (2, 3):
        launches = Launches()
        use_kernels(monkeypatch, counted_kernels(launches))
        layered = random_model(name, **(settings | {"num_hidden_layers": num_layers, "layer_types": None}))
        model = OneSlot(ModelRunner(layered, 512, own_attention=True))
        fuse_blocks(model.model)
        model.enable_graphs(capture=False)
        model.begin(300)
        model.prefill(list(range(20)))
        tree = TokenTree([1], max_depth=4)
        tree.add_branch([2, 3])
        launches.counts.clear()
        with launches:
            model.forward(tree, [0, 1, 2], [0, 1, 2])
        counts.append(launches.counts)
    has_experts = "feed_experts" in counts[0]
    of_mlp = {"linear": 3, "choose_experts": 1, "feed_experts": 1} if has_experts else {"linear": 4, "gate": 1}
    assert counts[1] - counts[0] == OF_ALL_LAYERS | of_mlp


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for_absent_gpus(capability):
    """Capabilities are 8.0 (A100), 8.9 (L4, RTX 40), 9.0 (H100, H200), 10.0 (B200), 12.0 (RTX 50)."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(root)
    command = [sys.executable, "-W", "ignore", str(root / "tests" / "support" / "compile_kernels.py"), capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 66
    for line in lines:
        used = dict(part.split("=") for part in line.split("}")[1].split())
        assert int(used["shared"]) <= MAX_SHARED_BYTES, line
        assert int(used["stack"]) <= MAX_STACK_BYTES, line
        if line.startswith(("scan_chunks", "find_cut")):  # must round where torch does
            assert int(used["fused"]) == 0, line
