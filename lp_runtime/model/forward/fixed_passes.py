"""Choice of the fixed-size passes that feed shares of trees; cuda_graph.py makes and runs them.

With exactness=strict there is one size and one graph: every pass has the same number of tokens and the same launch,
whichever sequences its tokens belong to (attention/strict.py explains why). A larger tree takes several passes, and
several sequences share a pass.

If a replica spans several GPUs, its shards make and run the same passes in the same order, and every size must fit into
memory: no shard may wait inside a pass that another one could not make.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lp_runtime.model.attention.strict import path_table
from lp_runtime.model.forward.cuda_graph import GraphOptions, PassSet, PassSize
from lp_runtime.model.forward.following import LeadingShard
from lp_runtime.model.forward.inputs import InputLayout
from lp_runtime.model.forward.pass_inputs import Part
from lp_runtime.model.forward.passes import Feed, FeedFixed, MakeFixed, Passes
from lp_runtime.sampling.step_logits import StepLogits

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens
MIN_LARGEST = 256  # tokens: if a pass of this size does not fit into memory, none are captured
MAX_SEQUENCES = 16  # in a pass; a larger batch takes several passes


def pass_sizes(strict_tokens: int | None) -> tuple[int, ...]:
    return SIZES if strict_tokens is None else (strict_tokens,)


def largest_size(strict_tokens: int | None, has_followers: bool) -> int:
    """Return the tokens of the largest pass, if it fits into memory."""
    largest = pass_sizes(strict_tokens)[-1]
    return min(largest, MIN_LARGEST) if has_followers and strict_tokens is None else largest


class PlannedPass(NamedTuple):
    """A pass of a step, and what it feeds."""

    size: PassSize
    parts: list[Part]


class FixedPasses:
    """Passes of fixed sizes for trees, run by `passes` after `BeginFixed`."""

    def __init__(self, passes: Passes, feed: Feed, leading: LeadingShard | None = None):
        assert passes.made is not None
        self._passes = passes
        self._feed = feed
        self._leading = leading
        self._made: PassSet = passes.made
        self._strict_tokens = passes.strict_tokens
        self._all_sizes = pass_sizes(self._strict_tokens)
        # A larger share takes a pass of any size; with exactness=strict, several passes.
        self.max_tokens = largest_size(self._strict_tokens, leading is not None)

    @property
    def options(self) -> GraphOptions:
        return self._made.options

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in self._all_sizes if size <= self.max_tokens)

    def _size(self, num_tokens: int, num_sequences: int) -> PassSize:
        if self._strict_tokens is not None:
            return PassSize(self._strict_tokens, MAX_SEQUENCES)
        size = self._all_sizes[bisect.bisect_left(self._all_sizes, num_tokens)]
        return PassSize(size, 1 if num_sequences == 1 else MAX_SEQUENCES)

    def make(self, num_tokens: int, num_sequences: int) -> bool:
        """Make the pass for this many tokens and sequences, if they fit in one; return whether it was missing."""
        return self._make(self._size(num_tokens, num_sequences))

    def _make(self, size: PassSize) -> bool:
        if size in self._made:
            return False
        if self._leading is None:
            self._passes.run(MakeFixed(size), ())
        else:
            self._leading.attempt(self._passes, MakeFixed(size))
        return True

    def make_all(self, with_batches: bool) -> Iterator[tuple[int, int]]:
        """Make all passes, the largest first, so that the others reuse its memory.

        Yields the capacity of each, (tokens, sequences). Sizes above MIN_LARGEST that do not fit into memory are left
        out, and `max_tokens` is lowered. Passes for several sequences are made if `with_batches`, and if the options
        ask for that.
        """
        with_batches = with_batches and self.options.batches
        for size in reversed(self.sizes):
            for num_sequences in (1, MAX_SEQUENCES) if with_batches and size > 1 else (1,):
                try:
                    self.make(size, num_sequences)
                except torch.OutOfMemoryError:
                    if self._strict_tokens is not None or size <= MIN_LARGEST:
                        raise
                    self.max_tokens = self._all_sizes[self._all_sizes.index(size) - 1]
                    self._made.drop(size)
                    torch.cuda.empty_cache()
                    log.warning("not enough memory for passes of %d tokens; trees of that size will be slower", size)
                    break
                yield size, min(size, num_sequences)

    def plan(self, parts: Sequence[Part]) -> list[PlannedPass] | None:
        """Return the passes that feed one share of each sequence; None if they need passes of any size."""
        if self._strict_tokens is None:
            if len(parts) > 1 and not self.options.batches:
                return None
            if max(len(part.layout.tokens) for part in parts) > self.max_tokens:
                return None
        return [PlannedPass(self._size(_num_tokens(chunk), len(chunk)), chunk) for chunk in self._chunks(parts)]

    def prepare(self, planned: Sequence[PlannedPass]) -> bool:
        """Make the passes that are missing; return whether any was."""
        return any([self._make(each.size) for each in planned])

    def forward(self, parts: Sequence[Part], planned: Sequence[PlannedPass]) -> list[StepLogits]:
        """Run the passes planned for `parts`, after `prepare`; results are valid until the next pass."""
        if len(planned) == 1:
            return self._forward(*planned[0])
        fed = [part for each in planned for part in each.parts]
        outputs = [output.copy() for each in planned for output in self._forward(*each)]
        if self._strict_tokens is None:
            return outputs
        pieces = list(zip(fed, outputs, strict=True))
        return [_joined([each for piece, each in pieces if piece.cache is part.cache]) for part in parts]

    def _forward(self, size: PassSize, parts: Sequence[Part]) -> list[StepLogits]:
        logits = self._feed(FeedFixed(size, [part[1:] for part in parts]), [part.cache for part in parts])
        output = self._passes.step_logits(logits, self._feed, self._made.presampled)
        return [output] if len(parts) == 1 else output.split([len(part.layout.rows) for part in parts])

    def _chunks(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Group parts into passes; with exactness=strict a part may be split between passes."""
        if self._strict_tokens is not None:
            return cut_into_passes(parts, self._strict_tokens, MAX_SEQUENCES)
        if len(parts) == 1:
            return [list(parts)]
        chunks: list[list[Part]] = []
        for part in parts:
            if not chunks or len(chunks[-1]) == MAX_SEQUENCES or _num_tokens([*chunks[-1], part]) > self.max_tokens:
                chunks.append([])
            chunks[-1].append(part)
        return chunks


