"""CPU linear layers whose weights are packed once, in the layout of oneDNN or MKL.

torch's matmul reads weights in checkpoint order. For one token it has a special kernel; for several it repacks all
weights at every call, which costs more than the product. With weights packed once, a few tokens cost hardly more than
one. The results differ only in the order of sums.

Which library is faster, and for small layers whether packing pays at all, depends on the CPU: a call to oneDNN takes a
few microseconds more than one to MKL, whose kernels are fast on Intel CPUs.
"""

from __future__ import annotations

import dis
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

NUM_TOKENS = 16  # number of tokens oneDNN optimizes the packing for; other numbers work as well
MKL_NUM_TOKENS = 64  # the same for MKL, which repacks a large layer at every call with more tokens than this
NUM_SAMPLED_WEIGHTS = 64  # of a layer, kept unpacked
SMALL_BYTES = 256 << 20  # of weights; above this, packed weights were faster on every CPU we tried
SAMPLE_BYTES = 128 << 20  # of a large model's weights that the trial uses: more than most CPU caches hold
NUM_TRIALS = 5  # timed passes of each choice, interleaved
MAX_TRIAL_SECONDS = 1.0  # start no further round of trials after this: a large model's rounds take a second each
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of outputs, relative to their norm
HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # torch has no public API to query a module's hooks

READS = ("LOAD_ATTR", "LOAD_METHOD")  # instructions of Python that read an attribute

Layers = TypeVar("Layers")  # a list of modules


@dataclass(frozen=True)
class WeightInfo:
    """Shape [out_features, in_features], dtype and device of packed weights.

    Not a tensor, so that a model that computes with a layer's `weight` directly fails.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class PackedLinear(nn.Module):
    """Linear layer, [..., in_features] to [..., out_features], whose weights are packed for oneDNN.

    The unpacked weights of `linear`, a layer on a CPU in one of `dtypes`, are not kept. Raises RuntimeError if the
    library cannot pack weights of that dtype on this CPU. The model's fingerprint (calibration.py) reads `sample`, a
    few of the weights.
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
        return torch.ops.mkldnn._reorder_linear_weight(weight, NUM_TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class MKLPackedLinear(PackedLinear):
    """Linear layer, [..., in_features] to [..., out_features], with weights only in MKL's packed layout."""

    dtypes = (torch.float32,)

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self._like_weight = linear.weight.detach().new_zeros(1).expand(linear.weight.shape)  # MKL reads its shape only

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_NUM_TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_tokens = x.numel() // self.in_features  # with any other number torch ignores the packed weights
        return torch.ops.mkl._mkl_linear(x, self._packed, self._like_weight, self.bias, num_tokens)


def pack_linears(model: nn.Module, packed: type[PackedLinear] = PackedLinear) -> int:
    """Replace a model's plain CPU linear layers by packed ones, and return how many were replaced.

    Layers are replaced one by one, and the old weights of each are freed. Layers of other classes, dtypes and devices
    stay, as do all layers of a dtype that the library cannot pack correctly on this CPU. (oneDNN packs bfloat16 only on
    CPUs with AVX-512.)
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    count, tried = 0, dict.fromkeys(packed.dtypes, False)  # by dtype: whether one packed layer agreed
    for parent, name in _packable(model, packed.dtypes):
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


LAYOUTS: dict[str, type[PackedLinear] | None] = {"plain": None, "MKL": MKLPackedLinear, "oneDNN": PackedLinear}


def pack_as(model: nn.Module, layout: str) -> int:
    """Pack a model's plain CPU linear layers in one of LAYOUTS, and return how many were packed."""
    packed = LAYOUTS[layout]
    if packed is None:
        return 0
    return pack_linears(model, packed) + pack_linears(model)  # oneDNN packs the dtypes that MKL cannot


def pack_fastest(model: nn.Module) -> str | None:
    """Pack a causal LM's plain CPU linear layers in the fastest of LAYOUTS; return it, or None if none.

    The model is changed in place. A small model is timed as a whole, and stays unpacked if that is fastest. Of a large
    one only a few layers are timed, because both layouts of all layers would take too much memory.
    """
    places = _packable(model, PackedLinear.dtypes)
    plain = [getattr(parent, name) for parent, name in places]
    if not plain:
        return None
    if sum(linear.weight.nbytes for linear in plain) > SMALL_BYTES:
        layout = _faster_order(plain)
        del plain
        return layout if pack_as(model, layout) else "plain"  # a library may refuse all of them on this CPU
    choices = {"plain": plain}
    for layout, packed in (("MKL", MKLPackedLinear), ("oneDNN", PackedLinear)):
        if pack_linears(model, packed):
            pack_as(model, layout)  # the dtypes that are left
            choices[layout] = [getattr(parent, name) for parent, name in places]
            _put(places, plain)

    def seconds_with(layers: list[nn.Module]) -> float:
        _put(places, layers)
        return _seconds_of_a_pass(model)

    layout = list(choices)[_fastest(list(choices.values()), seconds_with)]
    _put(places, choices[layout])
    return layout


def _faster_order(linears: list[nn.Linear]) -> str:
    """Return the packed layout that is faster, timed on the first layers, up to SAMPLE_BYTES of weights."""
    sample, num_bytes = [], 0
    for linear in linears:
        if linear.weight.dtype in MKLPackedLinear.dtypes and num_bytes < SAMPLE_BYTES:
            sample.append(linear)
            num_bytes += linear.weight.nbytes
    orders = (MKLPackedLinear, PackedLinear)
    try:
        choices = [[order(linear) for linear in sample] for order in orders]
    except (RuntimeError, AttributeError):
        return "oneDNN"
    return ("MKL", "oneDNN")[_fastest(choices, _seconds_of_layers)] if sample else "oneDNN"


def _fastest(choices: list[Layers], seconds: Callable[[Layers], float]) -> int:
    """Return the index of the choice of layers that takes the least time; the last one if any fails."""
    best = [float("inf")] * len(choices)
    started = time.perf_counter()
    try:
        for trial in range(NUM_TRIALS + 1):
            for index, layers in enumerate(choices):
                duration = seconds(layers)
                if trial:  # the first trial initializes the libraries
                    best[index] = min(best[index], duration)
            if trial and time.perf_counter() - started > MAX_TRIAL_SECONDS:
                break
    except Exception:  # raised by the model's own code; the self-check reports it better
        return len(choices) - 1
    return best.index(min(best))


def _put(places: list[tuple[nn.Module, str]], layers: list[nn.Module]) -> None:
    for (parent, name), layer in zip(places, layers, strict=True):
        setattr(parent, name, layer)


@torch.inference_mode()
def _seconds_of_a_pass(model: nn.Module) -> float:
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    started = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    return time.perf_counter() - started


@torch.inference_mode()
def _seconds_of_layers(layers: list[PackedLinear]) -> float:
    """Return the seconds that layers take one after another, summed over inputs of 1, 16 and 32 tokens."""
    total = 0.0
    for num_tokens in (1, NUM_TOKENS, 2 * NUM_TOKENS):
        inputs = [torch.ones(num_tokens, layer.in_features) for layer in layers]
        started = time.perf_counter()
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)
        total += time.perf_counter() - started
    return total


