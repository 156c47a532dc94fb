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
SAMPLE_BYTES = 128 << 20  # of a larger model's weights, in which order is tried on: more than most caches hold
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
    """The same, in the order that turns out to be the fastest, here and now. A small causal LM is tried as a whole, and
    stays as it is if it is faster so; of a large one a few layers are, as both orders of all would take much memory."""
    places = places_of(model, lambda module: _can_pack(module, PackedLinear.dtypes))
    plain = [getattr(parent, name) for parent, name in places]
    if sum(map(_num_bytes, plain)) > SMALL_BYTES:
        packed = _faster_order(plain)
        del plain
        return pack_linears(model, packed) + pack_linears(model)  # in which all types can be packed
    choices = [plain]
    for packed in (MKLPackedLinear, PackedLinear):
        if pack_linears(model, packed):
            choices.append([getattr(parent, name) for parent, name in places])
            _put(places, plain)

    def seconds(layers: list[nn.Module]) -> float:
        _put(places, layers)
        return _seconds_of_a_pass(model)

    fastest = choices[_fastest(choices, seconds)]
    _put(places, fastest)
    return sum(isinstance(each, PackedLinear) for each in fastest)


def _faster_order(linears: list[nn.Linear]) -> type[PackedLinear]:
    """In which order the first of some layers are faster."""
    sample, num_bytes = [], 0
    for linear in linears:
        if linear.weight.dtype in MKLPackedLinear.dtypes and num_bytes < SAMPLE_BYTES:
            sample.append(linear)
            num_bytes += _num_bytes(linear)
    orders = (MKLPackedLinear, PackedLinear)
    try:
        choices = [[order(linear) for linear in sample] for order in orders]
    except (RuntimeError, AttributeError):
        return PackedLinear
    return orders[_fastest(choices, _seconds_of_layers)] if sample else PackedLinear


def _num_bytes(linear: nn.Linear) -> int:
    return linear.weight.numel() * linear.weight.element_size()


def _fastest(choices: list[list[nn.Module]], seconds: Callable[[list[nn.Module]], float]) -> int:
    """Which choice of layers is the fastest; the last one if they cannot be tried."""
    best = [float("inf")] * len(choices)
    try:
        for trial in range(NUM_TRIALS + 1):
            for index, layers in enumerate(choices):
                taken = seconds(layers)
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


@torch.inference_mode()
def _seconds_of_layers(layers: list[PackedLinear]) -> float:
    """Of one token and of some, layer after layer."""
    taken = 0.0
    for num_tokens in (1, NUM_TOKENS, 2 * NUM_TOKENS):
        inputs = [torch.ones(num_tokens, layer.in_features) for layer in layers]
        started = time.perf_counter()
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)
        taken += time.perf_counter() - started
    return taken


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
