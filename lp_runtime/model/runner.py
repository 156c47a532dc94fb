"""Model runner: feeds prompts and shares of token trees to a causal LM.

Letters: T tokens fed, n nodes whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.attention.choice import choose_attention
from lp_runtime.model.attention.mask import MaskBuilder
from lp_runtime.model.forward.cuda_graph import GraphOptions
from lp_runtime.model.forward.fixed_passes import FixedPasses, largest_size
from lp_runtime.model.forward.following import LeadingShard
from lp_runtime.model.forward.head import make_passes
from lp_runtime.model.forward.inputs import compile_layout, lay_out
from lp_runtime.model.forward.pass_inputs import Part
from lp_runtime.model.forward.pass_timer import PassTimer
from lp_runtime.model.forward.passes import (
    BeginFixed,
    EmptyCache,
    EndFixed,
    FeedChunk,
    FeedShare,
    FeedShares,
    Pass,
    Passes,
)
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.config import context_length
from lp_runtime.model.hf.rotary_lengths import RotaryLengths
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.slots import GROWTH_TOKENS, CacheSlot, SlotPool
from lp_runtime.model.support import check_family
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.utils.callables import result_of

CAPACITY_UNIT = 1024  # tokens; with passes of fixed sizes, capacities are multiples of it so that slots get reused


class ModelRunner:
    """A Hugging Face causal LM, its KV-cache slots and its forward passes.

    Raises ModelError if the model cannot be fed a tree, or its attention does not accept a tree's mask.
    """

    feeds_chains = False  # whether a share is fed as one path, pending tokens included, from `StepInputs.start` on

    def __init__(
        self,
        # In eval mode, on one device. Its rotary embeddings may be replaced permanently (modules/rotary.py).
        model: PreTrainedModel,
        prefill_chunk: int,  # prompt tokens fed at once
        # Tokens of every tree pass, for exactness=strict; a larger tree takes several passes. A token's logits, keys
        # and values are then bit for bit independent of what else is fed (attention/strict.py). None: one pass of any
        # size per tree.
        strict_tokens: int | None = None,
        # Whether attention/tree_attention.py may permanently replace the model's attention (attention/choice.py)
        own_attention: bool = False,
        # Runs every pass on the replica's other shards, too; None if there are none.
        leading: LeadingShard | None = None,
    ):
        self._check_family(model)
        if model.device.type == "meta":
            raise ModelError(f"{type(model).__name__}: offloaded weights are not supported")
        config = model.config.get_text_config()
        attention = choose_attention(model, own_attention and strict_tokens is None)
        compile_layout()
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocabulary_size: int = config.vocab_size
        masks = self._make_masks(config, attention)
        if strict_tokens is not None and any(chunk for _, chunk in masks.limits_by_kind.values()):
            raise ModelError(f"{config.model_type}: chunked attention cannot be computed with exactness=strict")
        self.prefill_chunk = prefill_chunk
        self.passes = self._make_passes(model, masks, strict_tokens)
        self.context_length = context_length(config, self.passes.lengths)
        self.leading = leading
        self.num_prefilled_tokens = 0  # tokens of prompts and of resumed sequences fed so far
        self.slots = SlotPool(self.padded_capacity)
        # Feeds trees in passes of fixed sizes; None if trees are fed in passes of any size.
        self.fixed_passes: FixedPasses | None = None
        # Times passes on a GPU, which runs asynchronously to the host; None on a CPU.
        self.timer = PassTimer(self.device) if self.device.type == "cuda" else None
        # Whether sequences are fed one at a time although the passes could take several.
        self.refuses_batches = self.feeds_chains
        self.why_no_graphs: str | None = None  # reason given to `disable_graphs`; None if it was not called

    def _check_family(self, model: PreTrainedModel) -> None:
        check_family(model)

    def _make_masks(self, config: PreTrainedConfig, attention: str) -> MaskBuilder:
        return MaskBuilder(config, attention, self.dtype, self.device)

    def _make_passes(self, model: PreTrainedModel, masks: MaskBuilder, strict_tokens: int | None) -> Passes:
        return make_passes(model, masks, strict_tokens)

    def _make_cache(self, capacity: int) -> TreeCache:
        return TreeCache(self.model.config.get_text_config().num_hidden_layers, capacity)

    # Slots.

    def padded_capacity(self, capacity: int) -> int:
        capacity += self.strict_tokens or 0  # strict passes are padded, and padding is written to the cache, too
        return capacity if self.graphs is None else -(-capacity // CAPACITY_UNIT) * CAPACITY_UNIT

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of one token in a slot, all layers; 0 before the first pass."""
        return self.slots.bytes_per_token

    def begin(self, slot: CacheSlot, capacity: int, length: int = 0, prompt_length: int = 0) -> None:
        """Truncate a slot to its first `length` tokens and make `capacity` tokens fit, one step's included.

        `prompt_length` is that of the slot's next sequence; `prefill` sets it itself.
        """
        slot.reset(self._make_cache, self.padded_capacity(capacity), length, prompt_length)

    @property
    def strict_tokens(self) -> int | None:
        return self.passes.strict_tokens

    @property
    def rotary_lengths(self) -> RotaryLengths:
        return self.passes.lengths

    @property
    def tree_model(self) -> PreTrainedModel:
        return self.passes.tree_model

    @property
    def supports_batching(self) -> bool:
        """Whether one pass may feed trees of several sequences; with strict tokens only passes of fixed sizes may."""
        can_batch = self.passes.masks.is_own if self.strict_tokens is None else self.fixed_passes is not None
        return can_batch and not self.refuses_batches

    @property
    def graphs(self) -> GraphOptions | None:
        """Options of the passes of fixed sizes; None if trees are fed in passes of any size."""
        return None if self.fixed_passes is None else self.fixed_passes.options

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Token counts that tree passes are padded to, ascending; empty without padding."""
        return () if self.fixed_passes is None else self.fixed_passes.sizes

    def enable_graphs(self, capture: bool, refuses_waits: bool = True, batches: bool = True) -> None:
        max_tokens = largest_size(self.strict_tokens, self.leading is not None)
        assert self.strict_tokens is not None or self.passes.masks.is_own
        self.feed(BeginFixed(GraphOptions(capture, refuses_waits, batches, max_tokens)))
        self.fixed_passes = FixedPasses(self.passes, self.feed, self.leading)

    def feed(self, work: Pass, caches: Sequence[TreeCache] = ()) -> torch.Tensor:
        """Run a pass on all shards; return its tensor, usually [n, V] logits."""
        if self.leading is not None:
            return self.leading.run(self.passes, work, caches)
        return self.passes.run(work, caches)

    def _feed_tree(self, work: Pass, caches: Sequence[TreeCache]) -> StepLogits:
        return self.passes.step_logits(self.feed(work, caches), self.feed)

    def disable_graphs(self, reason: str) -> None:
        self.why_no_graphs = reason
        if self.fixed_passes is not None:
            self.fixed_passes = None
            self.feed(EndFixed())

    # Prompts.

    @property
    def prefix_unit(self) -> int | None:
        """Tokens of a prompt whose multiples can be kept as prefixes; None if tokens of the output can be, too."""
        return None if self.strict_tokens is None else self.prefill_chunk

    @property
    def min_rest(self) -> int:
        """Fewest tokens of a prompt that may be fed after cached ones."""
        return 1

    def cut(self, prompt: Sequence[int], size: int) -> list[Sequence[int]]:
        """Cut a prompt into chunks of at most `size` tokens."""
        return [prompt[start : start + size] for start in range(0, len(prompt), size)]

    def prefill(self, slot: CacheSlot, prompt: Sequence[int]) -> torch.Tensor:
        """Feed and commit a prompt after a slot's committed tokens; return the last token's logits, [1, V]."""
        slot.prompt_length = len(slot.tokens) + len(prompt)
        return result_of(self.prefill_in_chunks(slot, prompt))

    @torch.inference_mode()
    def prefill_in_chunks(self, slot: CacheSlot, prompt: Sequence[int]) -> Generator[None, None, torch.Tensor]:
        """Feed and commit a prompt after a slot's committed tokens, `prefill_chunk` tokens at a time.

        Yields None between chunks, when other slots may be fed. Returns [1, V] float32 logits of the last token.
        """
        *first, last = self.cut(prompt, self.prefill_chunk)
        for chunk in first:
            self.feed_prompt(slot, chunk)
            yield
        return self.feed_prompt(slot, last)

    @torch.inference_mode()
    def feed_prompt(self, slot: CacheSlot, chunk: Sequence[int], rows: Sequence[int] | None = None) -> torch.Tensor:
        """Feed and commit a chunk of a prompt; return [n, V] float32 logits of `rows`, or of its last token."""
        logits = self.feed(FeedChunk(chunk, rows, self._rope_length(slot)), [slot.cache])
        slot.commit(chunk)
        slot.num_prefilled = len(slot.tokens)
        self.num_prefilled_tokens += len(chunk)
        return logits.float()

    @torch.inference_mode()
    def resume(self, slot: CacheSlot, prompt: Sequence[int], committed: Sequence[int], capacity: int) -> Iterator[None]:
        """Make a slot hold a prompt and the tokens committed after it, except the last one.

        `capacity` tokens must fit. The slot keeps the part that it holds already. The rest is prefilled in chunks; with
        exactness=strict, committed tokens go through tree passes instead, as in the original run, so that the bits are
        the same. Tokens fed so far stay in the slot even if the caller stops between chunks.
        """
        tokens, lengths = [*prompt, *committed[:-1]], self.rotary_lengths
        prompt_length = lengths.prompt_length(len(prompt), len(prompt) + len(committed))
        num_known = slot.num_known(tokens, prompt_length, lengths)
        # A tree pass, or a chunk of another size, gives other bits than the original prefill did.
        is_same_prefill = self.strict_tokens is None or slot.num_prefilled == len(prompt)
        if not is_same_prefill or num_known < len(prompt):
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

    # Trees.

    def forward(self, inputs: StepInputs, commit: bool = True, any_size: bool = False) -> StepLogits:
        """Feed a share of a tree, in a pass of any size if `any_size`.

        `commit` is whether to commit the tree's pending tokens; False if another share of the same tree follows.
        """
        slot, tree, nodes, wanted, _ = inputs
        self._ensure_capacity(slot, len(nodes))
        rope_length = self._refeed([inputs])
        layout = lay_out(tree, nodes, wanted, slot.cache.length)
        logits = None if any_size or rope_length else self._forward_fixed([Part.whole(slot.cache, layout)])
        output = self._feed_tree(FeedShare(layout, rope_length), [slot.cache]) if logits is None else logits[0]
        slot.commit(tree.pending if commit else ())
        return output

    def logits_after_each(self, slot: CacheSlot, branches: Sequence[Sequence[int]], text: Sequence[int]) -> StepLogits:
        """Return the logits after n branches, each appended separately to a text. The slot must be empty.

        Branches are distinct and of equal length. The tokens that several begin with are fed once.
        """
        tree = TokenTree(text, max_depth=len(branches[0]))
        leaves = [tree.add_branch(branch)[-1] for branch in branches]
        layout = lay_out(tree, range(len(tree)), leaves, slot.cache.length)
        return self._feed_tree(FeedShare(layout, is_strict=False), [slot.cache])

    def _ensure_capacity(self, slot: CacheSlot, num_nodes: int) -> None:
        """Grow a slot that is too small for the nodes that a step feeds; all tokens in it are committed."""
        needed = len(slot.tokens) + num_nodes
        if slot.capacity < self.padded_capacity(needed):
            self.slots.grow(slot, needed, spare=max(GROWTH_TOKENS, needed // 2))

    def _refeed(self, batch: Sequence[StepInputs]) -> int:
        """Re-prefill slots whose text exceeds, with the tree's root, the length at which `generate` re-feeds.

        Returns the text length whose rotary factors the pass must use; 0 if each token uses its own.
        """
        lengths = self.rotary_lengths
        if not lengths.change:
            return 0
        for slot, tree, *_ in batch:
            prompt_length = lengths.prompt_length(slot.prompt_length, len(slot.tokens) + tree.root + 1)
            if lengths.row(slot.prompt_length) != lengths.row(prompt_length):
                tokens = slot.tokens
                slot.reset(self._make_cache, slot.capacity, prompt_length=prompt_length)
                result_of(self.prefill_in_chunks(slot, tokens))
        return max(self._rope_length(inputs.slot) for inputs in batch)

    def _rope_length(self, slot: CacheSlot) -> int:
        return self.rotary_lengths.rope_length(slot.prompt_length, len(slot.tokens))

    def _forward_fixed(self, parts: Sequence[Part]) -> list[StepLogits] | None:
        """Feed shares of several sequences in passes of fixed sizes; None if they need passes of any size."""
        passes = self.fixed_passes
        if passes is None or (planned := passes.plan(parts)) is None:
            return None
        if passes.prepare(planned) and self.timer is not None:
            self.timer.start()  # restart: exclude the time of the capture
        return passes.forward(parts, planned)

    @torch.inference_mode()
    def forward_batch(self, batch: Sequence[StepInputs], commit: bool = True) -> list[StepLogits]:
        """Feed one tree of each sequence, in one pass; several sequences only if the model `supports_batching`."""
        if len(batch) == 1:
            return [self.forward(batch[0], commit)]
        assert self.supports_batching
        for inputs in batch:
            self._ensure_capacity(inputs.slot, len(inputs.nodes))
        if self._refeed(batch):  # each text has its own rotary factors
            return [self.forward(inputs, commit).copy() for inputs in batch]
        layouts = [lay_out(tree, nodes, wanted, slot.cache.length) for slot, tree, nodes, wanted, _ in batch]
        caches = [inputs.slot.cache for inputs in batch]
        logits = self._forward_fixed([Part.whole(*each) for each in zip(caches, layouts, strict=True)])
        if logits is None:
            logits = self._feed_tree(FeedShares(layouts), caches).split([len(layout.rows) for layout in layouts])
        for inputs in batch:
            inputs.slot.commit(inputs.tree.pending if commit else ())
        return logits

    def free_memory(self) -> None:
        """Free what no running request needs, on all shards: slots, cached prefixes, torch's unused blocks."""
        self.slots.clear()
        if self.slots.prefixes is not None:
            self.slots.prefixes.clear()
        self.feed(EmptyCache())

    def num_passes(self, num_tokens: int) -> int:
        return 1 if self.strict_tokens is None else -(-num_tokens // self.strict_tokens)

    def synchronize(self) -> None:
        """Wait until the GPU has finished the work queued on the current stream; returns at once on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