def places_of(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[tuple[nn.Module, str]]:
    """Return the (parent module, name in the parent) of each submodule for which `is_wanted` is true.

    Holds no reference to the submodules themselves, so that the weights of each are freed when it is replaced.
    """
    return [(parent, name) for parent in model.modules() for name, child in parent.named_children() if is_wanted(child)]


def is_plain(module: nn.Module) -> bool:
    """Whether a module is exactly nn.Linear, with an ordinary weight parameter and without hooks."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module runs other code than its class's forward: hooks, or a forward set on the instance."""
    attributes = vars(module)
    return "forward" in attributes or any(attributes.get(name) for name in HOOKS)


def _packable(model: nn.Module, dtypes: tuple[torch.dtype, ...]) -> list[tuple[nn.Module, str]]:
    """Return the (parent module, name in the parent) of each linear layer that can be packed."""

    def can_pack(module: nn.Module) -> bool:
        return is_plain(module) and module.weight.device.type == "cpu" and module.weight.dtype in dtypes

    return [(parent, name) for parent, name in places_of(model, can_pack) if not _reads_weight(parent, name)]


def _reads_weight(parent: nn.Module, name: str) -> bool:
    """Whether a module's forward computes with the weight of its layer `name`, as the router of LongCat Flash does.

    That is, whether its code reads an attribute of `name.weight` that a WeightInfo does not have.
    """
    code = getattr(inspect.unwrap(type(parent).forward), "__code__", None)
    reads = [each.argval if each.opname in READS else None for each in dis.get_instructions(code)] if code else []
    return any(
        pair == [name, "weight"] and attribute not in (None, *WeightInfo.__annotations__)
        for *pair, attribute in zip(reads, reads[1:], reads[2:], strict=False)
    )


@torch.inference_mode()
def _agree(linear: nn.Linear, packed: PackedLinear) -> bool:
    x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight.dtype)
    expected, actual = linear(x).float(), packed(x).float()
    return bool((actual - expected).norm() <= TOLERANCES[linear.weight.dtype] * expected.norm())
