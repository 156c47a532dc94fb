"""Rotary embeddings whose factors change with the length of the text, for each token of a pass by its own length.

transformers' module ("dynamic" and "longrope") takes the factors of all tokens of a pass by the largest position in it.
A tree's pass holds positions beyond the committed text, a long prompt comes in chunks, and a batch has several texts:
so a module of ours stands in its place. It looks the factors of each token up by L(p) (rotary_lengths.py), in tables
that the library's own functions have filled, and leaves the rest to the library's code. There are operations on tensors
alone, so that a pass can be captured. No class is patched: instances are replaced, in a model of our own or in a view.

Letters: T tokens fed, D numbers of a rotated head, n rows of a table.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from lp_runtime.model.optimize.packing import is_hooked, places_of
from lp_runtime.model.rotary_lengths import UNCHANGING, RotaryLengths
from lp_runtime.model.view import view_of

Rotary = Any  # an nn.Module whose attributes are read: torch declares them as Tensor | Module

DYNAMIC, LONG = "dynamic", "longrope"
MIN_THRESHOLD = 16  # tokens; shorter ones, which no model has, would leave the self-check no room
REFEEDING_TYPES = ("phi3",)  # their prepare_inputs_for_generation computes all tokens anew at a length
UPDATED = dynamic_rope_update(lambda: None).__code__  # of a forward that takes its factors by the length


class RotaryByLength(nn.Module):
    """Stands in place of a rotary embedding whose factors change with the length.

    Args:
        library: transformers' module, which is not changed. Its forward must take the factors from `inv_freq` alone.

    Attributes:
        library: a copy of the module, as a fresh one is.
        length: P that all tokens count as having before them; 0 where no token of a prompt is fed.
        thresholds: threshold of each table, by the kind of layer that it is of; None where all layers have one.
    """

    def __init__(self, library: Rotary):
        super().__init__()
        self.library = _fresh(library)
        self.length = 0
        self.thresholds: dict[str | None, int] = {}
        for layer_type, kind in changing_kinds(library).items():
            threshold, table = _table(library, layer_type, kind)
            self.thresholds[layer_type] = threshold
            self.register_buffer(_named(layer_type, "factors"), table, persistent=False)
        self._compute: Callable[..., Any] = inspect.unwrap(type(library).forward)

    @property
    def tables(self) -> list[tuple[int, int]]:
        """(threshold, rows) of each table."""
        return [(threshold, len(self._factors(key))) for key, threshold in self.thresholds.items()]

    def _factors(self, layer_type: str | None) -> torch.Tensor:
        """Return a table, [n, D / 2] float32."""
        return self.get_buffer(_named(layer_type, "factors"))

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """Return what the library's module returns, each token with the factors of its own length.

        Args:
            x: gives dtype and device.
            position_ids: [..., T] int64.
            layer_type: kind of the layers, where each has factors of its own.
        """
        module = self.library
        if layer_type in self.thresholds:
            table = self._factors(layer_type)
            lengths = (position_ids + 1).clamp_min(self.length)
            rows = (lengths - self.thresholds[layer_type]).clamp(0, len(table) - 1)
            module = _with_factors(module, _named(layer_type, "inv_freq"), table[rows])
        return self._compute(module, x, position_ids, **({} if layer_type is None else {"layer_type": layer_type}))


def _with_factors(module: Rotary, name: str, factors: torch.Tensor) -> Rotary:
    """Return a module that differs from another in one buffer."""
    other = object.__new__(type(module))
    vars(other).update(vars(module))
    vars(other)["_buffers"] = vars(module)["_buffers"] | {name: factors}
    return other


def _named(layer_type: str | None, name: str) -> str:
    """Return the name of an attribute that a rotary embedding has for a kind of layers."""
    return name if layer_type is None else f"{layer_type}_{name}"


def changing_kinds(module: nn.Module) -> dict[str | None, str]:
    """Return which factors of a module change with the length: DYNAMIC or LONG by kind of layer, None for all."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    return {layer: DYNAMIC if DYNAMIC in kind else LONG for layer, kind in kinds.items() if _changes(kind)}


def _changes(kind: object) -> bool:
    """Whether factors of this kind change with the length; transformers takes any "dynamic" in the name for one."""
    return isinstance(kind, str) and (DYNAMIC in kind or kind == LONG)


def _fresh(library: Rotary) -> Rotary:
    """Return a copy of a rotary embedding as it was before it was used."""
    module = copy.deepcopy(library)
    for layer_type in changing_kinds(library):
        name, original = _named(layer_type, "inv_freq"), getattr(library, _named(layer_type, "original_inv_freq"))
        dtype = getattr(library, name).dtype
        module.register_buffer(name, original.to(dtype, copy=True), persistent=False)
        for attribute in ("max_seq_len_cached", _named(layer_type, "max_seq_len_cached")):
            if hasattr(module, attribute):
                setattr(module, attribute, module.original_max_seq_len)
    return module


