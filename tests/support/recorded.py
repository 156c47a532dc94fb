"""Recorded texts of a real model: its results for all nodes of drafted trees, so that it need not run.

recorded_text.npz holds, for one prompt of each of six kinds of Spec-Bench (odd rows), a trie below the prompt: greedy
SmolLM2-135M-Instruct in float32, chat template, 64 new tokens. The trie has all nodes that the drafter `full` asked
about with trees of 4, 8, 16, 32 and 64 nodes, and lookahead=auto, 2026-11-29 (`benchmarks/drafting.py recorded_text`).
A node that was not recorded has UNKNOWN as its successor, and no top-k candidates.

Letters: n nodes of the trie, K top-k candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lp_runtime.calibration.vocabulary_prior import NO_CANDIDATES
from lp_runtime.config.lookahead import MAX_DEPTH
from lp_runtime.decoder.decoder import Decoder, DrafterSetup
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.drafters.best_first.drafter import BestFirstDrafter
from lp_runtime.lookahead.state import DecodingRules, DecodingState
from lp_runtime.lookahead.top_k import ENTRY, K, VocabularyPrior
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sizing.budget import StepBudget

FILE = Path(__file__).with_name("recorded_text.npz")

DRAFT_TABLES_BYTES = 1 << 22
UNKNOWN = 0  # successor of a branch that was not recorded: an id that no text has


@dataclass(frozen=True)
class RecordedText:
    """One prompt, and the model's results below it.

    Attributes:
        kind: kind of the prompt.
        prompt: token ids.
        children: (node, token) -> node; node 0 is the prompt's end.
        packed: [n, 1 + K / 2] int64 results of each node, packed by a greedy sampler.
        length: tokens of the recorded text.
    """

    kind: str
    prompt: list[int]
    children: dict[tuple[int, int], int]
    packed: np.ndarray
    length: int

    @property
    def text(self) -> list[int]:
        """The recorded tokens after the prompt."""
        node, tokens = 0, []
        while len(tokens) < self.length:
            tokens.append(int(self.packed[node, 0]))
            node = self.children.get((node, tokens[-1]), -1)
        return tokens


def load_texts() -> tuple[list[RecordedText], VocabularyPrior]:
    """Return the recorded texts, and the vocabulary prior of the tokens that they look up."""
    with np.load(FILE) as saved:
        arrays = {name: saved[name] for name in saved.files}
    tokens, num_paired = arrays["prior_tokens"], int(arrays["num_paired"])
    after_token = np.full((int(arrays["vocabulary_size"]), ENTRY), -1, np.int32)
    after_pair = np.full((num_paired, K, ENTRY), -1, np.int32)
    after_token[tokens] = arrays["prior_entries"]
    after_pair[tokens[tokens < num_paired]] = arrays["prior_pairs"]
    texts = []
    for i, kind in enumerate(arrays["kinds"].tolist()):
        children = {(parent, token): node for node, (parent, token) in enumerate(arrays[f"nodes_{i}"].tolist())}
        prompt, length = arrays[f"prompt_{i}"].tolist(), int(arrays[f"length_{i}"])
        texts.append(RecordedText(kind, prompt, children, arrays[f"packed_{i}"], length))
    return texts, VocabularyPrior(after_token, after_pair.reshape(-1, ENTRY))


def greedy_sampler() -> Sampler:
    """Return a sampler that unpacks recorded results."""
    return Sampler(TreeProcessors([], torch.device("cpu")), None, num_top_k=K)


def open_recorded(text: RecordedText, max_nodes: int, vocabulary: VocabularyPrior, budget: StepBudget) -> Decoder:
    """Return the decoder of a recorded text, with the drafter `full` and empty draft tables.

    Args:
        text: the text.
        max_nodes: largest number of nodes of a tree.
        vocabulary: the vocabulary prior.
        budget: sizes the steps.
    """
    drafter = BestFirstDrafter(max_nodes, DraftTables(DRAFT_TABLES_BYTES), vocabulary, None, MAX_DEPTH)
    state = DecodingState(text.prompt, DecodingRules(text.length), drafter, is_alone=True)
    return Decoder(state, DrafterSetup(drafter, budget, None), greedy_sampler())


def decode_recorded(text: RecordedText, decoder: Decoder, times: np.ndarray) -> int:
    """Decode a recorded text to its end, with assumed times of forward passes.

    Args:
        text: the text.
        decoder: what `open_recorded` returned.
        times: [M + 1] nanoseconds of a step, by its number of tokens.

    Returns:
        nanoseconds of all steps except the prefill's.
    """
    state = decoder.state
    step = decoder.propose_prefill()
    decoder.advance(step, decoder.unpack(step, text.packed[:1]))
    node, length, total = 0, len(text.prompt), 0
    while state.finish_reason is None:
        step = decoder.propose()
        for token in state.tokens[length:]:
            node = text.children.get((node, token), -1)
        length = len(state.tokens)
        nanoseconds = int(times[len(step.tree)])
        decoder.advance(step, decoder.unpack(step, _results(text, step.tree, node), [nanoseconds], [0]))
        total += nanoseconds
    assert state.new_tokens == text.text
    return total


def _results(text: RecordedText, tree: TokenTree, node: int) -> np.ndarray:
    """Return [T, 1 + K / 2] recorded results of a tree whose root is a node of the trie."""
    nodes = np.full(len(tree), -1)
    nodes[tree.root] = node
    for i in range(tree.root + 1, len(tree)):
        nodes[i] = text.children.get((int(nodes[tree.parents[i]]), tree.tokens[i]), -1)
    packed = np.full((len(tree), text.packed.shape[1]), NO_CANDIDATES)
    packed[:, 0] = UNKNOWN
    packed[nodes >= 0] = text.packed[nodes[nodes >= 0]]
    return packed
