"""A model runner with one slot, for tests that feed one sequence by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner


class OneSlot:
    """Calls a runner's methods with one slot; everything else is delegated to the runner."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.slot = CacheSlot()

    def __getattr__(self, name: str):
        return getattr(self.runner, name)

    def begin(self, capacity: int) -> None:
        self.runner.begin(self.slot, capacity)

    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        return self.runner.prefill(self.slot, prompt)

    def resume(self, prompt: Sequence[int], committed: Sequence[int], capacity: int) -> Iterator[None]:
        return self.runner.resume(self.slot, prompt, committed, capacity)

    def inputs(self, tree: TokenTree, nodes: Sequence[int], wanted: Sequence[int]) -> StepInputs:
        return StepInputs(self.slot, tree, nodes, wanted)

    def forward(self, tree: TokenTree, nodes: Sequence[int], wanted: Sequence[int], commit: bool = True):
        """Return the logits of the wanted nodes."""
        return self.runner.forward(self.inputs(tree, nodes, wanted), commit).logits
