"""Rotary embeddings whose factors depend on the text's length, chosen per token instead of per pass.

transformers' module ("dynamic" and "longrope") chooses the factors of all tokens of a pass by the largest position in
it. That is wrong here: a tree's pass holds positions beyond the committed text, a long prompt comes in chunks, and a
batch has several texts. So RotaryByLength replaces it. It looks up the factors of each token by L(p)
(rotary_lengths.py), in a table filled by transformers' own functions, and leaves the rest to transformers' code. It
uses only tensor operations, so that a pass can be captured. No class is patched: instances are replaced, in a model
that we own or in a view.

Letters: T tokens fed, D numbers of a rotated head, n rows of a table.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lp_runtime.model.hf.config import CACHE_DROPPING_TYPES
from lp_runtime.model.hf.rotary_lengths import UNCHANGING, RotaryLengths
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.modules.packed_linear import is_hooked, places_of

log = logging.getLogger(__name__)

Rotary = Any  # an nn.Module; not typed as one, because torch declares its attributes as Tensor | Module

DYNAMIC, LONG = "dynamic", "longrope"
REFEEDING_TYPES = ("phi3",)  # of CACHE_DROPPING_TYPES; the others drop the cache and feed only the last token
REFEEDS_SINCE = (5, 20)  # version of transformers


class RotaryByLength(nn.Module):
    """Replacement of a rotary embedding, `library`, whose factors change with the text's length."""

    # [n, D / 2] float32: row i is for a text of threshold + i tokens, the last row also for longer ones.
    factors: torch.Tensor

    def __init__(self, library: Rotary):
        super().__init__()
        self.library, self.prompt_length = _fresh(library), 0  # 0 if each token uses its own length
        self.threshold, table = _table(library)
        self.register_buffer("factors", table, persistent=False)
        self._compute: Callable[..., Any] = inspect.unwrap(type(library).forward)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """Return what transformers' module does, with the factors of each token's length; positions: [..., T]."""
        lengths = (position_ids + 1).clamp_min(self.prompt_length)
        rows = (lengths - self.threshold).clamp(0, len(self.factors) - 1)
        self.library.inv_freq = self.factors[rows]
        return self._compute(self.library, x, position_ids)


def _has_changing_factors(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose factors change with the length, for any layer type."""
    rope_type = getattr(module, "rope_type", None)
    types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    # Like transformers, count any type with "dynamic" in its name.
    return any(isinstance(each, str) and (DYNAMIC in each or each == LONG) for each in types)


def _fresh(library: Rotary) -> Rotary:
    """Return a copy of a rotary embedding, reset to its state before first use."""
    module: Rotary = view_of(library)
    module.inv_freq = library.original_inv_freq.to(library.inv_freq.device, copy=True)
    if DYNAMIC in library.rope_type:
        module.max_seq_len_cached = module.original_max_seq_len
    return module


def _table(library: Rotary) -> tuple[int, torch.Tensor]:
    """Return (threshold, factors [n, D / 2] float32): row i is for a text of threshold + i tokens.

    A "dynamic" table ends at the context length that vLLM allows such a model.
    """
    config, original, device = library.config, library.original_inv_freq, library.inv_freq.device
    function = ROPE_INIT_FUNCTIONS[library.rope_type]
    if library.rope_type == LONG:
        threshold = config.rope_parameters["original_max_position_embeddings"]
        long, _ = function(config, device, seq_len=threshold + 1)
        return threshold, torch.stack([original, long.to(library.inv_freq.dtype)]).float()
    threshold = config.max_position_embeddings
    longest = int(threshold * max(1.0, config.rope_parameters["factor"]))
    # One length at a time, like transformers: torch's vectorized power function differs from the scalar one in the
    # last bits.
    lengths = torch.arange(threshold + 1, longest + 1, device=device)
    return threshold, torch.stack([original.float(), *(function(config, device, seq_len=each)[0] for each in lengths)])


def replace_rotaries(model: PreTrainedModel, may_refeed: bool = True) -> RotaryLengths:
    """Replace all length-dependent rotary embeddings of a model by RotaryByLength, or none.

    Returns the lengths at which factors change; UNCHANGING if nothing was replaced. In that case use the model only for
    lengths at which its factors do not change. With `may_refeed`, the caller can re-feed a whole text at the length at
    which `generate` does.
    """
    _put_back(model)
    places = places_of(model, _has_changing_factors)
    if not places:
        return UNCHANGING
    libraries = [getattr(*place) for place in places]
    kind, is_long = model.config.get_text_config().model_type, any(each.rope_type == LONG for each in libraries)
    drops_cache = is_long and kind in CACHE_DROPPING_TYPES
    can_refeed = may_refeed and kind in REFEEDING_TYPES and _version() >= REFEEDS_SINCE
    made = {id(each): _replacement(each) for each in libraries if can_refeed or not drops_cache}
    tables = {(each.threshold, len(each.factors)) for each in made.values() if each is not None}
    if len(tables) != 1 or None in made.values():
        log.warning("%s: its context ends where its rotary factors change", type(model).__name__)
        return UNCHANGING
    for parent, name in places:
        setattr(parent, name, made[id(getattr(parent, name))])
    return RotaryLengths(*tables.pop(), drops_cache)


def _version() -> tuple[int, ...]:
    return tuple(map(int, transformers.__version__.split(".")[:2]))


def _replacement(library: Rotary) -> RotaryByLength | None:
    """Return the replacement of a rotary embedding; None if its code does not allow one or does more."""
    try:
        replacement = None if is_hooked(library) else RotaryByLength(library)
        return replacement if replacement is not None and _agrees(replacement) else None
    except (AttributeError, KeyError, RuntimeError, TypeError):  # an unknown module, or one with factors per layer type
        return None


@torch.no_grad()
def _agrees(replacement: RotaryByLength) -> bool:
    """Whether a replacement equals transformers' module bit for bit, for single tokens and for a prompt."""
    threshold, library = replacement.threshold, replacement.library
    x = torch.zeros(1, device=library.inv_freq.device)
    for length in sorted({threshold - 1, threshold, threshold + 1, threshold + len(replacement.factors) - 1}):
        places = torch.tensor([[0, length // 2, length - 1]], device=x.device)
        expected = _parts(_fresh(library)(x, places))
        after_prompt = copy.copy(replacement)
        after_prompt.prompt_length = length
        # The last token in one pass with a much earlier and a much later one: neither may change its factors.
        among = torch.tensor([[0, length - 1, 2 * threshold]], device=x.device)
        ours = [*_parts(after_prompt(x, places)), *(each[:, 1] for each in _parts(replacement(x, among)))]
        if not all(map(torch.equal, ours, [*expected, *(each[:, 2] for each in expected)])):
            return False
    return True


def _parts(output: Any) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def view_for_length(model: PreTrainedModel, prompt_length: int) -> PreTrainedModel:
    """Return a view of a model for passes that feed tokens of a prompt of `prompt_length` tokens."""
    view = view_of(model)
    for module in view.modules():
        if isinstance(module, RotaryByLength):
            module.prompt_length = prompt_length
    return view


def library_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view of a model with transformers' own rotary embeddings, reset to their initial state."""
    view = view_of(model)
    _put_back(view)
    return view


def _put_back(model: PreTrainedModel) -> None:
    """Undo `replace_rotaries`: restore transformers' rotary embeddings."""
    for parent, name in places_of(model, lambda module: isinstance(module, RotaryByLength)):
        setattr(parent, name, _fresh(getattr(parent, name).library))
