"""transformers' logits processors on a token tree: each node's logits are processed with that node's own prefix.

Letters: n nodes, V vocabulary, L committed tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers.generation import logits_process as library

from lp_runtime.errors import ConfigError, RequestError, unforeseen_as
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.tensors import tensor_on

# What looks at the scores alone, row by row: all nodes in one call, whatever their prefixes.
CONTEXT_FREE = (
    library.TemperatureLogitsWarper,
    library.TopKLogitsWarper,
    library.TopPLogitsWarper,
    library.TopHLogitsWarper,
    library.MinPLogitsWarper,
    library.TypicalLogitsWarper,
    library.EpsilonLogitsWarper,
    library.EtaLogitsWarper,
    library.SuppressTokensLogitsProcessor,
    library.InfNanRemoveLogitsProcessor,
    library.LogitNormalization,
)
# What treats the rows of a batch alike, each with its own prefix: a call for all nodes of a depth. Anything else, a
# user's own above all, may take its batch for the prompts of a user: it gets a call a node.
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
)
# What remembers its earlier calls, one a token: it cannot be asked about tokens that may never be.
STATEFUL = (
    library.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    library.ClassifierFreeGuidanceLogitsProcessor,
    library.SynthIDTextWatermarkLogitsProcessor,
    library.WhisperTimeStampLogitsProcessor,
)
OF_THE_PROMPT = (library.EncoderRepetitionPenaltyLogitsProcessor, library.EncoderNoRepeatNGramLogitsProcessor)


class TreeProcessors:
    """A list of logits processors, applied in order to the nodes of trees.

    Args:
        processors: called as processor(input_ids [b, l] int64, scores [b, V] float32) -> [b, V]; what they return must
            depend on these alone.
        device: the logits' device.
        reports: whether what a processor raises is the request's fault, a RequestError, and not passed on as it is.

    Raises:
        ConfigError: if one of them keeps a state between calls.
    """

    def __init__(self, processors: Iterable, device: torch.device, reports: bool = False):
        self._processors = list(processors)
        self._reports = reports
        self.device = device
        self._ids = torch.empty(0, dtype=torch.int64, device=device)  # the committed tokens
        check_processors(self._processors)
        # By exact type: a subclass may do anything.
        self._needs_prefixes = any(type(processor) not in CONTEXT_FREE for processor in self._processors)

    @property
    def is_empty(self) -> bool:
        """Whether logits come out as they are."""
        return not self._processors

    def __call__(
        self, logits: torch.Tensor, tree: TokenTree, nodes: Sequence[int], tokens: Sequence[int]
    ) -> torch.Tensor:
        """Process the logits of some nodes.

        Args:
            logits: [n, V] float32, kept as it is.
            tree: the step's.
            nodes: [n] indices into the tree, from the root on.
            tokens: [L] committed tokens; the last of them is the root.

        Returns:
            [n, V] scores.
        """
        if not len(nodes) or not self._processors:
            return logits
        scores = logits.clone()
        groups = self._groups(tree, nodes, tokens) if self._needs_prefixes else []
        everything = torch.empty((len(nodes), 0), dtype=torch.int64, device=self.device)
        for processor in self._processors:
            if type(processor) in CONTEXT_FREE:
                scores = processor(everything, scores)
            elif type(processor) in ROW_BY_ROW:
                for _, places, prefixes in groups:
                    scores[places] = processor(prefixes, scores[places])
            else:
                for rows, _, prefixes in groups:
                    for row, prefix in zip(rows, prefixes.split(1), strict=True):
                        with self._guarded(processor):
                            processed = processor(prefix, scores[row : row + 1].clone())
                        if processed.shape != (1, scores.shape[1]):
                            raise ConfigError(
                                f"{type(processor).__name__}: of scores of shape {(1, scores.shape[1])} it made"
                                f" {tuple(processed.shape)}; it must do with one prompt at a time"
                            )
                        scores[row] = processed[0]
        return scores

    def _guarded(self, processor: object) -> AbstractContextManager:
        what = f"{type(processor).__name__} failed"
        return unforeseen_as(RequestError, what) if self._reports else nullcontext()

    def _groups(
        self, tree: TokenTree, nodes: Sequence[int], tokens: Sequence[int]
    ) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """(rows [b], the same on the device, prefixes [b, L + depth]) of the nodes of each depth."""
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


# Where a processor counts from the padded length, which a row alone does not have.
COUNTS_FROM = {
    library.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    library.ForcedEOSTokenLogitsProcessor: "max_length",
    library.ExponentialDecayLengthPenalty: "regulation_start",
    library.SuppressTokensAtBeginLogitsProcessor: "begin_index",
}


def of_row(processors: Iterable, row: int, padding: int, pads_min_length: bool) -> list:
    """The processors of a batch, as they would be for one row of it alone, without padding.

    Args:
        processors: of the batch.
        row: which one.
        padding: tokens of padding that the row has.
        pads_min_length: whether a minimal length counts the padding.

    Raises:
        ConfigError: if one of them cannot be had for a row.
    """
    alone = []
    for processor in processors:
        if type(processor) is library.RepetitionPenaltyLogitsProcessor:
            if isinstance(processor.prompt_ignore_length, torch.Tensor):  # it ignores the padding
                processor = library.RepetitionPenaltyLogitsProcessor(processor.penalty)
        elif type(processor) is library.PrefixConstrainedLogitsProcessor:
            allowed = processor._prefix_allowed_tokens_fn
            processor = library.PrefixConstrainedLogitsProcessor(
                lambda _, prefix, allowed=allowed: allowed(row, prefix), num_beams=1
            )
        elif isinstance(processor, OF_THE_PROMPT):
            raise ConfigError(f"{type(processor).__name__}: is for one prompt without padding at a time")
        elif name := COUNTS_FROM.get(type(processor)):
            processor = _shifted(processor, name, padding)
        elif type(processor) is library.MinLengthLogitsProcessor and pads_min_length:
            processor = _shifted(processor, "min_length", padding)
        alone.append(processor)
    return alone


def _shifted(processor, name: str, padding: int):
    shifted = copy.copy(processor)
    setattr(shifted, name, getattr(processor, name) - padding)
    return shifted


def check_processors(processors: Iterable) -> None:
    """Refuse what cannot process a tree.

    Raises:
        ConfigError: if a processor cannot be called, or keeps a state between calls.
    """
    for processor in processors:
        if not callable(processor):
            raise ConfigError(f"processors: {processor!r} is not a LogitsProcessor")
        if isinstance(processor, STATEFUL):
            raise ConfigError(
                f"{type(processor).__name__}: keeps a state from token to token, so it cannot process a tree"
            )
