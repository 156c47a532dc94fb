"""Updates of the draft tables with the results of a step or a prompt. Compiled by Numba.

Letters: T nodes in the tree, n of them from the root on, P tokens of a prompt.
"""

from __future__ import annotations

import numpy as np

from lp_runtime.lookahead.drafters.best_first.candidates import collect
from lp_runtime.lookahead.drafters.best_first.estimates import (
    ONE,
    Rates,
    compete,
    count_copies,
    count_features,
    estimate,
    merge,
    score_features,
)
from lp_runtime.lookahead.drafters.best_first.features import Candidates, Nodes
from lp_runtime.lookahead.drafters.best_first.growth import features_in_use
from lp_runtime.lookahead.drafters.best_first.tables import (
    EMPTY_HASH,
    NUM_ORDERS,
    DraftArrays,
    Noise,
    TopKTable,
    alternatives_key,
    append_text,
    extend_hashes,
    position_key,
    store_entry,
    store_successor,
)
from lp_runtime.lookahead.top_k import FROM_PROMPT, FROM_STEP, ORIGIN, STAMP
from lp_runtime.utils.jit import Int, compiled, inlined


@inlined
def store_results(
    drafts: DraftArrays,
    position: Int,
    nodes: Nodes,
    root: Int,
    successors: np.ndarray,
    entries: np.ndarray,
    stamp: Int,
) -> None:
    """Store all nodes' top-k candidates by context, and their successors by position, from the root on.

    If contexts are equal, the first node's candidates are kept. `position` is that of the token after the root;
    `successors` are [T] int64; `entries`, [n, ENTRY] int32, get the step's stamp and origin.
    """
    table = drafts.top_k
    for i in range(len(entries) - 1, -1, -1):
        node = root + i
        entries[i, STAMP], entries[i, ORIGIN] = stamp, FROM_STEP
        store_under_orders(table, nodes.hashes, node, entries, i)
        place = position + nodes.depths[node]
        if successors[node] >= 0:
            store_successor(table, position_key(drafts.text, place, nodes.tokens[node]), successors[node], stamp)
            store_successor(table, position_key(drafts.text, place, -1), successors[node], stamp)


@compiled
def store_prompt(table: TopKTable, tokens: np.ndarray, entries: np.ndarray, hashes: np.ndarray, stamp: Int) -> None:
    """Store the top-k candidates of a prompt's last n tokens by context.

    `tokens` are [P] int64; `entries`, [n, ENTRY] int32, get the prefill's stamp and origin; `hashes`, [1, NUM_HASHES]
    int64, are scratch.
    """
    hashes[:] = 0
    hashes[0, 0] = EMPTY_HASH
    first = len(tokens) - len(entries)
    for place in range(len(tokens)):
        extend_hashes(hashes, 0, tokens[place], hashes, 0)
        if place >= first:
            entries[place - first, STAMP], entries[place - first, ORIGIN] = stamp, FROM_PROMPT
            store_under_orders(table, hashes, 0, entries, place - first)


@inlined
def store_under_orders(table: TopKTable, hashes: np.ndarray, row: Int, entries: np.ndarray, entry: Int) -> None:
    """Store row `entry` of `entries` under a context's last 1 to NUM_ORDERS tokens.

    The context's hashes are row `row` of `hashes`, [m, NUM_HASHES] int64.
    """
    for order in range(1, NUM_ORDERS + 1):
        if hashes[row, order] == 0:
            break
        store_entry(table, hashes[row, order], entries, entry)


@compiled
def accept(
    tokens: np.ndarray, parents: np.ndarray, root: Int, size: Int, successors: np.ndarray, path: np.ndarray
) -> Int:
    """Follow the model's choices from the root; see lp_runtime.lookahead.tree.accept.

    Writes the root and the accepted nodes to `path`, and returns their number. Arrays are [T] int64; `size` is T.
    """
    path[0] = node = root
    num = 1
    for child in range(root + 1, size):  # one pass is enough: children come after their parents
        if parents[child] == node and tokens[child] == successors[node]:
            path[num] = node = child
            num += 1
    return num


@inlined
def count(nodes: Nodes, root: Int, size: Int, path: np.ndarray, fed: np.ndarray, accepted: np.ndarray) -> None:
    """Count a step's nodes below the root by source and depth; see lp_runtime.lookahead.drafter.Counts.

    `path`, [m] int64, has the root and the accepted nodes; `fed` and `accepted` are incremented; `size` is T.
    """
    for node in range(root + 1, size):
        fed[nodes.sources[node], min(nodes.depths[node], fed.shape[1]) - 1] += 1
    for i in range(1, len(path)):
        node = path[i]
        accepted[nodes.sources[node], min(nodes.depths[node], fed.shape[1]) - 1] += 1


@compiled
def advance(
    drafts: DraftArrays,
    noise: Noise,
    rates: Rates,
    nodes: Nodes,
    counts: tuple[np.ndarray, np.ndarray],
    candidates: Candidates,
    position: Int,
    path: np.ndarray,
    committed: np.ndarray,
    successors: np.ndarray,
    entries: np.ndarray,
    stamp: Int,
) -> None:
    """Count a step's nodes, learn from its committed tokens, store its results and extend the text.

    The top-k candidates of the nodes on the path are also stored by position, as alternatives to what was committed.

    Args:
        candidates: scratch.
        counts: (fed, accepted), see `count`.
        position: absolute position of the token after the root.
        path: [m] int64 the root, and the nodes that carry the committed tokens.
        successors: [T] int64 successor of each node; only read from the root on.
        entries: [n, ENTRY] int32 top-k candidates of the nodes from the root on.
    """
    root = path[0]
    count(nodes, root, root + len(entries), path, counts[0], counts[1])
    score_features(rates, ONE, features_in_use(drafts))  # as of the step's start, like the tree's
    for i in range(len(committed)):
        num_rows = collect(drafts, noise, position + i, nodes, root, path[i], candidates)
        count_features(rates, candidates, num_rows, committed[i])
        num_merged = merge(rates, candidates, num_rows)
        compete(rates, candidates, num_merged, path[i] == root, 0)
        count_copies(rates, candidates, num_merged, committed[i])
        estimate(rates, candidates, num_rows)
    store_results(drafts, position, nodes, root, successors, entries, stamp)
    for node in path:
        store_entry(drafts.top_k, alternatives_key(drafts.text, position + nodes.depths[node]), entries, node - root)
    append_text(drafts.text, committed)
