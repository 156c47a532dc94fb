"""RACER (arXiv 2604.14885) as a drafter of this runtime.

Follows the rules of its published code (github hkr04/RACER). Two sources share a tree of `capacity` nodes, the root
included. Section and algorithm numbers are the paper's.

- Retrieval tree (3.2, E.2 to E.4): an Aho-Corasick automaton over all 10-grams of the text, with at most 10,000 states;
  the least recently used leaf is dropped first. Of the states that end with the last token and match 2 tokens or more,
  the most frequent continuations enter the tree. Failure links are made once, after the prompt; states that are met
  later, or were used, fall back to the root.
- Logits tree (3.1, equation 3, algorithm 1): a table of every token's last top-8 candidates, which the prompt's
  positions enter, too. It fills the rest of the tree breadth first: the root has 8 children, a node's first child has
  half of the node's breadth, each further child half of the one before it, at least 1. An existing node costs nothing.

In the published code, memory addresses decide the order of equally frequent states. Here the state met first wins.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np
from peers import Peer

from lp_runtime.lookahead.drafter import VerificationResult
from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.tree import TokenTree

NGRAM = 10  # tokens per n-gram of the automaton; the published default
MAX_STATES = 10_000  # of the automaton; the published default
BREADTH = 8  # top-k candidates of a token; the published default
MIN_MATCH = 2  # minimum tokens of a matching state to continue it


class State:
    """State of an automaton: the n-gram on the path from the root.

    Attributes:
        children: states one token longer.
        fail: state of the longest suffix; the root if that is unknown.
        parent: state one token shorter; None for the root and for dropped states.
        token: the last token; -1 for the root.
        frequency: number of insertions of the n-gram.
        depth: tokens of the n-gram.
    """

    def __init__(self) -> None:
        self.children: dict[int, State] = {}
        self.fail: State = self
        self.parent: State | None = None
        self.token = -1
        self.frequency = 0
        self.depth = 0


class Trie:
    """States by their n-grams; the least recently used one is dropped first.

    Args:
        max_states: limit of states, the root included.
    """

    def __init__(self, max_states: int):
        self._max_states = max_states
        self._recency: OrderedDict[State, None] = OrderedDict()  # least recently used first
        self.root = State()
        self._recency[self.root] = None

    def __len__(self) -> int:
        return len(self._recency)

    def touch(self, state: State) -> None:
        """Make a state the most recently used."""
        self._recency.move_to_end(state)

    def child(self, state: State, token: int) -> State:
        """Return the state one token longer; if it is missing, make it, replacing the oldest of a full trie."""
        child = state.children.get(token)
        if child is None:
            child = self._new_state()
            child.parent, child.token, child.depth, child.fail = state, token, state.depth + 1, self.root
            state.children[token] = child
        return child

    def _new_state(self) -> State:
        if len(self) < self._max_states:
            state = State()
        else:  # like the published code, reuse a state even if others still point to it
            state, _ = self._recency.popitem(last=False)
            if state.parent is not None and state.parent.children.get(state.token) is state:
                del state.parent.children[state.token]
            state.children, state.frequency = {}, 0
        self._recency[state] = None
        return state

    def insert(self, ngram: Sequence[int], frequency: int = 1) -> None:
        """Insert an n-gram; increase the frequency of it and its prefixes."""
        state = self.root
        state.frequency += frequency
        for token in ngram:
            self.touch(state)
            state = self.child(state, token)
            state.frequency += frequency
        self.touch(state)


class Automaton(Trie):
    """Aho-Corasick automaton, with the state that matches the text's end.

    Args:
        max_states: limit of states, the root included.

    Attributes:
        current: the state after the text so far.
    """

    def __init__(self, max_states: int):
        super().__init__(max_states)
        self.current = self.root

    def link(self) -> None:
        """Make all failure links (E.2, algorithm 2)."""
        queue = deque(self.root.children.values())
        for state in queue:
            state.fail = self.root
        while queue:
            state = queue.popleft()
            for token, child in state.children.items():
                other = state.fail
                while other is not self.root and token not in other.children:
                    other = other.fail
                child.fail = other.children.get(token, self.root)
                queue.append(child)

    def _touch_path(self, state: State) -> None:
        """Make a state and its ancestors the most recently used; reset their failure links to the root."""
        step: State | None = state
        while step is not None:
            step.fail = self.root
            self.touch(step)
            step = step.parent

    def follow(self, tokens: Iterable[int]) -> None:
        """Advance the current state by tokens (E.3, algorithm 3)."""
        state = self.current
        for token in tokens:
            self.touch(state)
            if token not in state.children:
                while state is not self.root and token not in state.children:
                    state = state.fail
                self._touch_path(state)
            state = state.children.get(token, state)
        self.touch(state)
        self.current = state

    def borders(self, token: int) -> list[State]:
        """Return the states that match the text followed by `token`, the longest first.

        Only states of MIN_MATCH tokens or more are returned. The longest match of any length becomes the current state;
        without a match the current state does not change.
        """
        states: list[State] = []
        state = self.current
        while True:
            child = state.children.get(token)
            if child is not None:
                states.append(child)
            if state is self.root:
                break
            state = state.fail
        if states:
            self.current = states[0]
        borders = [state for state in states if state.depth >= MIN_MATCH]
        for border in borders:
            self._touch_path(border)
        return borders


def most_frequent(borders: Sequence[State], num: int) -> list[tuple[State, State]]:
    """Return (state, its border) of the most frequent states at and below some borders (3.2, E.4).

    Visits level after level below the borders, until no state of a level is frequent enough.
    """
    chosen: list[tuple[int, int, State, State]] = []  # (-frequency, depth, state, border); the last is dropped first
    level = [(border, border) for border in borders]
    while level:
        was_updated = False
        for state, border in level:
            if len(chosen) < num or state.frequency > -chosen[-1][0]:
                was_updated = True
                chosen.append((-state.frequency, state.depth, state, border))
                chosen.sort(key=lambda each: each[:2])
                del chosen[num:]
        if not was_updated:
            break
        level = [(child, border) for state, border in level for child in state.children.values()]
    return [(state, border) for _, _, state, border in chosen]


class RacerDrafter(Peer):
    """Drafter of RACER.

    Args:
        capacity: nodes of a tree, the root included.
        breadth: candidates of a token.
    """

    def __init__(self, capacity: int = 64, breadth: int = BREADTH):
        super().__init__("tree")
        self.max_nodes = capacity
        self.max_committed = capacity
        self._breadth = breadth
        self._table: dict[int, list[int]] = {}
        self._unseen_row = [0] * breadth
        self.automaton = Automaton(MAX_STATES)

    def begin(self, tokens: Sequence[int]) -> None:
        for end in range(NGRAM, len(tokens) + 1):
            self.automaton.insert(tokens[end - NGRAM : end])
        self.automaton.link()

    def note_prompt(self, tokens: Sequence[int], ids: np.ndarray, logits: np.ndarray) -> None:
        self._note(tokens, ids)

    def note_nodes(self, tree: TokenTree, ids: np.ndarray, logits: np.ndarray) -> None:
        self._note(tree.tokens[tree.root :], ids)

    def _note(self, tokens: Sequence[int], ids: np.ndarray) -> None:
        for token, row in zip(tokens, ids.tolist(), strict=True):
            self._table[token] = row[: self._breadth]

    def propose(
        self,
        tokens: Sequence[int],
        num_cached: int,
        max_depth: int,
        tree_size_hint: int | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        merged = self.merge(tokens[-1])
        tree = TokenTree(tokens[num_cached:], max_depth)
        queue = deque([(merged.root.children[tokens[-1]], tree.root)])
        while queue:
            state, node = queue.popleft()
            for token, child in state.children.items():
                place = tree.add(node, token)
                if place is not None:
                    queue.append((child, place))
        return tree

    def merge(self, token: int) -> Trie:
        """Return the tree below a token as a trie: the retrieval tree, filled up with the logits tree."""
        merged = Trie(self.max_nodes + 1)  # one more for a root above the token
        chosen = most_frequent(self.automaton.borders(token), self.max_nodes)
        kept = {(id(state), id(border)) for state, border in chosen}
        for state, border in chosen:
            if not any((id(child), id(border)) in kept for child in state.children.values()):
                merged.insert([token, *_path(state, border)])
        self._fill(merged, merged.child(merged.root, token))
        return merged

    def _fill(self, merged: Trie, start: State) -> None:
        """Add the logits tree below a state (3.1) until there are `capacity` nodes."""
        queue = deque([(start, self._breadth, 0)])
        scheduled = {start}
        while queue:
            state, breadth, depth = queue.popleft()
            next_breadth = breadth if depth == 0 else breadth >> 1
            for token in self._table.get(state.token, self._unseen_row)[:breadth]:
                if token in state.children or len(merged) <= self.max_nodes:
                    child = merged.child(state, token)
                    if child not in scheduled:
                        scheduled.add(child)
                        queue.append((child, max(1, next_breadth), depth + 1))
                next_breadth >>= 1

    def advance(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        result: VerificationResult,
        committed: Sequence[int],
        path: Sequence[int],
    ) -> None:
        known = tokens[:-1]  # the last token is the next tree's root
        for end in range(len(known), len(known) - len(committed), -1):
            if end >= NGRAM:
                self.automaton.insert(known[end - NGRAM : end])
        if len(committed) > 1:
            self.automaton.follow(known[-(len(committed) - 1) :])
        self.count(tree, path, [range(tree.root + 1, len(tree))])


def _path(state: State, border: State) -> list[int]:
    """Return the tokens on the path from a border (excluded) down to a state below it (included)."""
    tokens = []
    while state is not border:
        tokens.append(state.token)
        assert state.parent is not None
        state = state.parent
    return tokens[::-1]
