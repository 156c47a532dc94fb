"""Lookahead decoding (arXiv 2402.02057) for one request on one device, in numpy.

Each step runs one forward pass over the text and two branches below its last token, under one mask:

    lookahead branch       W x (N-1) Jacobi guesses; each column yields an n-gram
    verification branch    up to G n-grams of the pool that begin with the last token

The engine does the same (`lookahead.drafter=paper`), with a KV cache, and with both branches merged into one token tree
that several replicas share. A test compares tokens and steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

# (token ids [T], positions [T], mask [T, T]: row i sees column j) -> the model's next token after each token, [T]
Forward = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class NGramPool:
    """N-grams by their first token, the most recent last, at most G for each first token."""

    def __init__(self, N: int, G: int):
        self.N, self.G = N, G
        self.by_first: dict[int, list[tuple[int, ...]]] = {}

    def insert(self, ngram: Sequence[int]) -> None:
        rest = tuple(ngram[1:])
        others = [each for each in self.by_first.get(ngram[0], []) if each != rest]
        self.by_first[ngram[0]] = [*others, rest][-self.G :]

    def insert_text(self, tokens: Sequence[int], num_new: int) -> None:
        """Insert the n-grams of a text that end within its last `num_new` tokens."""
        for end in range(max(self.N, len(tokens) - num_new + 1), len(tokens) + 1):
            self.insert(tokens[end - self.N : end])

    def guesses(self, token: int) -> list[tuple[int, ...]]:  # the most recent first
        return self.by_first.get(token, [])[::-1]


class Lookahead:
    """Greedy lookahead decoding of one prompt; W, N and G as in the paper."""

    def __init__(self, forward: Forward, prompt: Sequence[int], W: int, N: int, G: int, seed: int = 0):
        self.forward, self.prompt, self.W, self.N = forward, list(prompt), W, N
        self.random = random.Random(seed)
        self.pool = NGramPool(N, G)
        self.pool.insert_text(prompt, num_new=len(prompt))
        self.window: list[list[int]] = [self.refill([])]  # levels, the oldest first; N - 1 once it is full
        self.tokens, self.num_steps = list(prompt), 0

    def generate(self, max_new_tokens: int) -> list[int]:
        self.commit(self.next_tokens(self.prompt, range(-1, len(self.prompt) - 1))[-1:])  # the prefill
        while (num_left := max_new_tokens - len(self.tokens) + len(self.prompt)) > 0:
            self.step(num_left)
        return self.tokens[len(self.prompt) :]

    def step(self, num_left: int) -> None:
        """Feed both branches once; commit the tokens that the verification branch confirms, and one more."""
        root, max_depth = len(self.tokens) - 1, num_left - 1  # nothing deeper could be committed
        tokens, parents = list(self.tokens), list(range(-1, root))

        def add(parent: int | None, token: int, depth: int) -> int | None:
            if parent is not None and depth <= max_depth:
                tokens.append(token)
                parents.append(parent)
                return len(tokens) - 1

        # Lookahead branch. Level 0 is a chain from the last token; level r of a column follows its level r - 1.
        levels: list[list[int | None]] = [[root]]
        for column in range(1, self.W):
            levels[0].append(add(levels[0][-1], self.window[0][column], column))
        for r, level in enumerate(self.window[1:], start=1):
            levels.append([add(levels[-1][column], level[column], column + r) for column in range(self.W)])
        # Verification branch: each guess is a separate chain below the last token.
        guesses = [[root] for _ in self.pool.guesses(tokens[root])]
        for nodes, guess in zip(guesses, self.pool.guesses(tokens[root]), strict=True):
            for depth, token in enumerate(guess[:max_depth], start=1):
                nodes.append(add(nodes[-1], token, depth))

        successors = self.next_tokens(tokens, parents)
        # Greedy verification (algorithm 2): the longest guess whose tokens are the model's own choices.
        confirmed = [root]
        for nodes in guesses:
            right = [tokens[node] == successors[parent] for parent, node in pairwise(nodes)] + [False]
            confirmed = max(confirmed, nodes[: 1 + right.index(False)], key=len)
        if len(self.window) == self.N - 1:
            for column, last in enumerate(levels[-1]):
                if last is not None:
                    self.pool.insert([*(tokens[level[column]] for level in levels), int(successors[last])])
        self.commit(successors[confirmed])
        self.slide([None if node is None else int(successors[node]) for node in levels[-1]], len(confirmed))

    def slide(self, new_level: list[int | None], num_committed: int) -> None:
        """Append a level to the window, drop the oldest of a full one, and move on by the committed tokens."""
        levels = [*self.window, new_level]
        if len(levels) == self.N:
            levels, num_committed = levels[1:], num_committed - 1  # the next level is one position later already
        self.window = [self.refill(level[num_committed:]) for level in levels]

    def refill(self, level: Sequence[int | None]) -> list[int]:
        """Return a level of W tokens; fill empty places from the pool, or with a random prompt token."""
        filled: list[int] = []
        for token in [*level, *[None] * (self.W - len(level))]:
            if token is None:
                known = self.pool.guesses(filled[-1]) if filled else []
                token = known[0][0] if known else self.prompt[self.random.randrange(len(self.prompt))]
            filled.append(token)
        return filled

    def commit(self, tokens: Sequence[int] | np.ndarray) -> None:
        self.tokens += [int(token) for token in tokens]
        self.pool.insert_text(self.tokens, len(tokens))
        self.num_steps += 1

    def next_tokens(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """Run a forward pass of tokens that each see their ancestors; return the token after each."""
        mask, positions = np.eye(len(tokens), dtype=bool), np.zeros(len(tokens), np.int64)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
                positions[node] = positions[parent] + 1
        return self.forward(np.array(tokens), positions, mask)


def make_forward(model) -> Forward:
    """Return a forward pass of a transformers model, without a cache."""
    import torch

    @torch.inference_mode()
    def forward(tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> np.ndarray:
        ids, places = torch.from_numpy(tokens)[None], torch.from_numpy(positions)[None]
        bias = torch.where(torch.from_numpy(mask), 0.0, torch.finfo(torch.float32).min)[None, None]
        return model(input_ids=ids, position_ids=places, attention_mask=bias).logits[0].argmax(-1).numpy()

    return forward


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lp_runtime.config.settings import DEMO_MODEL

    tokenizer, model = AutoTokenizer.from_pretrained(DEMO_MODEL), AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    lookahead = Lookahead(make_forward(model.float()), tokenizer.encode("def fibonacci(n):\n"), W=7, N=5, G=7)
    print(tokenizer.decode(lookahead.generate(64)), f"\n64 tokens in {lookahead.num_steps} steps")
