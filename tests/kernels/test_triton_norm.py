"""Norm with residual addition: the kernel, compared with float64, and layers that use it."""

from __future__ import annotations

import pytest
import torch
from support.small_models import random_model

from lp_runtime.kernels import numba_cpu
from lp_runtime.model.modules.fused_blocks import FusedNorm
from lp_runtime.model.modules.fusing import fuse_blocks

kernels = pytest.importorskip("lp_runtime.kernels.triton_gpu", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}  # the interpreter does not round to bfloat16
if DEVICE == "cuda":
    TOLERANCES[torch.bfloat16] = 1e-2


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("num_tokens", "size", "weight_dtype", "norms_added"),
    [(1, 8, None, False), (3, 1500, torch.float32, True), (2, 4096, None, True), (2, 64, torch.float32, False)],
)
def test_add_and_norm_matches_float64_reference(num_tokens, size, weight_dtype, norms_added, dtype):
    states, added = (torch.randn(1, num_tokens, size, device=DEVICE).to(dtype) for _ in range(2))
    weight, added_weight = (torch.rand(size, device=DEVICE).to(weight_dtype or dtype) for _ in range(2))
    assert kernels.can_add_and_norm(states, added, weight)
    options = {"added_weight": added_weight} if norms_added else {}
    total, normed = kernels.add_and_norm(states, added, weight, 1e-5, **options)
    right = norm_of(added, added_weight).to(dtype) if norms_added else added
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(total, states + right, **(tolerance if norms_added else {"rtol": 0, "atol": 0}))
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), norm_of(total, weight), **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_norm_matches_float64_reference(dtype):
    states, weight = 3 * torch.randn(2, 3, 1500, device=DEVICE).to(dtype), 1 + torch.rand(1500, device=DEVICE)
    assert kernels.can_norm(states, weight) and not kernels.can_norm(states.transpose(0, 1), weight)
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(kernels.norm(states, weight, 1e-5).double(), norm_of(states, weight), **tolerance)


def norm_of(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    exact = states.double()
    return exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("kind", ["dtype", "shape", "strides", "size"])
def test_can_add_and_norm_returns_false_for_unsupported_inputs(kind):
    size = kernels.MAX_NORM_SIZE + 1 if kind == "size" else 8
    states = added = torch.zeros(2, size)
    weight = torch.zeros(size, dtype=torch.float16 if kind == "dtype" else torch.float32)
    if kind == "shape":
        added = torch.zeros(1, size)
    elif kind == "strides":
        added = torch.zeros(size, 2).T
    assert not kernels.can_add_and_norm(states, added, weight)


def test_residual_addition_computes_the_next_norm(monkeypatch):
    """All norms except the first are computed with an addition, and no norm is computed twice.

    A sum that a hook has changed is normalized again.
    """
    monkeypatch.setattr(numba_cpu, "supports", lambda states: False)
    model = random_model("Llama", num_hidden_layers=3)
    ids = torch.arange(5)[None]
    expected = model(ids).logits
    fuse_blocks(model)
    calls: list[str] = []
    for name in ("forward", "after_adding"):
        own = getattr(FusedNorm, name)

        def watched(norm, *args, own=own, name=name):
            calls.append(name)
            return own(norm, *args)

        monkeypatch.setattr(FusedNorm, name, watched)
    monkeypatch.setattr(torch.nn.functional, "rms_norm", None)
    computed = []
    vector_norm = torch.linalg.vector_norm

    def watched_norm(*args, **options):
        computed.append(args)
        return vector_norm(*args, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", watched_norm)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert calls.count("after_adding") == 6 and len(computed) == 7

    layers = model.model.layers
    doubled = layers[1].register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
    doubled.remove()
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
