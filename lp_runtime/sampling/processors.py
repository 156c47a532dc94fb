"""transformers' logits processors for token trees: each node is processed with its own prefix.

Letters: n nodes, V vocabulary, L committed tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType

import numpy as np
import torch
from transformers.generation import logits_process as library

from lp_runtime.errors import ConfigError, RequestError, first_line, unforeseen_as
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sampling.grammar_mask import WARPERS, GrammarMask, apply_masks
from lp_runtime.sampling.request_processors import NewTextPenalty
from lp_runtime.sampling.truncation import temperature_of, truncation_of
from lp_runtime.sampling.types import LogitsProcessor
from lp_runtime.utils.memory import ALLOCATION_ERRORS
from lp_runtime.utils.tensors import tensor_on

# Processors that use the scores only, row by row: one call for all nodes, whatever their prefixes.
CONTEXT_FREE = (
    *WARPERS,
    library.SuppressTokensLogitsProcessor,
    library.InfNanRemoveLogitsProcessor,
    library.LogitNormalization,
)
# Processors that process each row of a batch with its own prefix: one call for all nodes of a depth.
ROW_BY_ROW = (
    library.RepetitionPenaltyLogitsProcessor,
    library.NoRepeatNGramLogitsProcessor,
    library.SequenceBiasLogitsProcessor,
    library.NoBadWordsLogitsProcessor,
    library.MinLengthLogitsProcessor,
    library.MinNewTokensLengthLogitsProcessor,
    library.ForcedBOSTokenLogitsProcessor,
    library.ForcedEOSTokenLogitsProcessor,
    library.ExponentialDecayLengthPenalty,
    library.SuppressTokensAtBeginLogitsProcessor,
    NewTextPenalty,
)
# Processors that need more than one prompt's tokens and scores per call.
UNSUPPORTED = (library.ClassifierFreeGuidanceLogitsProcessor, library.WhisperTimeStampLogitsProcessor)
# Processors that cannot be copied for each row of a batch: this one holds the whole model.
ONE_PROMPT = (library.UnbatchedClassifierFreeGuidanceLogitsProcessor,)
# Processors made from the prompt; a padded batch has several prompts.
OF_THE_PROMPT = (library.EncoderRepetitionPenaltyLogitsProcessor, library.EncoderNoRepeatNGramLogitsProcessor)
# Stateless processors that must be called for one row at a time: one call per node.
PREFIX_ONLY = (*OF_THE_PROMPT, library.WatermarkLogitsProcessor)


def is_ordered(processor: object) -> bool:
    """Return whether a processor must be called once per committed token, in order, as `generate` does.

    That is any processor that may keep state between calls: one that is unknown here and does not declare `prefix_only
    = True` (its scores depend on its two arguments only). Subclasses of known processors count as unknown.
    """
    known = (*CONTEXT_FREE, *ROW_BY_ROW, *PREFIX_ONLY)
    return type(processor) not in known and not getattr(processor, "prefix_only", False)


class TreeProcessors:
    """A list of logits processors, applied in order to the nodes of trees."""

    def __init__(self, processors: Iterable[LogitsProcessor], device: torch.device, reports: bool = False):
        self._processors = [_for_any_rows(each) for each in processors]
        self._reports = reports  # whether a processor's exceptions are the request's fault: RequestErrors
        self.device = device
        self._ids = torch.empty(0, dtype=torch.int64, device=device)  # the committed tokens
        check_processors(self._processors)
        # Whether a processor must be called once per committed token, in order: use `process_next` only.
        self.are_ordered = any(map(is_ordered, self._processors))
        self._needs_prefixes = any(type(each) not in (*CONTEXT_FREE, GrammarMask) for each in self._processors)
        # The processors' effect, if it is limited to temperature, top_k and top_p; else None.
        self.truncation = truncation_of(self._processors)
        self.temperature = temperature_of(self._processors)  # by which they divide the logits

    @property
    def is_empty(self) -> bool:
        return not self._processors

    def __call__(
        self,
        logits: torch.Tensor,
        tree: TokenTree,
        nodes: Sequence[int] | np.ndarray,
        tokens: Sequence[int],
        masks: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Process the logits, [n, V] float32, of some nodes into scores; no processor may be ordered.

        `nodes`, `tokens` and `masks`, for a GrammarMask among the processors, are as in sampler.py.
        """
        if not len(nodes) or not self._processors:
            return logits
        scores = logits.clone()
        groups = self._groups(tree, nodes, tokens) if self._needs_prefixes else []
        no_prefixes = torch.empty((len(nodes), 0), dtype=torch.int64, device=self.device)
        for processor in self._processors:
            if type(processor) in CONTEXT_FREE:
                with self._guarded(processor):
                    scores = processor(no_prefixes, scores)
            elif isinstance(processor, GrammarMask):
                scores = apply_masks(scores, masks)
            elif type(processor) in ROW_BY_ROW:
                with self._guarded(processor):
                    for _, places, prefixes in groups:
                        scores[places] = processor(prefixes, scores[places])
            else:
                for rows, _, prefixes in groups:
                    for row, prefix in zip(rows, prefixes.split(1), strict=True):
                        scores[row : row + 1] = self._call(processor, prefix, scores[row : row + 1].clone())
        return scores

    def without_prefixes(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply only the processors that use no prefix; return [n, V] float32 scores for `logits`, [n, V]."""
        scores = logits.clone() if self._processors else logits
        no_prefixes = torch.empty((len(logits), 0), dtype=torch.int64, device=self.device)
        for processor in self._processors:
            if type(processor) in CONTEXT_FREE:
                with self._guarded(processor):
                    scores = processor(no_prefixes, scores)
        return scores

    def process_next(
        self, logits: torch.Tensor, prefix: Sequence[int], masks: np.ndarray | None = None, is_replay: bool = False
    ) -> torch.Tensor:
        """Process the [1, V] float32 logits after a prefix, as `generate` does; `masks` are [1, words].

        A replay repeats an earlier call, for a prefix whose next token is already known. The constraint's mask is left
        out, because it is no longer known. A request's own processors still see the same scores as before, unless they
        come after warpers.
        """
        scores = logits.clone()
        ids = tensor_on(self.device, prefix)[None]
        for processor in self._processors:
            if not isinstance(processor, GrammarMask):
                scores = self._call(processor, ids, scores)
            elif not is_replay:
                scores = apply_masks(scores, masks)
        return scores

    def _call(self, processor: LogitsProcessor, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with self._guarded(processor):
            processed = processor(prefix, scores)
        name = _name_of(processor)
        if not isinstance(processed, torch.Tensor):
            raise ConfigError(f"{name}: returned {type(processed).__name__}; it must return the scores, a tensor")
        if processed.shape != scores.shape:
            raise ConfigError(
                f"{name}: returned shape {tuple(processed.shape)} for scores of shape {tuple(scores.shape)}; it must"
                " work on one prompt at a time"
            )
        return processed

    def _guarded(self, processor: object) -> AbstractContextManager:
        """Return a context that turns a processor's exceptions into RequestErrors, if `reports` is set."""
        what = f"{type(processor).__name__} failed"
        return unforeseen_as(RequestError, what, passing=ALLOCATION_ERRORS) if self._reports else nullcontext()

    def _groups(
        self, tree: TokenTree, nodes: Sequence[int] | np.ndarray, tokens: Sequence[int]
    ) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """Group nodes by depth: return (rows [b], rows on the device [b], prefixes [b, L + depth]) of each."""
        known = len(self._ids)
        added = tensor_on(self.device, tokens[known:])
        self._ids = torch.cat([self._ids, added])
        by_depth: dict[int, list[int]] = {}
        for row, node in enumerate(nodes):
            by_depth.setdefault(tree.depths[node], []).append(row)
        groups = []
        for rows in by_depth.values():
            tails = tensor_on(self.device, [tree.path(nodes[row]) for row in rows])
            prefixes = torch.cat([self._ids.expand(len(rows), -1), tails], dim=1)
            groups.append((rows, tensor_on(self.device, rows), prefixes))
        return groups


# A user's function that maps a row and its prefix to the tokens that may follow.
Allowed = Callable[[int, torch.Tensor], list[int]]

# Attribute that a processor bases on the padded length; a single row has no padding.
COUNTS_FROM = {
    library.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    library.ForcedEOSTokenLogitsProcessor: "max_length",
    library.ExponentialDecayLengthPenalty: "regulation_start",
    library.SuppressTokensAtBeginLogitsProcessor: "begin_index",
}


def of_row(
    processors: Iterable[LogitsProcessor], row: int, padding: int, pads_min_length: bool
) -> list[LogitsProcessor]:
    """Return a batch's processors adapted to one of its rows alone, whose `padding` tokens are removed.

    Raises ConfigError if a processor only works for a whole batch. With `pads_min_length`, a minimum length includes
    the padding.
    """
    alone = []
    for processor in processors:
        if type(processor) is library.ForcedBOSTokenLogitsProcessor and padding:
            continue  # it fires at a length of one, which no padded row has
        if type(processor) is library.RepetitionPenaltyLogitsProcessor:
            processor = _repetition_penalty_of_row(processor, row, padding)
        elif type(processor) is library.PrefixConstrainedLogitsProcessor:
            allowed = processor._prefix_allowed_tokens_fn  # transformers has no public attribute for it
            processor = library.PrefixConstrainedLogitsProcessor(partial(_allowed_tokens, allowed, row), num_beams=1)
        elif isinstance(processor, OF_THE_PROMPT):
            raise ConfigError(f"{type(processor).__name__}: is for one prompt without padding at a time")
        elif is_ordered(processor):
            processor = _copied(processor)
        elif name := COUNTS_FROM.get(type(processor)):
            processor = _shifted(processor, name, padding)
        elif type(processor) is library.MinLengthLogitsProcessor and pads_min_length:
            processor = _shifted(processor, "min_length", padding)
        alone.append(processor)
    return alone


def _repetition_penalty_of_row(
    processor: library.RepetitionPenaltyLogitsProcessor, row: int, padding: int
) -> LogitsProcessor:
    ignored = processor.prompt_ignore_length  # tokens at the start of each row, padding included
    if isinstance(ignored, torch.Tensor):
        ignored = int(ignored[row])
    length = 0 if ignored is None else max(0, ignored - padding)
    return library.RepetitionPenaltyLogitsProcessor(processor.penalty, length or None)


def _for_any_rows(processor: LogitsProcessor) -> LogitsProcessor:
    """Return a processor of one prompt such that it can process several nodes of the same depth at once."""
    if type(processor) is library.RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, torch.Tensor) and len(ignored) == 1:
            return _repetition_penalty_of_row(processor, row=0, padding=0)
    return processor


