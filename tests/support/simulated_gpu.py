"""A simulated GPU: torch's device "cuda", computed on the CPU, with a GPU's restrictions.

Tensors report cuda:0. Operations on them are computed in ordinary memory, in order, at once. The simulation keeps the
behavior of a GPU that a program can observe:

- tensors of host and device do not mix;
- memory that was never written holds NaN, or numbers far out of range;
- queued work is done once the host has waited for it, or for later work. Until then, a copy to pinned memory has not
  arrived, and the source of a copy from pinned memory must not change. `Gpu.waits` lists the place of each wait for
  work that was not known to be done;
- while a graph is captured, nothing is computed, and nothing may wait. A replay computes with the present contents of
  the same memory, and invalidates the memory of the other graphs of its pool.

Not simulated: the time of the device, more than one stream (so a missing wait for another stream goes unnoticed), the
reuse of pinned memory, Triton, torch.compile, NCCL, and whether a real kernel computes the same. Triton's kernels are
replaced by torch operations; the kernels have separate tests.

Processes with simulated_site in PYTHONPATH have a simulated GPU from their start, to rehearse tests/gpu and
scripts/gpu.sh.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lp_runtime.kernels import dispatch
from lp_runtime.kernels.triton_cut import Cut, can_cut, cut_scores
from lp_runtime.model.modules import fusing
from lp_runtime.sampling.gumbel import uniforms
from lp_runtime.utils.jit import cache_root
from support import stand_ins

aten = torch.ops.aten
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PACKAGE = Path(dispatch.__file__).parents[1]
OUT_OF_RANGE = 0x5A
READ_BY_HOST = (
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "repeat_interleave", "bincount",
)  # fmt: skip
MAKE_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
MAKE_OF_VALUES = (torch.tensor, torch.as_tensor)
MAY_PIN = (torch.tensor, torch.empty, torch.zeros)
SUBSCRIPTS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
ACCEPT_NUMBERS = ("fill_", "fill", "masked_fill", "masked_fill_")  # from the host, as pointwise operations do
BY_INDICES = ("index", "_index_put_impl_", "index_put_", "index_put")  # indices may be on the host, and are copied


class Tensor(torch.Tensor):
    """A tensor on the simulated GPU; `memory` holds it on the CPU."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), storage_offset=memory.storage_offset(), dtype=memory.dtype,
            device=GPU,
        )  # fmt: skip
        made.memory = memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Gpu.now.call(function, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def __repr__(self, **kwargs) -> str:
        return f"simulated_gpu.Tensor({self.memory!r})"


class Gpu(TorchDispatchMode):
    """The device; there is one at a time.

    Attributes:
        waits: for each wait for work that was not known to be done, the function of the package that waited.
        seconds_slept: time that `sleep` added to the device's clock; the host does not wait for it.
        launches: launches by name: replays, and operations outside of graphs other than views and empty tensors.
        launch_places: the same by function of the package, without replays and copies from the host.
        sync_debug_mode: set by torch.cuda.set_sync_debug_mode; with "error" no operation may wait for the device.
    """

    now: Gpu

    def __init__(self):
        super().__init__()
        self.waits: list[str] = []
        self.seconds_slept = 0.0
        self.sync_debug_mode: int | str = 0
        self.launches: Counter[str] = Counter()
        self.launch_places: Counter[str] = Counter()
        self.note: Callable[[torch.Tensor], None] = lambda memory: None  # called with allocated memory and with views
        self._is_in_kernel = False
        self._queued = self._done = 0
        self._under_way: list[tuple[int, Callable[[], None]]] = []  # calls due when work with a number is done
        self._pinned: dict[int, torch.Tensor] = {}  # by address
        self._graph: Graph | None = None  # being captured

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.call(function, args, kwargs or {})

    def queue(self) -> int:
        """Queue work; return its number."""
        self._queued += 1
        return self._queued

    def count_launch(self, name: str, has_place: bool = True) -> None:
        """Count the launch of an operation or of one of our kernels."""
        if self._graph is None and not self._is_in_kernel:
            self.launches[name] += 1
            self.launch_places[_place()] += has_place

    @contextlib.contextmanager
    def one_launch(self, name: str) -> Iterator[None]:
        """Count everything inside as one launch."""
        self.count_launch(name)
        self._is_in_kernel = True
        try:
            yield
        finally:
            self._is_in_kernel = False

    def sleep(self, cycles: int) -> None:
        """Keep the device busy for a number of cycles of a nanosecond each."""
        self.queue()
        self.seconds_slept += cycles * 1e-9

    @property
    def last(self) -> int:
        """The number of the work that was queued last."""
        return self._queued

    def is_done(self, number: int) -> bool:
        """Whether the host knows that work is done."""
        return number <= self._done

    def check_not_capturing(self) -> None:
        """Raise an error while a graph is captured: some calls are not allowed then."""
        if self._graph is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = mode

    def wait(self, number: int | None = None, is_asked_for: bool = False) -> None:
        """Wait for queued work, up to a number; `is_asked_for` by the program, not implied by an operation."""
        self.check_not_capturing()
        if self.sync_debug_mode == "error" and not is_asked_for:
            raise RuntimeError("called a synchronizing CUDA operation")
        number = self._queued if number is None else number
        if self.is_done(number):
            return
        self._done = number
        self.waits.append(_place())
        done = [happen for at, happen in self._under_way if at <= number]
        self._under_way = [each for each in self._under_way if each[0] > number]
        for happen in done:
            happen()

    def call(self, function, args, kwargs):  # noqa: C901 (one branch for each kind of operation)
        """Compute an operation that torch dispatches."""
        name = function.overloadpacket.__name__
        if name == "copy_":
            return self._copy(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if name in ("pin_memory", "_pin_memory"):
            return self.pin(args[0].clone())
        if name == "is_pinned":
            return self._is_pinned(args[0])
        values = list(_leaves((args, kwargs)))
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        ours = [each for each in tensors if isinstance(each, Tensor)]
        places = [each for each in values if isinstance(each, torch.device)]
        if not ours and all(place.type != "cuda" for place in places):
            return function(*args, **kwargs)
        if function.namespace == "c10d":  # a collective is queued like anything else
            self.queue()
            given = {id(each.memory): each for each in ours}
            made = function(*_changed(_on_host, args), **_changed(_on_host, kwargs))
            return _changed(lambda each: given.get(id(each), each), made)
        if name == "_to_copy":
            return self._to_copy(args[0], dict(kwargs))
        if name == "scaled_dot_product_attention":
            pass  # a GPU chooses another kernel, which computes the same
        elif torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
            with self:
                made = function.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if name in READ_BY_HOST:
            self.wait()
        place = places[0] if places else GPU
        assert place.type == "cuda" or name.startswith("new_") or name.endswith("_like"), f"{name} to {place}"
        indices = [each for each in args[1] if each is not None] if name in BY_INDICES else []
        if any(not isinstance(each, Tensor) or each.dtype in (torch.bool, torch.uint8) for each in indices):
            self.wait()  # an index is copied from the host, or a mask determines the size of the result
        takes_numbers = torch.Tag.pointwise in function.tags or name in ACCEPT_NUMBERS
        for each in tensors:
            if not isinstance(each, Tensor) and not (each.dim() == 0 and takes_numbers) and not _is_in(each, indices):
                raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")
        generator = kwargs.get("generator")
        if generator is not None and getattr(generator, "place", CPU).type != "cuda":
            raise RuntimeError(f"{name}: Expected a 'cuda' device type for generator but found 'cpu'")
        return self._compute(STAND_INS.get(name, function), function, args, kwargs, name)

    def _compute(self, compute, function, args, kwargs, name: str, from_host: bool = False):
        ours = [each for each in _tensors((args, kwargs)) if isinstance(each, Tensor)]
        normal = {_address(each.memory) for each in ours if not each.is_inference()}
        args, kwargs = _changed(_on_host, (args, kwargs))
        kwargs.pop("pin_memory", None)
        written = [
            args[place] if place < len(args) else kwargs[each.name]
            for place, each in enumerate(function._schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write and (place < len(args) or each.name in kwargs)
        ]
        if self._graph is not None:
            self._graph.about_to_write(written)
        made = compute(*args, **kwargs)
        for each in _tensors(made):
            self.note(each)
        self.queue()
        if name in MAKE_EMPTY:
            _spoil(made)

        def tensor_of(value):
            if not isinstance(value, torch.Tensor):
                return value
            # Results in inference mode are inference tensors, except for views of normal tensors.
            with torch.inference_mode(torch.is_inference_mode_enabled() and _address(value) not in normal):
                return Tensor(value)

        ours = _changed(tensor_of, made)
        given = set(map(_address, _tensors((args, kwargs))))
        is_view = not written and all(_address(each) in given for each in _tensors(made))
        if not is_view and name not in MAKE_EMPTY:
            self.count_launch(name, has_place=not from_host)
        if self._graph is not None:
            self._graph.record(compute, args, kwargs, made, ours)
        return ours

    def pin(self, made: torch.Tensor) -> torch.Tensor:
        """Mark a tensor's memory as pinned."""
        self._pinned[made.untyped_storage().data_ptr()] = made  # kept, so that its address is not reused
        return made

    def _is_pinned(self, host: torch.Tensor) -> bool:
        return not isinstance(host, Tensor) and host.untyped_storage().data_ptr() in self._pinned

    def _to_copy(self, source: torch.Tensor, options: dict):
        place = options.pop("device", None) or source.device
        non_blocking, dtype = options.get("non_blocking", False), options.get("dtype") or source.dtype
        if place.type == "cuda":
            target = Tensor(torch.empty(source.shape, dtype=dtype))
            self.note(target.memory)
            if isinstance(source, Tensor):
                options = {key: value for key, value in options.items() if key != "non_blocking"}
                function = aten._to_copy.default
                return self._compute(function, function, (source,), options, "_to_copy")
        else:  # the target is not pinned, so the host waits for the copy, as with torch
            target = torch.empty(source.shape, dtype=dtype)
        return self._copy(target, source, non_blocking)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        to_gpu, of_gpu = isinstance(target, Tensor), isinstance(source, Tensor)
        if to_gpu == of_gpu:
            if to_gpu:
                function = aten.copy_.default
                self._compute(function, function, (target, source), {}, "copy_")
            else:
                target.copy_(source)
            return target
        host = source if to_gpu else target
        if self._graph is not None:  # CUDA allows pinned memory, but that may have another owner at replay
            raise RuntimeError("a copy between host and device while a graph is captured: operation not permitted")
        # Other dtypes and non-contiguous tensors are converted in host memory that is not pinned.
        is_plain_copy = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        is_asynchronous = non_blocking and self._is_pinned(host) and is_plain_copy
        if to_gpu:
            function = aten.copy_.default
            self._compute(function, function, (target, Tensor(source)), {}, "copy_", from_host=True)
            copied = source.clone()

            def happen() -> None:
                assert torch.equal(copied, source), "the host's memory was written to before it was copied"
        else:
            value = source.memory.clone()
            self.queue()
            _spoil(target)

            def happen() -> None:
                target.copy_(value)

        self._under_way.append((self._queued, happen))
        if not is_asynchronous:
            self.wait()
        return target


class ByHost(TorchFunctionMode):
    """Makes tensors on the host, and copies or pins them, where torch would not dispatch to Gpu."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in MAKE_OF_VALUES and kwargs.get("device") and torch.device(kwargs["device"]).type == "cuda":
            return function(*args, **kwargs | {"device": CPU}).to(GPU)
        if function in SUBSCRIPTS and isinstance(args[0], Tensor):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            indices = tuple(torch.tensor(each).to(GPU) if isinstance(each, list) else each for each in indices)
            args = (args[0], indices, *args[2:])
        if function is torch.Tensor.tolist and isinstance(args[0], Tensor):
            return args[0].cpu().tolist()
        if kwargs.get("pin_memory"):
            if function not in MAY_PIN or isinstance(args[0], (torch.Tensor, np.ndarray)):
                raise RuntimeError(f"{function.__name__}: Can't pin tensor constructed from numpy")
            return Gpu.now.pin(function(*args, **kwargs | {"pin_memory": False}))
        return function(*args, **kwargs)


class Graph:
    """A simulated CUDA graph.

    Attributes:
        captured: all graphs captured so far, in order.
    """

    captured: list[Graph] = []
    by_pool: dict[object, list[Graph]] = {}

    def __init__(self):
        self._calls: list[tuple[Callable, tuple, dict, list[torch.Tensor]]] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # (written tensor, its earlier contents)
        self._own: dict[int, torch.Tensor] = {}  # memory made by the capture, by address
        self._seen: list[weakref.ref[Tensor]] = []  # the program's tensors in that memory, with views
        self.pool: object = self

    def about_to_write(self, targets: list[torch.Tensor]) -> None:
        """Save tensors that the capture writes to; `end` restores them."""
        self._before += [(each, each.clone()) for each in targets if _address(each) not in self._own]

    def record(self, compute: Callable, args: tuple, kwargs: dict, made, ours) -> None:
        """Record an operation of the capture."""
        given = set(map(_address, _tensors((args, kwargs))))
        results = _tensors(made)
        results = [None if _address(each) in given else each for each in results]
        self._own |= {_address(each): each for each in results if each is not None}
        self._seen += [weakref.ref(each) for each in _tensors(ours) if _address(each.memory) in self._own]
        self._calls.append((compute, args, kwargs, results))

    def end(self) -> None:
        """End the capture, and undo its effects: a capture computes nothing."""
        for target, value in reversed(self._before):
            target.copy_(value)
        self._before = []
        self._spoil()
        Graph.by_pool.setdefault(self.pool, []).append(self)
        Graph.captured.append(self)

    def _spoil(self) -> None:
        """Invalidate the capture's tensors that the program still refers to."""
        self._seen = [each for each in self._seen if each() is not None]
        for each in self._seen:
            if (tensor := each()) is not None:
                _spoil(tensor.memory)

    def replay(self) -> None:
        """Compute the recorded operations with the present contents of their memory."""
        with _disable_current_modes():
            for other in Graph.by_pool[self.pool]:
                other._spoil()
            for compute, args, kwargs, results in self._calls:
                for result, value in zip(results, _tensors(compute(*args, **kwargs)), strict=True):
                    if result is not None:
                        result.copy_(value)
        Gpu.now.queue()
        Gpu.now.launches["graph"] += 1


class Generator(torch.Generator):
    """A generator that draws on the CPU and knows the device it is for."""

    place: torch.device

    def __new__(cls, device: object = "cpu"):
        made = super().__new__(cls, "cpu")
        made.place = torch.device(device)
        return made


class Event:
    """A CUDA event; as in CUDA, an event that was never recorded is done."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False):
        self._number, self._time, self._has_time = 0, 0.0, enable_timing

    def record(self, stream: object = None) -> None:
        self._number, self._time = Gpu.now.last, time.perf_counter() + Gpu.now.seconds_slept

    def query(self) -> bool:
        Gpu.now.check_not_capturing()
        return Gpu.now.is_done(self._number)

    def synchronize(self) -> None:
        Gpu.now.wait(self._number, is_asked_for=True)

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds between two events."""
        assert self._has_time and other._has_time and other.query(), "an event that has not happened has no time"
        return (other._time - self._time) * 1000


class Stream:
    """A CUDA stream. All objects are the same stream, but the current object is tracked.

    Attributes:
        of_device: the default stream.
        current: the current stream.
    """

    of_device: Stream
    current: Stream

    def __init__(self, device: object = None):
        pass

    def synchronize(self) -> None:
        Gpu.now.wait(is_asked_for=True)

    def wait_stream(self, other: Stream) -> None:
        pass


Stream.of_device = Stream.current = Stream()


@contextlib.contextmanager
def made_current(stream: Stream) -> Iterator[None]:
    """Replacement of torch.cuda.stream."""
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


@contextlib.contextmanager
def capturing(graph: Graph, pool: object = None, stream: object = None, **others: object) -> Iterator[None]:
    """Replacement of torch.cuda.graph."""
    gpu, before = Gpu.now, Stream.current
    gpu.wait()
    graph.pool = pool or graph
    gpu._graph = graph
    if stream is not None:  # torch makes it current, and does not undo that if the capture fails
        Stream.current = stream
    try:
        yield
    finally:
        gpu._graph = None
    graph.end()
    Stream.current = before


@contextlib.contextmanager
def unchanged(*args: object) -> Iterator[None]:
    """Replacement of torch.cuda.device: there is only one device."""
    yield


def _place() -> str:
    """Return the innermost function of the package on the call stack, with its file."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
        frame = frame.f_back
    return "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"


def _leaves(value) -> Iterator[object]:
    """Yield the leaves of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _tensors(value) -> list[torch.Tensor]:
    return [each for each in _leaves(value) if isinstance(each, torch.Tensor)]


def _changed(change: Callable, value):
    """Return the same nested structure with `change` applied to every leaf."""
    if isinstance(value, dict):
        return {key: _changed(change, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_changed(change, each) for each in value])
    return change(value)


def _on_host(value):
    if isinstance(value, Tensor):
        return value.memory
    return CPU if isinstance(value, torch.device) else value


def _address(memory: torch.Tensor) -> int:
    return memory.untyped_storage().data_ptr()


def _spoil(memory: torch.Tensor) -> None:
    if memory.dtype.is_floating_point:
        memory.fill_(torch.nan)
    elif memory.numel():
        memory.contiguous().view(torch.uint8).fill_(OUT_OF_RANGE) if memory.is_contiguous() else memory.fill_(1)


def _is_in(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    return any(tensor is each for each in others)


def _flash(query, key, value, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    groups = query.shape[1] // key.shape[1]  # the GPU's kernel does not need repeated keys
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    output, total = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, scale=scale)
    return output, total, None, None, query.shape[2], key.shape[2], None, None, None


def _flash_forward(
    query, key, value, starts, key_starts, num_tokens, num_keys, dropout, is_causal, debug, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert is_causal and window_size_right == 0 and starts is None and key_starts is None
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))  # the GPU's kernel has tokens first
    last = num_keys - num_tokens
    seen = torch.ones((num_tokens, num_keys), dtype=torch.bool).tril(last).triu(last - window_size_left)
    bias = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    output, total = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, attn_mask=bias[None, None], scale=scale
    )
    nothing = torch.empty(0)
    return output.transpose(1, 2), total, nothing, nothing, nothing


def _efficient(query, key, value, bias, with_total, dropout=0.0, is_causal=False, *, scale=None):
    output, total = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, is_causal, attn_mask=bias, scale=scale
    )
    filling = -total.shape[2] % 32
    return output, torch.nn.functional.pad(total, (0, filling), value=torch.inf), None, None


STAND_INS = {
    "_flash_attention_forward": _flash_forward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "histc": lambda values, *bins: torch.histc(values.float(), *bins),  # the CPU has no histc of integers
}


def can_norm(states, weight):
    return states.is_contiguous() and weight.dtype in (states.dtype, torch.float32)


def can_add_and_norm(states, added, weight):
    return can_norm(states, weight) and added.is_contiguous() and states.dtype == added.dtype


def add_and_norm(states, added, weight, epsilon, added_weight=None):
    total = states + (added if added_weight is None else stand_ins.norm(added, added_weight, epsilon))
    return total, stand_ins.norm(total, weight, epsilon)


def find_cut(logits, inverse_temperature, top_k, top_p):
    assert logits.stride(1) == 1 and can_cut(logits.dtype, top_p)
    scores = logits.memory.float() * inverse_temperature
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(top_p)(None, scores)
    threshold = scores.masked_fill(scores == -torch.inf, torch.inf).min(-1, keepdim=True).values
    first_ids = (scores == threshold).int().argmax(-1).int()
    return Cut(Tensor(threshold[:, 0]), Tensor(first_ids))


def sample_and_pack(logits, packing, noise=None, inverse_temperature=1.0, cut=None):
    assert logits.stride(1) == 1
    scores = logits.float() * inverse_temperature if cut is None else cut_scores(logits, inverse_temperature, cut)
    noisy = scores if noise is None else scores + _gumbel(noise, scores.shape[1])
    return stand_ins.packed(scores, noisy, packing)


def find_in_slice(logits, packing, noise, inverse_temperature, first, num_tokens):
    scores = logits.float() * inverse_temperature
    noisy = scores if noise is None else scores + _gumbel(noise, scores.shape[1], first)
    return stand_ins.candidates_in_slice(scores, noisy, packing.num, first)


def pack_candidates(result, packing, noise, vocabulary_size):
    return stand_ins.packed_of_slices(result, packing.num, packing.width)


def _gumbel(noise, size, first=0):
    rows = uniforms(noise.seed, noise.sample, noise.positions.memory.tolist(), size, CPU, first)
    return Tensor((-(-rows.log()).log()).float())


def launched(kernel):
    """Wrap the replacement of a kernel so that it counts as one launch."""

    @functools.wraps(kernel)
    def launch(*args, **options):
        with Gpu.now.one_launch(kernel.__name__):
            return kernel(*args, **options)

    return launch


KERNELS = SimpleNamespace(
    can_norm=can_norm,
    can_add_and_norm=can_add_and_norm,
    can_cut=can_cut,
    cut_scores=cut_scores,
    MAX_TOKENS=stand_ins.MAX_TOKENS,
    can_choose=stand_ins.can_choose,
    ExpertWeights=stand_ins.ExpertWeights,
    **{
        kernel.__name__: launched(kernel)
        for kernel in (
            stand_ins.gate,
            stand_ins.norm,
            stand_ins.feed_experts,
            stand_ins.choose_experts,
            add_and_norm,
            find_cut,
            sample_and_pack,
            find_in_slice,
            pack_candidates,
        )
    },
    **{name: getattr(stand_ins, name) for name in ("write", "rotate_and_write", "attend", "attend_strictly")},
)


PROPERTIES = SimpleNamespace(multi_processor_count=132, total_memory=1 << 34, uuid=uuid.UUID(int=7))
CUDA = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "a simulated GPU",
    "get_device_properties": lambda device=None: PROPERTIES,
    "mem_get_info": lambda device=None: (1 << 34, 1 << 34),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "memory_snapshot": list,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "synchronize": lambda device=None: Gpu.now.wait(is_asked_for=True),
    "current_stream": lambda device=None: Stream.current,
    "stream": made_current,
    "device": unchanged,
    "graph": capturing,
    "graph_pool_handle": object,
    "get_sync_debug_mode": lambda: Gpu.now.sync_debug_mode,
    "set_sync_debug_mode": lambda mode: Gpu.now.set_sync_debug_mode(mode),
    "CUDAGraph": Graph,
    "_sleep": lambda cycles: Gpu.now.sleep(cycles),
    "Event": Event,
    "Stream": Stream,
}


