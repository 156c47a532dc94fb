"""Support for a model that transformers made tensor-parallel: all ranks together are one replica.

All ranks make the same call and compute the same steps from the same logits; only the model's own layers communicate.
So no decision may depend on anything that differs between ranks, above all the clock.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.distributed.process_group import num_processes
from lp_runtime.errors import ConfigError, ModelError
from lp_runtime.model.tensor_parallel.layers import is_sliced

FIXED_WINDOW = LookaheadConfig(W=8, N=3, G=8)  # 32 nodes per step; replaces a window chosen by measurement


def tp_size_of(model: PreTrainedModel) -> int:
    """Return how many ranks transformers' `tp_plan` splits a model over; 1 for a whole model or our shard.

    Calls no collective. Refuses weights that are split in another way, for example by FSDP or over some of the ranks.
    """
    if is_sliced(model):
        return 1
    num_ranks = getattr(model, "tp_size", None) or 1
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())  # only DTensors have one
    largest = max((mesh.size() for mesh in meshes if mesh is not None), default=1)
    num_all = num_processes() if max(num_ranks, largest) > 1 else 1
    if largest > num_ranks or num_ranks not in (1, num_all):
        split = f"over {largest} ranks, and not by a tp_plan" if largest > num_ranks else f"over {num_ranks} ranks"
        raise ModelError(
            f"{model.config.model_type}: its weights are split {split}; load it whole, or with tp_plan='auto' over all"
            f" {num_all} ranks"
        )
    return num_ranks


def lockstep_settings(lookahead: LookaheadConfig, max_time: float | None) -> LookaheadConfig:
    """Adapt settings so that all ranks decide the same without communicating: fixed-size steps, no prior.

    Refuses a time limit (`max_time`, in seconds), which would expire at a different step on each rank.
    """
    if max_time is not None:
        raise ConfigError("max_time: cannot be kept by a model that is split over ranks: their clocks differ")
    if lookahead.tokens is not None:
        return replace(lookahead, prior="none")
    W, N, G = (FIXED_WINDOW if lookahead.is_auto else lookahead).window
    return replace(lookahead, W=W, N=N, G=G, prior="none")