def parameters_of(config: PreTrainedConfig, layer_type: str | None = None) -> dict[str, Any]:
    """Return the parameters of a configuration's rotary embedding, of one kind of layer where each has its own."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters if layer_type is None else parameters[layer_type]


def scaled_context(config: PreTrainedConfig, parameters: dict[str, Any]) -> int:
    """Return how many positions a "dynamic" rotary embedding is meant for, in tokens: as many as vLLM lets it have."""
    return int(config.max_position_embeddings * max(1.0, parameters["factor"]))


def _table(library: Rotary, layer_type: str | None, kind: str) -> tuple[int, torch.Tensor]:
    """Return a threshold, and the factors of texts of so many tokens, and of more, as [n, D / 2] float32."""
    config, device = library.config, getattr(library, _named(layer_type, "inv_freq")).device
    parameters = parameters_of(config, layer_type)
    original = getattr(library, _named(layer_type, "original_inv_freq"))
    function = ROPE_INIT_FUNCTIONS[library.rope_type if layer_type is None else library.rope_type[layer_type]]
    if kind == LONG:
        threshold = parameters["original_max_position_embeddings"]
        long, _ = function(config, device, seq_len=threshold + 1, layer_type=layer_type)
        dtype = getattr(library, _named(layer_type, "inv_freq")).dtype  # both are copied into a tensor of it
        return threshold, torch.stack([original, long.to(dtype)]).float()
    threshold = config.max_position_embeddings
    lengths = torch.arange(threshold + 1, scaled_context(config, parameters) + 1, device=device)
    # On a CPU torch raises one number to a power by another function than several: the last bits differ.
    parts = lengths.split(1) if device.type == "cpu" else ([lengths[:, None]] if len(lengths) else [])
    found = [function(config, device, seq_len=each.squeeze(0), layer_type=layer_type)[0] for each in parts]
    return threshold, torch.cat([original.float()[None], *(each.reshape(-1, len(original)) for each in found)])


def replace_rotaries(model: PreTrainedModel, may_refeed: bool = True) -> RotaryLengths:
    """Put a RotaryByLength in place of each rotary embedding of a model whose factors change with the length.

    Args:
        model: changed in place: all of its rotary embeddings are replaced, or none.
        may_refeed: whether all tokens of a text may be computed anew at a length, where `generate` does.

    Returns:
        The lengths at which factors change. Without any, the model must be used where they do not.
    """
    config = model.config.get_text_config()
    places = places_of(model, lambda module: bool(changing_kinds(module)))
    libraries = {id(getattr(*place)): getattr(*place) for place in places}
    made = {key: replacement for key, module in libraries.items() if (replacement := _replacement(module))}
    tables = tuple(sorted({table for each in made.values() for table in each.tables}))
    lengths = RotaryLengths(tables, refed_at(config))
    if len(made) < len(libraries) or not _can_be_kept(lengths, may_refeed):
        return UNCHANGING
    for parent, name in places:
        setattr(parent, name, made[id(getattr(parent, name))])
    return lengths


def refed_at(config: PreTrainedConfig) -> int | None:
    """Return the tokens of a text behind which `generate` computes all of it anew; None for a type that never does."""
    return config.original_max_position_embeddings if config.model_type in REFEEDING_TYPES else None


def _can_be_kept(lengths: RotaryLengths, may_refeed: bool) -> bool:
    """Whether a model can be used beyond the lengths at which its factors change, or has none."""
    thresholds = [threshold for threshold, _ in lengths.tables]
    return lengths.refed_at is None or (may_refeed and thresholds == [lengths.refed_at])


def _replacement(library: Rotary) -> RotaryByLength | None:
    """Return what can stand in place of a rotary embedding; None if its code is not known to allow that."""
    if is_hooked(library) or not any(each.__code__ is UPDATED for each in _wrapped(type(library).forward)):
        return None
    try:
        replacement = RotaryByLength(library)
        is_short = any(threshold < MIN_THRESHOLD for threshold in replacement.thresholds.values())
        return None if is_short or not _agrees(replacement) else replacement
    except (AttributeError, KeyError, RuntimeError, TypeError):  # of a module that only looks like a known one
        return None


def _wrapped(function: Any) -> Iterator[Any]:
    """Yield a function, the one that it wraps, and so on."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


@torch.no_grad()
def _agrees(replacement: RotaryByLength) -> bool:
    """Whether a module gives, bit for bit, what the library's gives for one token at a time, and for a prompt."""
    for (layer_type, threshold), (_, num_rows) in zip(replacement.thresholds.items(), replacement.tables, strict=True):
        kind = () if layer_type is None else (layer_type,)
        x = torch.zeros(1, device=getattr(replacement.library, _named(layer_type, "inv_freq")).device)
        for length in sorted({threshold - 1, threshold, threshold + 1, threshold + num_rows - 1}):
            places = torch.tensor([[0, length // 2, length - 1]], device=x.device)
            expected = _parts(_fresh(replacement.library)(x, places, *kind))
            told = _parts(at_length(replacement, length)(x, places, *kind))
            # The last token beside one that is far ahead, and one that is far behind.
            among = torch.tensor([[0, length - 1, 2 * threshold]], device=x.device)
            alone = [each[:, 1] for each in _parts(replacement(x, among, *kind))]
            last = [each[:, 2] for each in expected]
            if not all(map(torch.equal, [*told, *alone], [*expected, *last])):
                return False
    return True


def _parts(output: Any) -> tuple[torch.Tensor, ...]:
    """Return what a rotary embedding returns, [1, T, D] each: cosines and sines, or complex numbers."""
    return output if isinstance(output, tuple) else (output,)


def at_length(module: RotaryByLength, length: int) -> RotaryByLength:
    """Return a module that shares another one's tables, for tokens behind a prompt of so many tokens."""
    other = copy.copy(module)
    other.length = length
    return other


def told_view(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Return a view of a model whose rotary embeddings count every token as one behind a prompt of so many tokens."""
    view = view_of(model)
    for module in view.modules():
        if isinstance(module, RotaryByLength):
            module.length = length
    return view


def library_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view of a model that has transformers' own rotary embeddings, as fresh ones are."""
    view = view_of(model)
    for parent, name in places_of(view, lambda module: isinstance(module, RotaryByLength)):
        setattr(parent, name, _fresh(getattr(parent, name).library))
    return view