@functools.cache
def register_guard() -> None:
    """Register a device guard for "cuda" in torch; its library is built once per source and torch version."""
    root = Path(torch.__file__).parent
    source = Path(__file__).with_name("device_guard.cpp")
    digest = hashlib.sha256(source.read_bytes() + f"{torch.__version__} {root}".encode()).hexdigest()[:16]
    library = cache_root() / f"device_guard-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = f"{folder}/device_guard.so"
            paths = [f"-I{root}/include", f"-L{root}/lib", "-lc10"]
            subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", built, *paths], check=True)
            os.replace(built, library)  # atomic, since other processes may build it, too
    torch.ops.load_library(str(library))


@contextlib.contextmanager
def simulated_gpu() -> Iterator[Gpu]:
    """Simulate a GPU inside this context, for all threads of this process."""
    register_guard()
    gpu = Gpu.now = Gpu()
    run = threading.Thread.run

    def run_with_gpu(thread: threading.Thread) -> None:
        with gpu, ByHost():
            run(thread)

    dispatch.why_no_kernels.cache_clear()
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a Parameter cannot become a Tensor in place
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, stand_in in CUDA.items():
                patch.setattr(torch.cuda, name, stand_in)
            patch.setattr(torch, "Generator", Generator)
            patch.setattr(dispatch, "triton_gpu", lambda: KERNELS)
            # Parameters on the simulated GPU have another class, which the package would not fuse.
            patch.setattr(fusing, "is_plain", lambda each: type(each) is nn.Linear and not fusing.is_hooked(each))
            patch.setattr(fusing, "_is_norm", lambda each: fusing._runs_code_of(each, LlamaRMSNorm))
            patch.setattr(threading.Thread, "run", run_with_gpu)
            with gpu, ByHost():
                yield gpu
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
        dispatch.why_no_kernels.cache_clear()
        Graph.by_pool.clear()
        Graph.captured.clear()
