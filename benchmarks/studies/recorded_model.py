"""A model that is queried once per node: its answers are kept in memory and in a file.

Drafters that are compared on one prompt propose many of the same nodes, since all follow the same text. A node's
successor and likeliest tokens depend only on the tokens on the path to it. So an answer to one drafter's tree is valid
for another's: a step feeds the nodes that no drafter has proposed before, with their ancestors, and feeds nothing if
there are none. A drafter therefore sees for every node of its tree, on the text's path or off it, the same answer as
live, except for float32's rounding, which depends on the other tokens of a forward pass.

The text of one token per step is never taken from a recording: it is decoded separately, and each drafter's text is
compared with it.
Letters: T nodes in the tree, n of them from the root on, V vocabulary.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from peers import NUM_SHOWN

from lp_runtime.decoder.decoder import Decoder
from lp_runtime.decoder.step import Step
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sampling.step_logits import StepLogits

SPARE_TOKENS = 1200  # tokens of a slot in addition to the prompt's: the new ones, and the largest tree


class Recording:
    """Answers of a model after the continuations of one prompt, for one way of sampling.

    Args:
        path: file that keeps it; None to keep it in memory only.

    Attributes:
        text: new tokens of one token per step; None until they are decoded.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._nodes: dict[tuple[int, int], int] = {}  # by (parent, token); the first node, 0, is the prompt's end
        self._rows: dict[int, np.ndarray] = {}
        self.text: list[int] | None = None
        if path is not None and path.exists():
            with np.load(path) as kept:
                self._nodes = {
                    (parent, token): place for place, (parent, token) in enumerate(kept["nodes"].tolist(), 1)
                }
                self._rows = dict(zip(kept["known"].tolist(), kept["rows"], strict=True))
                self.text = kept["text"].tolist()

    def child(self, node: int, token: int) -> int:
        """Return the node after another one."""
        return self._nodes.setdefault((node, token), len(self._nodes) + 1)

    def walk(self, tokens: Sequence[int]) -> int:
        """Return the node after the prompt and some tokens."""
        node = 0
        for token in tokens:
            node = self.child(node, token)
        return node

    def row(self, node: int) -> np.ndarray | None:
        """Return the answer after a node; None if the model was not queried yet."""
        return self._rows.get(node)

    def asked(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ([n, 2] parent and token, [n, width] answer) of each node; the first is (-1, -1)."""
        rows = [self._rows[node] for node in range(len(self._nodes) + 1)]
        return np.array([(-1, -1), *self._nodes]), np.array(rows)

    def keep(self, node: int, row: np.ndarray) -> None:
        """Keep the answer after a node."""
        self._rows[node] = row

    def save(self) -> None:
        """Write the file, if the recording has one."""
        if self._path is None or self.text is None:
            return
        nodes = np.array(list(self._nodes), np.int64).reshape(-1, 2)
        part = self._path.with_suffix(".part.npz")
        np.savez(
            part,
            nodes=nodes,
            known=np.array(list(self._rows), np.int64),
            rows=np.array(list(self._rows.values())),
            text=np.array(self.text, np.int64),
        )
        os.replace(part, self._path)


class Answers:
    """The model's answers for a step's nodes.

    Args:
        rows: [n, width + 2 NUM_SHOWN] int64: exchanged integers of each node, its likeliest tokens, their logits' bits.
        width: exchanged integers per node with all top-k candidates.
    """

    def __init__(self, rows: np.ndarray, width: int):
        self._rows, self._width = rows, width

    def values(self, root: int, width: int) -> np.ndarray:
        """Return [T, width] int64 samples of all replicas, -1 before the root."""
        values = np.full((root + len(self._rows), width), -1, np.int64)
        values[root:] = self._rows[:, :width]
        return values

    @property
    def ids(self) -> np.ndarray:
        """[n, NUM_SHOWN] int64 the likeliest tokens."""
        return self._rows[:, self._width : self._width + NUM_SHOWN]

    @property
    def logits(self) -> np.ndarray:
        """[n, NUM_SHOWN] float32 their logits."""
        return np.ascontiguousarray(self._rows[:, -NUM_SHOWN:]).astype(np.int32).view(np.float32)


class RecordedModel:
    """Answers for one prompt.

    Args:
        model: feeds nodes that are not recorded.
        prompt: token ids.
        name: name of the model, part of the files' names.
        folder: gets the files; None to keep everything in memory only.

    Attributes:
        num_fed: nodes that were not recorded and therefore fed, one token per step excluded.
    """

    def __init__(self, model: ModelRunner, prompt: Sequence[int], name: str, folder: Path | None):
        self._model, self._prompt = model, list(prompt)
        self._name, self._folder = name, folder
        self._slot: CacheSlot | None = None
        self._last_logits: torch.Tensor | None = None  # [1, V] after the prompt
        self._shown: tuple[np.ndarray, np.ndarray] | None = None
        self._recordings: dict[str, Recording] = {}
        self.num_fed = 0

    def _file(self, what: str) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.blake2b(repr((self._name, self._prompt, what)).encode(), digest_size=12).hexdigest()
        return self._folder / f"{digest}.npz"

    def recording(self, sampling: str) -> Recording:
        """Return the recording of a way of sampling."""
        if sampling not in self._recordings:
            self._recordings[sampling] = Recording(self._file(sampling))
        return self._recordings[sampling]

    def recordings(self) -> Iterator[Recording]:
        """Yield the recordings of all ways of sampling."""
        return iter(self._recordings.values())

    @torch.inference_mode()
    def shown_of_prompt(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, logits) of the likeliest tokens after each of the prompt's tokens, [n, NUM_SHOWN] each."""
        file = self._file("prompt")
        if self._shown is None and file is not None and file.exists():
            with np.load(file) as kept:
                self._shown = kept["ids"], kept["logits"]
        if self._shown is None:
            logits, ids = self._model.model(torch.tensor([self._prompt])).logits[0].float().topk(NUM_SHOWN)
            self._shown = ids.numpy(), logits.numpy()
            if file is not None:
                np.savez(file, ids=self._shown[0], logits=self._shown[1])
        return self._shown

    def _prefilled(self) -> CacheSlot:
        """Return the prompt's slot; it is filled when first needed."""
        if self._slot is None:
            self._slot = self._model.slots.acquire()
            self._model.begin(self._slot, len(self._prompt) + SPARE_TOKENS)
            self._last_logits = self._model.prefill(self._slot, self._prompt)
        return self._slot

    def prefill(self, decoder: Decoder, step: Step, sampler: Sampler, recording: Recording | None) -> Answers:
        """Answer the prefill's step. Arguments are those of `answer`."""
        row = None if recording is None else recording.row(0)
        if row is None:
            self._prefilled()
            assert self._last_logits is not None
            row = _rows(self._last_logits, step.tree, [0], decoder.state.tokens, sampler)[0]
            if recording is not None:
                recording.keep(0, row)
        return Answers(row[None], sampler.width)

    def answer(self, decoder: Decoder, step: Step, sampler: Sampler, recording: Recording | None) -> Answers:
        """Answer a step's nodes from the root on.

        Args:
            decoder: decoder of the request.
            step: the step.
            sampler: sampler of the request, with all top-k candidates.
            recording: recording of the request's way of sampling; None to query the model for every node.
        """
        tree = step.tree
        if recording is None:
            unknown = list(range(tree.root, len(tree)))
            return Answers(self._ask(decoder, tree, unknown, sampler), sampler.width)
        places = [recording.walk(decoder.state.new_tokens)]
        for node in range(tree.root + 1, len(tree)):
            places.append(recording.child(places[tree.parents[node] - tree.root], tree.tokens[node]))
        unknown = [tree.root + i for i, place in enumerate(places) if recording.row(place) is None]
        if unknown:
            rows = self._ask(decoder, tree, unknown, sampler)
            self.num_fed += len(unknown)
            for node, row in zip(unknown, rows, strict=True):
                recording.keep(places[node - tree.root], row)
        return Answers(np.array([recording.row(place) for place in places]), sampler.width)

    def _ask(self, decoder: Decoder, tree: TokenTree, nodes: list[int], sampler: Sampler) -> np.ndarray:
        """Feed nodes with their ancestors, after the part of the text in the slot; return their rows."""
        slot, tokens = self._prefilled(), decoder.state.tokens
        num_cached = len(os.path.commonprefix([slot.tokens, tokens[:-1]]))
        slot.cache.truncate(num_cached)
        del slot.tokens[num_cached:]
        fed = TokenTree(tokens[num_cached:], max_depth=len(tree))
        needed: set[int] = set()
        for node in nodes:
            while node > tree.root and node not in needed:
                needed.add(node)
                node = tree.parents[node]
        index = {tree.root: fed.root}
        for node in sorted(needed):
            added = fed.add(index[tree.parents[node]], tree.tokens[node])
            assert added is not None
            index[node] = added
        wanted = np.array([index[node] for node in nodes])
        logits = self._model.forward(StepInputs(slot, fed, np.arange(len(fed)), wanted))
        return _rows(logits.logits, tree, nodes, tokens, sampler)


def _rows(
    logits: torch.Tensor, tree: TokenTree, nodes: Sequence[int], tokens: Sequence[int], sampler: Sampler
) -> np.ndarray:
    """Return the rows of `Answers` for some nodes of a tree, from their logits, [n, V] float32."""
    packed, _ = sampler.sample(StepLogits(logits), tree, nodes, tokens)
    values, ids = logits.float().topk(NUM_SHOWN)
    bits = values.contiguous().view(torch.int32).long()
    return torch.cat([packed, ids, bits], dim=1).numpy()
