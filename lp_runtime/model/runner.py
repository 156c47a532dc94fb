"""A causal language model that is fed token trees.

Letters: T tokens fed, n nodes whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from lp_runtime.errors import ModelError
from lp_runtime.kernels.dispatch import on
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.attention.mask import CHUNKED, MaskBuilder
from lp_runtime.model.attention.strict import NAME as STRICT
from lp_runtime.model.attention.strict_passes import strict_passes
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.cuda_graph import SIZES, CudaGraphRunner
from lp_runtime.model.hf_config import attention_settings, context_length, of_text_model, takes_attention
from lp_runtime.model.inputs import InputLayout, compile_layout, grain, lay_out
from lp_runtime.model.kv_cache.batch import BatchedCache
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.slots import CacheSlot, Fed, SlotPool
from lp_runtime.model.pass_timer import PassTimer
from lp_runtime.utils.tensors import tensor_on

ATTENTIONS = ("sdpa", "eager")
GRANULE = 1024  # tokens; room for so many, or twice or three times as many, where sizes are fixed


class ModelRunner:
    """An unmodified Hugging Face causal LM, its cache, and the two ways to feed it: a prompt, or a share of a tree.

    It is fed one text at a time, or several in one pass (`forward_batch`).

    Args:
        model: the loaded model, in eval mode, on one device.
        prefill_chunk: tokens fed at once during the prefill.
        num_prefilled_tokens: tokens of prompts, and of what is taken up, that it was fed so far.
        strict_tokens: tokens of every forward pass of a tree, a larger tree takes several; with it a token's logits,
            keys and values do not depend on what else is fed, bit for bit (strict.py). None for one pass of any size.
        own_attention: whether to give the model the attention of tree_attention.py in place of sdpa, for good.

    Attributes:
        text: the text that it is fed: see `feeding`.
        texts: those that nobody is decoding.
        prefill_chunk: tokens fed at once during the prefill.
        num_prefilled_tokens: tokens of prompts, and of what is taken up, that it was fed so far.
        fixed_sizes: how trees are fed in passes of fixed sizes; None if they are not.
        supports_batching: whether it can be fed several texts in one pass.
        timer: times passes where the device works on its own, so that the host is free while it does; else None.

    Raises:
        ModelError: if its attention is not one that takes a tree's mask.
    """

    def __init__(self, model, prefill_chunk: int, strict_tokens: int | None = None, own_attention: bool = False):
        config = model.config.get_text_config()
        attention = config._attn_implementation
        if attention not in (*ATTENTIONS, TREE):
            raise ModelError(f"attn_implementation={attention}: must be one of {', '.join(ATTENTIONS)}")
        if own_attention and attention == "sdpa" and strict_tokens is None and takes_attention(model):
            model.set_attn_implementation(of_text_model(model, TREE))
            attention = TREE
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocabulary_size: int = config.vocab_size
        self.context_length = context_length(config)
        compile_layout()
        self.masks = MaskBuilder(config, attention, self.dtype, self.device)
        if strict_tokens is not None and CHUNKED in self.masks.windows_by_kind:
            raise ModelError(f"{config.model_type}: chunked attention cannot be computed with exactness=strict")
        self.strict_tokens = strict_tokens
        self.prefill_chunk = prefill_chunk
        self._num_layers = config.num_hidden_layers
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.num_prefilled_tokens = 0
        self._forget()
        self.fixed_sizes: dict[str, bool] | None = None
        self.supports_batching = self.masks.is_own and strict_tokens is None
        self.timer = PassTimer(self.device) if self.device.type == "cuda" else None

    def fix_sizes(self, capture: bool, compiled: bool = False) -> None:
        """From now on feed trees in passes of fixed sizes: see CudaGraphRunner. Not with strict_tokens."""
        assert self.strict_tokens is None and self.masks.is_own
        self.fixed_sizes = {"capture": capture, "compiled": compiled}
        self._forget()

    def free_sizes(self) -> None:
        """Feed trees in passes of any size again."""
        self.fixed_sizes = None
        self._forget()

    def _forget(self) -> None:
        self.text = CacheSlot()
        self.texts = SlotPool(self.text)

    @contextmanager
    def feeding(self, text: CacheSlot) -> Iterator[None]:
        """Feed this text, for a while."""
        before, self.text = self.text, text
        try:
            yield
        finally:
            self.text = before

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Feed a text of nobody's, for a while."""
        text = self.texts.take(0)
        try:
            with self.feeding(text):
                yield
        finally:
            self.texts.give(text)

    def num_passes(self, num_tokens: int) -> int:
        """Forward passes that it takes to feed this many tokens of a tree."""
        return 1 if self.strict_tokens is None else -(-num_tokens // self.strict_tokens)

    def synchronize(self) -> None:
        """Wait until the device has done what it was given; nothing on CPUs."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def cache_bytes_per_token(self) -> int:
        """What a token of the text takes in the cache; 0 before anything was fed."""
        return 0 if self.text.cache is None else self.text.cache.bytes_per_token

    def begin(self, capacity: int) -> None:
        """Start a request: an empty cache with room for `capacity` tokens (committed ones and one step's)."""
        capacity = self.capacity_for(capacity)
        text = self.text
        if text.cache is None or text.cache.capacity < capacity:
            text.cache = text.fixed = None  # freed before the larger one is made
            text.cache = TreeCache(self._num_layers, capacity)
        text.cache.clear()
        text.tokens = []

    def capacity_for(self, capacity: int) -> int:
        """Tokens that a cache is made for, so that it has room for `capacity`."""
        capacity += self.strict_tokens or 0  # passes are filled up
        if self.fixed_sizes is not None:
            capacity = -(-(capacity + SIZES[-1]) // GRANULE) * GRANULE  # a larger one makes all passes anew
        return capacity

    @torch.inference_mode()
    def resume(self, prompt: Sequence[int], committed: Sequence[int], capacity: int) -> Iterator[None]:
        """Have the cache hold a prompt and all that was committed after it but the last token: what it holds of it
        already stays, the rest is fed as `prefill` and `forward` would have fed it.

        Args:
            prompt, committed: token ids, at least one each.
            capacity: see `begin`.

        Yields:
            between chunks; what was fed until then stays, whether the rest is fed or not.
        """
        tokens = [*prompt, *committed[:-1]]
        text = self.text
        num_known = len(os.path.commonprefix([text.tokens, tokens]))
        # Bit for bit, what was prefilled is not what a tree's pass gives.
        is_alike = self.strict_tokens is None or text.num_prefilled == len(prompt)
        if not is_alike or num_known < len(prompt):
            self.begin(capacity)
            yield from self.prefill_in_chunks(prompt)
            yield
            num_known = len(prompt)
        text.cache.truncate(num_known)
        if text.capacity < (needed := self.capacity_for(capacity)):
            text.fixed = None
            text.cache.grow(needed)
        del text.tokens[num_known:]
        rest = tokens[num_known:]
        if self.strict_tokens is None:
            if rest:
                yield from self.prefill_in_chunks(rest)
            return
        for start in range(0, len(rest), self.strict_tokens):
            chain = TokenTree(rest[start : start + self.strict_tokens], max_depth=0)
            self.forward(chain, list(range(len(chain))), [chain.root])
            self.num_prefilled_tokens += len(chain)
            yield

    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        """Feed and commit a prompt behind what is committed; the last token's logits, [1, V] float32."""
        return result_of(self.prefill_in_chunks(prompt))

    @torch.inference_mode()
    def prefill_in_chunks(self, prompt: Sequence[int]) -> Generator[None, None, torch.Tensor]:
        """The same, a chunk at a time.

        Args:
            prompt: token ids, at least one.

        Yields:
            between chunks; the same text must be fed the next one.
        """
        ids = tensor_on(self.device, prompt)
        text = self.text
        before = text.cache.length
        for start in range(0, len(prompt), self.prefill_chunk):
            if start:
                yield
            chunk = ids[start : start + self.prefill_chunk]
            positions = torch.arange(before + start, before + start + len(chunk), device=self.device)
            # The mask is the model's own causal one: nothing of a prompt is a tree.
            logits = self._forward(chunk, positions, None, 1)
            text.cache.commit(len(chunk))
            text.tokens += prompt[start : start + len(chunk)]
            text.num_prefilled = len(text.tokens)
            self.num_prefilled_tokens += len(chunk)
        return logits

    @torch.inference_mode()
    def alone(self, tokens: Sequence[int]) -> torch.Tensor:
        """[n, V] float32 logits of tokens that each are a text of one token: they see themselves only."""
        self.text.cache.clear()
        self.text.tokens = []
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        positions = torch.zeros_like(ids)
        mask = self.masks.build([-1] * len(tokens), positions, 0)
        return self._forward(ids, positions, mask, torch.arange(len(tokens), device=self.device))

    @torch.inference_mode()
    def forward(
        self, tree: TokenTree, nodes: Sequence[int], wanted: Sequence[int], commit: bool = True
    ) -> torch.Tensor:
        """Feed a share of a tree and commit its pending tokens.

        Args:
            tree: the step's tree; its first pending token follows the last committed one.
            nodes: [T] ascending indices into the tree: all pending tokens, and every fed node's ancestors.
            wanted: [n] ascending indices into the tree, a part of `nodes`.
            commit: False to feed another share of the same tree next.

        Returns:
            [n, V] float32 logits of the wanted nodes.
        """
        text = self.text
        fed = lay_out(tree, nodes, wanted, text.cache.length)
        if self._takes_fixed(len(nodes)):
            logits, text.drawn = text.fixed.forward(fed)
            logits = logits.float()
            _commit(text, tree, commit)
            return logits
        if self.strict_tokens is None:
            ids, positions = tensor_on(self.device, np.stack([fed.tokens, fed.positions]))
            mask = self.masks.build(fed.parents, positions, text.cache.length)
            are_last = len(wanted) > 0 and fed.rows[0] == len(nodes) - len(wanted)
            logits = self._forward(ids, positions, mask, len(wanted) if are_last else tensor_on(self.device, fed.rows))
        else:
            logits = self._strict_forward(fed)[tensor_on(self.device, fed.rows)]
        _commit(text, tree, commit)
        return logits

    @torch.inference_mode()
    def forward_batch(self, parts: Sequence[Fed]) -> list[torch.Tensor]:
        """Feed a tree of each of several texts, in one pass where the model `supports_batching`, and commit their pending
        tokens. Arguments as in `forward`; a part is best a whole tree.

        Returns:
            [n, V] float32 logits for each part.
        """
        if len(parts) == 1 or not self.supports_batching:
            logits = []
            for text, *part in parts:
                with self.feeding(text):
                    logits.append(self.forward(*part))
            return logits
        layouts, keep, masks, num_fed = [], [], [], 0
        for text, tree, nodes, wanted in parts:
            layouts.append(fed := lay_out(tree, nodes, wanted, text.cache.length))
            keep.append(num_fed + fed.rows)
            num_fed += len(fed.tokens)
            masks.append(self.masks.build(fed.parents, tensor_on(self.device, fed.positions), text.cache.length))
        num_filling = -num_fed % grain(num_fed) if self.device.type == "cpu" else 0
        filling = np.zeros(num_filling, np.int64)
        ids = tensor_on(self.device, np.concatenate([*(fed.tokens for fed in layouts), filling]))
        positions = tensor_on(self.device, np.concatenate([*(fed.positions for fed in layouts), filling]))
        keep = tensor_on(self.device, np.concatenate(keep))
        several = BatchedCache(
            [part.text.cache for part in parts], [len(part.nodes) for part in parts], masks, num_filling
        )
        logits = self._forward(ids, positions, several.mask, keep, several)
        for part in parts:
            part.text.drawn = None
            _commit(part.text, part.tree, True)
        return list(logits.split([len(part.wanted) for part in parts]))

    def _takes_fixed(self, num_tokens: int) -> bool:
        """Whether a tree of so many tokens is fed in a pass of a fixed size; there is one then."""
        if self.fixed_sizes is None or num_tokens > SIZES[-1] or self.masks.hides(self.text.cache.length + num_tokens):
            return False
        if self.text.fixed is None:
            self.text.fixed = CudaGraphRunner(self.model, self.text.cache, **self.fixed_sizes)
        return True

    def _strict_forward(self, fed: InputLayout) -> torch.Tensor:
        """[T, V] float32 logits of all tokens, from passes of strict_tokens each, the last one filled up."""
        size, cache = self.strict_tokens, self.text.cache
        before = attention_settings(self.model)
        self.model.set_attn_implementation(of_text_model(self.model, STRICT))
        try:
            logits = []
            for ids, positions, mask in strict_passes(fed, size, cache.length, self.masks, self.device):
                logits.append(self._forward(ids, positions, mask, size))
                cache.keep_writing(size)
        finally:
            self.model.set_attn_implementation(before)
        return torch.cat(logits)[: len(fed.tokens)]

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask,
        keep: torch.Tensor | int,
        several: BatchedCache | None = None,
    ) -> torch.Tensor:
        """[n, V] float32 logits of some tokens, [n], or of so many last ones."""
        self.text.drawn = None
        arguments = {"logits_to_keep": keep} if self.keeps_logits else {}
        if several is not None:
            arguments["together"] = several
        with on(self.device):
            output = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=mask,
                past_key_values=self.text.cache if several is None else several,
                use_cache=True,
                **arguments,
            )
        logits = output.logits[0]
        if not self.keeps_logits:
            logits = logits[-keep:] if isinstance(keep, int) else logits[keep]
        return logits.float()


Result = TypeVar("Result")


def result_of(steps: Generator[object, None, Result]) -> Result:
    """What a generator returns, once it has come to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _commit(text: CacheSlot, tree: TokenTree, commit: bool) -> None:
    text.cache.commit(tree.root + 1 if commit else 0)
    if commit:
        text.tokens += tree.pending