def _name_of(processor: LogitsProcessor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def moved(processor: LogitsProcessor, device: torch.device) -> LogitsProcessor:
    """Return a processor whose tensors are on `device`: a copy if any is on another one."""
    attributes = getattr(processor, "__dict__", {})
    tensors = {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}
    if all(value.device == device for value in tensors.values()):
        return processor
    copied = copy.copy(processor)
    for name, value in tensors.items():
        setattr(copied, name, value.to(device))
    return copied


def _copied(processor: LogitsProcessor) -> LogitsProcessor:
    name = _name_of(processor)
    if isinstance(processor, (FunctionType, *ONE_PROMPT)):
        raise ConfigError(
            f"{name}: may keep a state that the rows of a batch would share; give one prompt at a time, or set"
            " prefix_only = True on it if its scores depend on its arguments alone"
        )
    try:
        return copy.deepcopy(processor)
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(f"{name}: cannot be copied for each row of a batch: {first_line(error)}") from error


def _allowed_tokens(allowed: Allowed, row: int, _: int, prefix: torch.Tensor) -> list[int]:
    return allowed(row, prefix)


def _shifted(processor: LogitsProcessor, name: str, padding: int) -> LogitsProcessor:
    shifted = copy.copy(processor)
    setattr(shifted, name, getattr(processor, name) - padding)
    return shifted


def check_processors(processors: Iterable[object]) -> None:
    for processor in processors:
        if not callable(processor):
            raise ConfigError(f"processors: {processor!r} is not a LogitsProcessor")
        if isinstance(processor, UNSUPPORTED):
            raise ConfigError(f"{type(processor).__name__}: must be left out; it needs more than a prompt's own tokens")
