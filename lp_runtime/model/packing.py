"""Linear layers on a CPU with their weights packed once, in the own order of oneDNN or of MKL.

torch's matrix product reads a layer's weights as they lie in the checkpoint: for one token through a kernel of its own,
for several by packing all of them anew at every call, which costs more than the product. Packed once, a few tokens
cost hardly more than one. The products are the same but for the order of their sums.

Which of the two libraries is faster, and for small layers whether either is, depends on the CPU: a call of oneDNN's
takes some microseconds more than one of MKL's, whose kernels are fast on Intel's CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

NUM_TOKENS = 16  # that oneDNN's order is chosen for; others are computed as well
MKL_NUM_TOKENS = 64  # the same for MKL's: it packs anew what was packed for fewer, if the layer is large
SAMPLE_SIZE = 64
SMALL_BYTES = 256 << 20  # of weights; with more, packed ones were faster on every CPU that was tried
NUM_TRIALS = 5  # passes of each kind, in turn


@dataclass(frozen=True)
class WeightInfo:
    """What can be said of weights that are packed. It is no tensor: a model that computes with it must fail."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class PackedLinear(nn.Module):
    """A linear layer, [..., in_features] to [..., out_features], that keeps its weights packed only, in oneDNN's order.

    Args:
        linear: a layer on a CPU, in one of `dtypes`; it is not changed.

    Attributes:
        dtypes: of the weights that can be packed so.

    Raises:
        RuntimeError: if the library cannot pack such weights on this CPU.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.weight = WeightInfo(weight.shape, weight.dtype, weight.device)
        self._packed = self._pack(weight.contiguous())
        self.bias = linear.bias
        # A few of the weights, for whoever must tell models apart.
        sample = weight.flatten()[:: max(1, weight.numel() // SAMPLE_SIZE)][:SAMPLE_SIZE].clone()
        self.register_buffer("sample", sample, persistent=False)

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, NUM_TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class MKLPackedLinear(PackedLinear):
    """The same in MKL's order."""

    dtypes = (torch.float32,)

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        self._like_weight = weight.new_zeros(1).expand(weight.shape)  # its shape is all that is asked for
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_NUM_TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_tokens = x.numel() // self.in_features  # with any other number torch would not use what is packed
        return torch.ops.mkl._mkl_linear(x, self._packed, self._like_weight, self.bias, num_tokens)


def pack_linears(model: nn.Module, packed: type[PackedLinear] = PackedLinear) -> int:
    """Replace a model's plain linear layers on the CPU by packed ones, one by one; the weights of each are freed.

    Layers of other classes, types and devices stay. Where this CPU's library cannot do it, or not correctly, all stay.

    Returns:
        how many were replaced.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    count = 0
    for parent, name in places_of(model, lambda module: _can_pack(module, packed.dtypes)):
        linear = getattr(parent, name)
        try:
            replacement = packed(linear)
            if count == 0 and not _agree(linear, replacement):
                return 0
        except (RuntimeError, AttributeError):  # not with this CPU, or not with this version of torch
            return count
        setattr(parent, name, replacement)
        count += 1
    return count


def pack_if_faster(model: nn.Module) -> int:
    """The same, but a small causal LM is packed in the order that turns out to be the fastest, here and now, or not at
    all if it is faster so."""
    places = places_of(model, lambda module: _can_pack(module, PackedLinear.dtypes))
    plain = [getattr(parent, name) for parent, name in places]
    if sum(each.weight.numel() * each.weight.element_size() for each in plain) > SMALL_BYTES:
        del plain
        return pack_linears(model)
    choices = [plain]
    for packed in (MKLPackedLinear, PackedLinear):
        if pack_linears(model, packed):
            choices.append([getattr(parent, name) for parent, name in places])
            _put(places, plain)
    fastest = choices[_fastest(model, places, choices)]
    _put(places, fastest)
    return sum(isinstance(each, PackedLinear) for each in fastest)


def _fastest(model: nn.Module, places: list[tuple[nn.Module, str]], choices: list[list[nn.Module]]) -> int:
    """Which choice of layers for these places makes a model's pass the fastest; the last one if it cannot be run."""
    best = [float("inf")] * len(choices)
    try:
        for trial in range(NUM_TRIALS + 1):
            for index, layers in enumerate(choices):
                _put(places, layers)
                taken = _seconds_of_a_pass(model)
                if trial:  # the first sets up what is kept
                    best[index] = min(best[index], taken)
    except Exception:  # of a foreign model, which the self-check will have more to say about
        return len(choices) - 1
    return best.index(min(best))


def _put(places: list[tuple[nn.Module, str]], layers: list[nn.Module]) -> None:
    for (parent, name), layer in zip(places, layers, strict=True):
        setattr(parent, name, layer)


@torch.inference_mode()
def _seconds_of_a_pass(model: nn.Module) -> float:
    """Of a few tokens."""
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    started = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    return time.perf_counter() - started


def places_of(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[tuple[nn.Module, str]]:
    """Where a model has modules that are wanted: the module above, and the name there. They are not held on to, so each
    one's weights are freed as soon as it is replaced."""
    return [(parent, name) for parent in model.modules() for name, child in parent.named_children() if is_wanted(child)]


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer of torch's with weights of its own, which nothing looks into."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module runs more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _can_pack(module: nn.Module, dtypes: tuple[torch.dtype, ...]) -> bool:
    return is_plain(module) and module.weight.device.type == "cpu" and module.weight.dtype in dtypes


@torch.inference_mode()
def _agree(linear: nn.Linear, packed: PackedLinear) -> bool:
    x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight.dtype)
    expected, actual = linear(x).float(), packed(x).float()
    tolerance = 1e-4 if linear.weight.dtype == torch.float32 else 3e-2
    return bool((actual - expected).norm() <= tolerance * expected.norm())
