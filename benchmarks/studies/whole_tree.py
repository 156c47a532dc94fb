"""Decodes a request on one model as R replicas would: every step's tree is fed whole, in one forward pass.

Trees, shares and so the number of steps are those of R replicas; only the time of a forward pass is not. The steps are
the engine's own (lp_runtime/decoder/decoder.py).
Letters: R replicas, T nodes in the tree, n of them from the root on, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lp_runtime.decoder.decoder import Decoder
from lp_runtime.decoder.prompt_harvest import PromptHarvest
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.partition.partition import Shares
from lp_runtime.distributed.transport.group import Group
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.request.step_timer import StepTimer
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.utils.generators import result_of

# What all replicas tell of their times in the exchange of a step with these shares: [R] integers of StepTimer.packed.
Clocks = Callable[[Shares], list[int]]


def unknown_times(shares: Shares) -> list[int]:
    """Return clocks of replicas that tell nothing of their times."""
    return [0] * len(shares)


@dataclass(frozen=True)
class DecodedStep:
    """A step that was decoded.

    Attributes:
        step: the step.
        values: [T, width] int64 what all replicas sample; -1 before the root.
    """

    step: Step
    values: np.ndarray


def decode_whole_trees(
    model: ModelRunner,
    decoder: Decoder,
    request: Request,
    clocks: Clocks = unknown_times,
    times_are_late: bool = False,
) -> Iterator[DecodedStep]:
    """Decode a request to its end.

    Args:
        model: feeds the trees.
        decoder: the request's, before its prefill.
        request: what to decode.
        clocks: what the replicas tell of their times.
        times_are_late: whether a step's clocks are of the pass of the step before.

    Yields:
        every step, the prefill's first, once its tokens are committed.
    """
    drafter = decoder.drafter
    with model.slots.borrowed() as slot:
        one_step = drafter.max_nodes + drafter.max_committed
        capacity = len(request.prompt_ids) + request.max_new_tokens + one_step
        model.begin(slot, capacity, prompt_length=len(request.prompt_ids))
        step = decoder.propose_prefill()
        prompt, alone = request.prompt_ids, Group.alone()
        harvest = PromptHarvest(model, slot, prompt, decoder.num_harvested, decoder.sampler, alone)
        values = sample_for_all(decoder, step, result_of(harvest.prefill_in_chunks()))
        clocks(step.shares)
        decoder.advance(step, decoder.unpack(step, values))
        if decoder.num_harvested:
            drafter.learn_prompt(prompt, harvest.share())
        yield DecodedStep(step, values)
        while decoder.state.finish_reason is None:
            step = decoder.propose()
            found = model.forward(StepInputs.whole(slot, step.tree))
            values = sample_for_all(decoder, step, found.logits)
            gathered = decoder.unpack(step, values)
            decoder.advance(step, gathered, *StepTimer.unpacked(clocks(step.shares)), times_are_late)
            yield DecodedStep(step, values)


def sample_for_all(decoder: Decoder, step: Step, logits: torch.Tensor) -> np.ndarray:
    """Return what every replica samples of the nodes that it owns, as the exchange would.

    Args:
        decoder: the request's.
        step: the step.
        logits: [n, V] float32 of all nodes from the root on.

    Returns:
        [T, width] int64; -1 before the root.
    """
    root = step.tree.root
    values = np.full((len(step.tree), decoder.sampler.width), -1, np.int64)
    for rank, share in enumerate(step.shares):
        rows = torch.from_numpy(share.owned - root).to(logits.device)
        values[share.owned] = decoder.sample(step, rank, StepLogits(logits[rows])).values.cpu().numpy()
    return values
