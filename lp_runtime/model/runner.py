"""Runs a causal language model on prompts and on shares of token trees.

Letters: T tokens fed, n nodes whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.attention.choice import choose_attention
from lp_runtime.model.attention.mask import CHUNKED, MaskBuilder
from lp_runtime.model.forward.cuda_graph import GraphOptions
from lp_runtime.model.forward.fixed_passes import FixedPasses
from lp_runtime.model.forward.following import LeadingShard
from lp_runtime.model.forward.head import make_passes
from lp_runtime.model.forward.inputs import compile_layout, lay_out
from lp_runtime.model.forward.pass_inputs import Part
from lp_runtime.model.forward.pass_timer import PassTimer
from lp_runtime.model.forward.passes import Passes
from lp_runtime.model.forward.step_inputs import StepInputs, StepLogits
from lp_runtime.model.hf.config import context_length
from lp_runtime.model.hf.rotary_lengths import RotaryLengths
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.slots import CacheSlot, SlotPool
from lp_runtime.model.modules.rotary import replace_rotaries
from lp_runtime.model.support import check_family
from lp_runtime.utils.generators import result_of

CAPACITY_UNIT = 1024  # tokens; with passes of fixed sizes a slot's capacity is a multiple, so that slots fit often


class ModelRunner:
    """An unmodified Hugging Face causal LM and its KV-cache slots.

    Args:
        model: the loaded model, in eval mode, on one device. Its rotary embeddings are replaced, for good, where their
            factors change with the length, as rotary.py says.
        prefill_chunk: tokens of a prompt fed at once.
        strict_tokens: tokens of every forward pass of a tree; a larger tree takes several passes. With it a token's
            logits, keys and values do not depend on what else is fed, bit for bit (attention/strict.py). None for one
            pass of any size.
        own_attention: whether to give the model the attention of attention/tree_attention.py in place of its own, for
            good, as attention/choice.py says.
        leading: has the replica's other shards run every pass, too; None where there are none.

    Attributes:
        num_prefilled_tokens: tokens of prompts and of resumed sequences fed so far.
        fixed_passes: feeds trees in passes of fixed sizes; None if trees are fed in passes of any size.
        supports_batching: whether several sequences can be fed in one pass.
        feeds_chains: whether a share is fed as one path, pending tokens included, from `StepInputs.start` on.
        why_not_captured: why passes are not captured, where that was asked.
        timer: times passes where the device works asynchronously, so that the host is free meanwhile; else None.

    Raises:
        ModelError: if the model cannot be fed a tree, or its attention does not take a tree's mask.
    """

    feeds_chains = False
    why_not_captured: str | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        prefill_chunk: int,
        strict_tokens: int | None = None,
        own_attention: bool = False,
        leading: LeadingShard | None = None,
    ):
        self._check_family(model)
        if model.device.type == "meta":
            raise ModelError(f"{type(model).__name__}: weights that are offloaded cannot be fed a token tree")
        config = model.config.get_text_config()
        attention = choose_attention(model, own_attention and strict_tokens is None)
        compile_layout()
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocabulary_size: int = config.vocab_size
        lengths = replace_rotaries(model, may_refeed=strict_tokens is None and not self.feeds_chains)
        self.context_length = context_length(config, lengths)
        self.masks = self._make_masks(config, attention)
        if strict_tokens is not None and CHUNKED in self.masks.windows_by_kind:
            raise ModelError(f"{config.model_type}: chunked attention cannot be computed with exactness=strict")
        self.strict_tokens, self.prefill_chunk = strict_tokens, prefill_chunk
        self.passes = self._make_passes(model, lengths)
        self.leading = leading
        self.num_prefilled_tokens = 0
        self.slots = SlotPool(self.padded_capacity)
        self.fixed_passes: FixedPasses | None = None
        self.supports_batching = self.masks.is_own and strict_tokens is None
        self.timer = PassTimer(self.device) if self.device.type == "cuda" else None

    def _check_family(self, model: PreTrainedModel) -> None:
        """Refuse a model that this runner cannot feed."""
        check_family(model)

    def _make_masks(self, config: PreTrainedConfig, attention: str) -> MaskBuilder:
        """Return what makes the masks that the model is fed with."""
        return MaskBuilder(config, attention, self.dtype, self.device)

    def _make_passes(self, model: PreTrainedModel, lengths: RotaryLengths) -> Passes:
        """Return what runs passes of any size."""
        return make_passes(model, self.masks, self.strict_tokens, lengths)

    def _make_cache(self, capacity: int) -> TreeCache:
        """Return an empty cache of one sequence with this capacity in tokens."""
        return TreeCache(self.model.config.get_text_config().num_hidden_layers, capacity)

    # Slots.

    def padded_capacity(self, capacity: int) -> int:
        """Capacity in tokens that a slot is allocated with so that `capacity` tokens fit."""
        capacity += self.strict_tokens or 0  # passes are filled up
        return capacity if self.graphs is None else -(-capacity // CAPACITY_UNIT) * CAPACITY_UNIT

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that one token takes in a slot; 0 before anything was fed."""
        return self.slots.bytes_per_token

    def begin(self, slot: CacheSlot, capacity: int, length: int = 0, prompt_length: int = 0) -> None:
        """Empty a slot but for the first `length` tokens, and make `capacity` fit: committed ones and one step's. The
        next sequence has a prompt of `prompt_length` tokens; `prefill`, which feeds a whole one, sees by itself."""
        slot.reset(self._make_cache, self.padded_capacity(capacity), length, prompt_length)

    @property
    def rotary_lengths(self) -> RotaryLengths:
        """The lengths of a text at which the model's rotary factors change."""
        return self.passes.lengths

    @property
    def tree_model(self) -> PreTrainedModel:
        """What trees are fed to: the model, or with `strict_tokens` a view of it."""
        return self.passes.tree_model

    @property
    def graphs(self) -> GraphOptions | None:
        """How trees are fed in passes of fixed sizes; None if they are fed in passes of any size."""
        return None if self.fixed_passes is None else self.fixed_passes.options

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that passes of trees are padded to, ascending; empty if they are not padded."""
        return () if self.fixed_passes is None else self.fixed_passes.sizes

    def enable_graphs(self, capture: bool, compiled: bool = False, refuses_waits: bool = True) -> None:
        """Feed trees in passes of fixed sizes from now on.

        Args:
            capture: whether a CUDA graph of each size is captured and replayed.
            compiled: whether torch.compile compiles the model, once a size.
            refuses_waits: see GraphCapture.
        """
        is_strict = self.strict_tokens is not None
        assert is_strict or self.masks.is_own
        self.feed("begin_fixed", [], GraphOptions(capture, compiled, refuses_waits))
        self.fixed_passes = FixedPasses(self.passes, self.feed, self.leading)
        self.supports_batching |= is_strict

    def feed(self, kind: str, caches: Sequence[TreeCache], *what: object) -> torch.Tensor:
        """Run a pass of any size, on all shards of the replica; return its logits, [n, V] as a rule.

        Args:
            kind: name of a method of Passes.
            caches: where keys and values go, of each sequence.
            what: further arguments of that method.
        """
        if self.leading is not None:
            return self.leading.run(self.passes, kind, caches, what)
        return self.passes.run(kind, caches, what)

    def _feed_tree(self, kind: str, caches: Sequence[TreeCache], *what: object) -> StepLogits:
        """Run a pass of trees, of any size; see `feed`."""
        return self.passes.found(self.feed(kind, caches, *what), self.feed)

    def disable_graphs(self, reason: str) -> None:
        """Feed trees in passes of any size from now on."""
        self.why_not_captured = reason
        if self.fixed_passes is not None:
            self.fixed_passes = None
            self.feed("end_fixed", [])
        self.supports_batching &= self.strict_tokens is None

    # Prompts.

    def prefill(self, slot: CacheSlot, prompt: Sequence[int]) -> torch.Tensor:
        """Feed a prompt behind a slot's committed tokens and commit it; return the last token's logits, [1, V]."""
        slot.prompt_length = len(slot.tokens) + len(prompt)
        return result_of(self.prefill_in_chunks(slot, prompt))

    @torch.inference_mode()
    def prefill_in_chunks(self, slot: CacheSlot, prompt: Sequence[int]) -> Generator[None, None, torch.Tensor]:
        """Feed and commit a prompt, behind a slot's committed tokens, `prefill_chunk` tokens at a time.

        Yields:
            None between chunks; other slots may be fed meanwhile.

        Returns:
            [1, V] float32 logits of the last token.
        """
        for start in range(0, len(prompt), self.prefill_chunk):
            if start:
                yield
            logits = self.feed_prompt(slot, prompt[start : start + self.prefill_chunk])
        return logits

    @torch.inference_mode()
    def feed_prompt(self, slot: CacheSlot, chunk: Sequence[int], rows: Sequence[int] | None = None) -> torch.Tensor:
        """Feed and commit a part of a prompt, behind a slot's committed tokens; return [n, V] float32 logits.

        Args:
            slot: where keys and values go.
            chunk: token ids, at least one.
            rows: [n] places in the chunk whose logits are wanted; the last one alone if None.
        """
        logits = self.feed("chunk", [slot.cache], chunk, rows, slot.told(self.rotary_lengths))
        slot.commit(chunk)
        slot.num_prefilled = len(slot.tokens)
        self.num_prefilled_tokens += len(chunk)
        return logits.float()

    @torch.inference_mode()
    def resume(self, slot: CacheSlot, prompt: Sequence[int], committed: Sequence[int], capacity: int) -> Iterator[None]:
        """Make a slot hold a prompt and all but the last of the tokens committed behind it.

        What the slot holds of them stays; the rest is fed as `prefill_in_chunks` and `forward` would have fed it.

        Args:
            slot: the slot.
            prompt: token ids, at least one.
            committed: token ids, at least one.
            capacity: tokens that must fit.

        Yields:
            None between chunks; what was fed until then stays, whether the rest is fed or not.
        """
        tokens, lengths = [*prompt, *committed[:-1]], self.rotary_lengths
        prompt_length = lengths.prompt_length(len(prompt), len(prompt) + len(committed))
        num_known = slot.num_known(tokens, prompt_length, lengths)
        # Bit for bit, what was prefilled is not what a tree's pass gives, nor what a chunk of another size gives.
        is_alike = self.strict_tokens is None or slot.num_prefilled == len(prompt)
        if not is_alike or num_known < len(prompt):
            if self.strict_tokens is not None:
                known = min(num_known, slot.num_prefilled, len(prompt) - 1)
                num_known = known // self.prefill_chunk * self.prefill_chunk
            self.begin(slot, capacity, num_known, prompt_length)
            yield from self.prefill_in_chunks(slot, prompt[num_known:])
            yield
            num_known = len(prompt)
        self.begin(slot, capacity, num_known, prompt_length)
        rest = tokens[num_known:]
        if self.strict_tokens is None:
            if rest:
                yield from self.prefill_in_chunks(slot, rest)
            return
        for start in range(0, len(rest), self.strict_tokens):
            chain = TokenTree(rest[start : start + self.strict_tokens], max_depth=0)
            self.forward(StepInputs.whole(slot, chain))
            self.num_prefilled_tokens += len(chain)
            yield

    @torch.inference_mode()
    def logits_after_each(self, slot: CacheSlot, tokens: Sequence[int], behind: Sequence[int] = ()) -> StepLogits:
        """Return the logits of n tokens, each as the end of a text of its own that begins with `behind`."""
        slot.cache.clear()
        slot.tokens, slot.prompt_length = [], 0
        if behind:
            self.feed_prompt(slot, behind)
        return StepLogits(self.feed("each_alone", [slot.cache], tokens))

    # Trees.

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, commit: bool = True, any_size: bool = False) -> StepLogits:
        """Feed a share of a tree.

        Args:
            inputs: the share.
            any_size: whether it is fed in a pass of any size, even where it could be fed in one of a fixed size.
            commit: whether the tree's pending tokens are committed; False to feed another share of the tree next.
        """
        slot, tree, nodes, wanted, _ = inputs
        told = self._feed_anew([inputs])
        layout = lay_out(tree, nodes, wanted, slot.cache.length)
        found = None if any_size or told else self._forward_fixed([Part.whole(slot.cache, layout)])
        output = self._feed_tree("share", [slot.cache], layout, told) if found is None else found[0]
        slot.commit(tree.pending, commit)
        return output

    def _feed_anew(self, batch: Sequence[StepInputs]) -> int:
        """Feed all that a slot holds anew, where with its tree's root the text is so long that `generate` does.

        Returns:
            the length that the pass of one tree must be told: see RotaryLengths; 0 if none must be.
        """
        lengths = self.rotary_lengths
        for slot, tree, *_ in batch:
            prompt_length = lengths.prompt_length(slot.prompt_length, len(slot.tokens) + tree.root + 1)
            if lengths.row(slot.prompt_length) != lengths.row(prompt_length):
                tokens = slot.tokens
                slot.reset(self._make_cache, slot.capacity, prompt_length=prompt_length)
                result_of(self.prefill_in_chunks(slot, tokens))
        return max(inputs.slot.told(lengths) for inputs in batch)

    def _forward_fixed(self, parts: Sequence[Part]) -> list[StepLogits] | None:
        """Feed shares of several sequences in passes of fixed sizes; None if they must be fed in passes of any size."""
        passes = self.fixed_passes
        if passes is None or not passes.takes(parts):
            return None
        if passes.prepare(parts) and self.timer is not None:
            self.timer.start()  # again: the time of a capture is no pass's
        return passes.forward(parts)

    @torch.inference_mode()
    def forward_batch(self, batch: Sequence[StepInputs], commit: bool = True) -> list[StepLogits]:
        """Feed a tree of each of several sequences, in one pass where the model `supports_batching`.

        One sequence is fed as by `forward`.

        Args:
            batch: the shares.
            commit: as in `forward`.
        """
        if len(batch) == 1:
            return [self.forward(batch[0], commit)]
        # What a pass of a fixed size has found is gone after the next one.
        if not self.supports_batching or self._feed_anew(batch):
            return [self.forward(inputs, commit).copy() for inputs in batch]
        layouts = [lay_out(tree, nodes, wanted, slot.cache.length) for slot, tree, nodes, wanted, _ in batch]
        caches = [inputs.slot.cache for inputs in batch]
        found = self._forward_fixed([Part.whole(*each) for each in zip(caches, layouts, strict=True)])
        if found is None:
            found = self._feed_tree("shares", caches, layouts).split([len(layout.rows) for layout in layouts])
        for inputs in batch:
            inputs.slot.commit(inputs.tree.pending, commit)
        return found

    def num_passes(self, num_tokens: int) -> int:
        """Return the number of forward passes that feed this many tokens of a tree."""
        return 1 if self.strict_tokens is None else -(-num_tokens // self.strict_tokens)

    def synchronize(self) -> None:
        """Wait until the device has done what it was given; returns at once on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
