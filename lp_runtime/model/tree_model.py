"""A causal language model that is fed token trees.

Letters: T tokens fed, n nodes whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.cache import TreeCache
from lp_runtime.model.mask import MaskBuilder

ATTENTIONS = ("sdpa", "eager")


class TreeModel:
    """An unmodified Hugging Face causal LM, its cache, and the two ways to feed it: a prompt, or a share of a tree.

    Args:
        model: the loaded model, in eval mode, on one device.
        prefill_chunk: tokens fed at once during the prefill.

    Raises:
        ModelError: if its attention is not one that takes a tree's mask.
    """

    def __init__(self, model, prefill_chunk: int):
        config = model.config.get_text_config()
        attention = config._attn_implementation
        if attention not in ATTENTIONS:
            raise ModelError(f"attn_implementation={attention}: must be one of {', '.join(ATTENTIONS)}")
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocabulary_size: int = config.vocab_size
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.masks = MaskBuilder(config, attention, self.dtype, self.device)
        self._prefill_chunk = prefill_chunk
        self._num_layers = config.num_hidden_layers
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache: TreeCache | None = None

    def begin(self, capacity: int) -> None:
        """Start a request: an empty cache with room for `capacity` tokens (committed ones and one step's)."""
        if self._cache is None or self._cache.capacity < capacity:
            self._cache = None  # freed before the larger one is made
            self._cache = TreeCache(self._num_layers, capacity)
        self._cache.clear()

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        """Feed and commit the prompt, in chunks. Returns the last token's logits, [1, V] float32."""
        ids = torch.tensor(prompt, dtype=torch.int64, device=self.device)
        for start in range(0, len(prompt), self._prefill_chunk):
            chunk = ids[start : start + self._prefill_chunk]
            positions = torch.arange(start, start + len(chunk), device=self.device)
            # The mask is the model's own causal one: nothing of a prompt is a tree.
            logits = self._forward(chunk, positions, None, torch.tensor([len(chunk) - 1], device=self.device))
            self._cache.commit(len(chunk))
        return logits

    @torch.inference_mode()
    def forward(self, tree: TokenTree, nodes: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        """Feed a share of a tree and commit its pending tokens.

        Args:
            tree: the step's tree; its first pending token follows the last committed one.
            nodes: [T] ascending indices into the tree: all pending tokens, and every fed node's ancestors.
            wanted: [n] ascending indices into the tree, a part of `nodes`.

        Returns:
            [n, V] float32 logits of the wanted nodes.
        """
        num_cached = self._cache.length
        local = {node: i for i, node in enumerate(nodes)}
        parents = [local.get(tree.parents[node], -1) for node in nodes]
        root_position = num_cached + tree.root
        host = torch.tensor(
            [[tree.tokens[node] for node in nodes], [root_position + tree.depths[node] for node in nodes]],
            dtype=torch.int64,
        )
        ids, positions = host.to(self.device)
        mask = self.masks.build(parents, positions, num_cached)
        keep = torch.tensor([local[node] for node in wanted], dtype=torch.int64, device=self.device)
        logits = self._forward(ids, positions, mask, keep)
        self._cache.commit(tree.root + 1)
        return logits

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask, keep: torch.Tensor) -> torch.Tensor:
        arguments = {"logits_to_keep": keep} if self.keeps_logits else {}
        output = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            **arguments,
        )
        logits = output.logits[0] if self.keeps_logits else output.logits[0, keep]
        return logits.float()
