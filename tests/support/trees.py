"""Random trees, and plain forward passes to compare tree steps with."""

from __future__ import annotations

import random

import torch

from lp_runtime.lookahead.tree import TokenTree

WINDOW = 8  # shorter than every text below
ALTERNATING = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
}
ARCHITECTURES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma3": ("Gemma3", ALTERNATING),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "gpt2": ("GPT2", {}),
    "gpt_neox": ("GPTNeoX", {}),
}


@torch.inference_mode()
def plain_logits(model, tokens: list[int]) -> torch.Tensor:
    """Return [V] logits after the last token, without a cache."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def path_text(tree: TokenTree, node: int) -> list[int]:
    tokens = []
    while node >= 0:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tokens[::-1]


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(64) for _ in range(count)]


def random_tree(rng: random.Random, num_pending: int) -> TokenTree:
    tree = TokenTree(draw(rng, num_pending), max_depth=9)
    for _ in range(4):
        tree.add_branch(draw(rng, rng.randint(1, 5)))
    for _ in range(6):
        tree.add(rng.randrange(tree.root, len(tree)), rng.randrange(64))
    return tree


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # random models have logits of about 0.1, so an absolute tolerance would hide errors
    scale = expected.std()
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=1e-4)


@torch.inference_mode()
def plain_logits_of_nodes(model, tokens: list[int], tree: TokenTree) -> dict[int, torch.Tensor]:
    """Return [V] logits after each node from the root on, without a cache; `tokens` are the text before the tree."""
    logits: dict[int, torch.Tensor] = {}
    for node in reversed(range(tree.root, len(tree))):
        if node not in logits:  # a leaf: one pass over its text has the logits of its ancestors, too
            rows = model(input_ids=torch.tensor([tokens + path_text(tree, node)]), use_cache=False).logits[0]
            for row in reversed(rows[len(tokens) :]):
                logits[node], node = row, tree.parents[node]
    return logits
