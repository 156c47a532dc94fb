"""Split of several sequences' shares into passes of a fixed number of tokens, for exactness=strict.

A token's result does not depend on which pass it is fed in, if its ancestors are fed in that pass or earlier. So passes
are filled one after the other, across sequences.

Letters: T tokens of a share, B tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from lp_runtime.model.attention.strict import path_table
from lp_runtime.model.forward.inputs import InputLayout
from lp_runtime.model.forward.pass_inputs import Part


def cut_into_passes(parts: Sequence[Part], size: int, max_sequences: int) -> list[list[Part]]:
    """Return the pieces of the parts that each pass feeds, in the parts' order.

    The parts are shares of different sequences, at least one. A pass has `size` tokens and up to `max_sequences`
    pieces.
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