def _num_tokens(parts: Sequence[Part]) -> int:
    return sum(len(part.layout.tokens) for part in parts)


def _joined(pieces: Sequence[StepLogits]) -> StepLogits:
    if len(pieces) == 1:
        return pieces[0]
    presampled = [each.presampled for each in pieces if each.presampled is not None]
    assert len(presampled) == len(pieces)
    return StepLogits(torch.cat([each.rows for each in pieces]), torch.cat(presampled))


def cut_into_passes(parts: Sequence[Part], size: int, max_sequences: int) -> list[list[Part]]:
    """Return the pieces of different sequences' parts that each strict pass of `size` tokens feeds.

    A token's result does not depend on which pass it is fed in, if its ancestors are fed in that pass or earlier. So
    passes are filled one after the other, across sequences.
    """
    passes: list[list[Part]] = [[]]
    num_free = size
    for part in parts:
        tokens, positions, parents, rows = part.layout
        paths = path_table(part.place, parents, positions)
        start = 0
        while start < len(tokens):
            if num_free == 0 or len(passes[-1]) == max_sequences:
                passes.append([])
                num_free = size
            end = min(len(tokens), start + num_free)
            own, first_row, end_row = slice(start, end), *rows.searchsorted([start, end])
            layout = InputLayout(tokens[own], positions[own], parents[own], rows[first_row:end_row] - start)
            passes[-1].append(Part(part.cache, layout, part.place + start, paths[own]))
            num_free -= end - start
            start = end
    return passes
