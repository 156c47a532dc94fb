"""Linear layers on a CPU with their weights packed once, in the order of oneDNN or of MKL.

torch's matrix product reads a layer's weights as they lie in the checkpoint: for one token through a kernel of its own,
for several by packing all of them anew at every call, which costs more than the product. Packed once, a few tokens
cost hardly more than one. The results differ in the order of sums only.

Which of the two libraries is faster, and for small layers whether either is, depends on the CPU: a call to oneDNN takes
some microseconds more than one to MKL, whose kernels are fast on Intel's CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

NUM_TOKENS = 16  # oneDNN packs for products of so many tokens; other numbers work as well
MKL_NUM_TOKENS = 64  # MKL packs for products of so many tokens; a large layer with more would be packed anew
NUM_SAMPLED_WEIGHTS = 64  # of a layer, kept unpacked
SMALL_BYTES = 256 << 20  # of weights; with more, packed ones were faster on every CPU that was tried
SAMPLE_BYTES = 128 << 20  # of a large model's weights that orders are tried on: more than most CPU caches hold
NUM_TRIALS = 5  # timed passes of each choice, in turn
MAX_TRIAL_SECONDS = 1.0  # after this no further round of trials begins: a large model's take a second each
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of outputs, relative to their norm
HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # torch has no public way to ask for a module's hooks

Layers = TypeVar("Layers")  # a list of modules


@dataclass(frozen=True)
class WeightInfo:
    """What can be said of weights that are packed. It is no tensor, so that a model that computes with it fails.

    Attributes:
        shape: [out_features, in_features].
        dtype: of the weights.
        device: of the weights.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class PackedLinear(nn.Module):
    """A linear layer, [..., in_features] to [..., out_features], that keeps its weights in oneDNN's packed order only.

    Args:
        linear: a layer on a CPU, in one of `dtypes`; it is not changed.

    Attributes:
        dtypes: dtypes of weights that can be packed.
        in_features: numbers of an input.
        out_features: numbers of an output.
        weight: what is known of the weights.
        bias: [out_features]; None without one.
        sample: a few of the weights, for whoever must tell models apart.

    Raises:
        RuntimeError: if the library cannot pack weights of the layer's dtype on this CPU.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.weight = WeightInfo(weight.shape, weight.dtype, weight.device)
        self._packed = self._pack(weight.contiguous())
        self.bias = linear.bias
        stride = max(1, weight.numel() // NUM_SAMPLED_WEIGHTS)
        self.register_buffer("sample", weight.flatten()[::stride][:NUM_SAMPLED_WEIGHTS].clone(), persistent=False)

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weights, [out_features, in_features], in the library's own order."""
        return torch.ops.mkldnn._reorder_linear_weight(weight, NUM_TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias, [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        """Return the layer's sizes, for torch's representation of a model."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class MKLPackedLinear(PackedLinear):
    """A linear layer, [..., in_features] to [..., out_features], that keeps its weights in MKL's packed order only.

    Args:
        linear: a layer on a CPU, in one of `dtypes`; it is not changed.

    Raises:
        RuntimeError: if MKL cannot pack the layer's weights on this CPU.
    """

    dtypes = (torch.float32,)

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self._like_weight = linear.weight.detach().new_zeros(1).expand(linear.weight.shape)  # MKL reads its shape only

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weights, [out_features, in_features], in MKL's own order."""
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_NUM_TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias, [..., out_features]."""
        num_tokens = x.numel() // self.in_features  # with any other number torch would not use the packed weights
        return torch.ops.mkl._mkl_linear(x, self._packed, self._like_weight, self.bias, num_tokens)


def pack_linears(model: nn.Module, packed: type[PackedLinear] = PackedLinear) -> int:
    """Replace a model's plain linear layers on the CPU by packed ones, one by one; each one's old weights are freed.

    Layers of other classes, dtypes and devices stay, and so do all layers of a dtype that the library cannot pack on
    this CPU, or not correctly. (oneDNN packs bfloat16 only on CPUs with AVX-512.)

    Args:
        model: changed in place.
        packed: the class of the packed layers.

    Returns:
        The number of layers that were replaced.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    count, tried = 0, dict.fromkeys(packed.dtypes, False)  # whether a layer of each dtype was packed and agreed
    for parent, name in places_of(model, lambda module: _can_pack(module, packed.dtypes)):
        linear = getattr(parent, name)
        dtype = linear.weight.dtype
        if dtype not in tried:
            continue
        try:
            replacement = packed(linear)
            tried[dtype] = tried[dtype] or _agree(linear, replacement)
        except (RuntimeError, AttributeError):  # not on this CPU, or not with this version of torch
            tried[dtype] = False
        if not tried[dtype]:
            del tried[dtype]
            continue
        setattr(parent, name, replacement)
        count += 1
    return count


def pack_if_faster(model: nn.Module) -> int:
    """Pack a causal LM's plain linear layers on the CPU in the order that is measured to be the fastest.

    A small model is timed as a whole, and stays unpacked if that is the fastest. Of a large one a few layers are timed,
    as both orders of all layers would take much memory.

    Args:
        model: changed in place.

    Returns:
        The number of layers that are packed.
    """
    places = places_of(model, lambda module: _can_pack(module, PackedLinear.dtypes))
    plain = [getattr(parent, name) for parent, name in places]
    if sum(map(_num_bytes, plain)) > SMALL_BYTES:
        packed = _faster_order(plain)
        del plain
        return pack_linears(model, packed) + pack_linears(model)  # oneDNN packs the other dtypes
    choices = [plain]
    for packed in (MKLPackedLinear, PackedLinear):
        if pack_linears(model, packed):
            choices.append([getattr(parent, name) for parent, name in places])
            _put(places, plain)

    def seconds_with(layers: list[nn.Module]) -> float:
        _put(places, layers)
        return _seconds_of_a_pass(model)

    fastest = choices[_fastest(choices, seconds_with)]
    _put(places, fastest)
    return sum(isinstance(each, PackedLinear) for each in fastest)


def _faster_order(linears: list[nn.Linear]) -> type[PackedLinear]:
    """Return the packed class that computes the first of some layers faster."""
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
    """Return the size of a layer's weights, in bytes."""
    return linear.weight.numel() * linear.weight.element_size()


def _fastest(choices: list[Layers], seconds: Callable[[Layers], float]) -> int:
    """Return the index of the choice of layers that takes the fewest seconds; the last one if a choice fails."""
    best = [float("inf")] * len(choices)
    started = time.perf_counter()
    try:
        for trial in range(NUM_TRIALS + 1):
            for index, layers in enumerate(choices):
                taken = seconds(layers)
                if trial:  # the first trial initializes the libraries
                    best[index] = min(best[index], taken)
            if trial and time.perf_counter() - started > MAX_TRIAL_SECONDS:
                break
    except Exception:  # of a foreign model, which the self-check will report better
        return len(choices) - 1
    return best.index(min(best))


def _put(places: list[tuple[nn.Module, str]], layers: list[nn.Module]) -> None:
    """Set the modules at some places of a model."""
    for (parent, name), layer in zip(places, layers, strict=True):
        setattr(parent, name, layer)


@torch.inference_mode()
def _seconds_of_a_pass(model: nn.Module) -> float:
    """Return how long a forward pass of NUM_TOKENS tokens takes, in seconds."""
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    started = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    return time.perf_counter() - started


@torch.inference_mode()
def _seconds_of_layers(layers: list[PackedLinear]) -> float:
    """Return how long layers, one after another, take for one token and for some, in seconds."""
    taken = 0.0
    for num_tokens in (1, NUM_TOKENS, 2 * NUM_TOKENS):
        inputs = [torch.ones(num_tokens, layer.in_features) for layer in layers]
        started = time.perf_counter()
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)
        taken += time.perf_counter() - started
    return taken


def places_of(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[tuple[nn.Module, str]]:
    """Return where a model has modules that are wanted: for each the parent module, and the name in the parent.

    The wanted modules are not referenced, so that the weights of each are freed as soon as it is replaced.

    Args:
        model: is searched.
        is_wanted: asked about every module below the model.
    """
    return [(parent, name) for parent in model.modules() for name, child in parent.named_children() if is_wanted(child)]


def is_plain(module: nn.Module) -> bool:
    """Whether a module is exactly torch's linear layer, with an ordinary weight parameter and without hooks."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module runs more than its class's forward: hooks, or a forward of its own."""
    attributes = vars(module)
    return "forward" in attributes or any(attributes.get(name) for name in HOOKS)


def _can_pack(module: nn.Module, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether a module is a plain linear layer on a CPU, with weights in one of some dtypes."""
    return is_plain(module) and module.weight.device.type == "cpu" and module.weight.dtype in dtypes


@torch.inference_mode()
def _agree(linear: nn.Linear, packed: PackedLinear) -> bool:
    """Whether the outputs of a layer and of its packed form differ by rounding only."""
    x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight.dtype)
    expected, actual = linear(x).float(), packed(x).float()
    return bool((actual - expected).norm() <= TOLERANCES[linear.weight.dtype] * expected.norm())
