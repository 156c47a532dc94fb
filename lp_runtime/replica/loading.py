"""Model loading: from a checkpoint to a fused, packed and checked model on its device."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np
import torch

from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.devices import device_type
from lp_runtime.distributed.shards import ShardLink, ShardPlace
from lp_runtime.errors import ConfigError, ModelError
from lp_runtime.model.attention.choice import choose_attention
from lp_runtime.model.capacity import free_bytes
from lp_runtime.model.checks.make_runner import check_runner, make_runner
from lp_runtime.model.forward.cuda_graph import why_uncapturable
from lp_runtime.model.forward.fastest_sum import fastest_reducer
from lp_runtime.model.forward.following import Follower, LeadingShard
from lp_runtime.model.hf.types import CausalLM
from lp_runtime.model.loading.loader import WHOLE, load_model
from lp_runtime.model.loading.pipeline import load_in_stages
from lp_runtime.model.loading.sizes import size_of_model
from lp_runtime.model.modules.fusing import fuse_blocks
from lp_runtime.model.modules.packed_linear import LAYOUTS, pack_as, pack_fastest, pack_linears
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.support import why_chains
from lp_runtime.model.tensor_parallel.slicing import slice_model
from lp_runtime.utils.memory import is_out_of_memory
from lp_runtime.utils.startup import Progress

GIB = 1 << 30


def ready_model(
    config: RuntimeConfig,
    device: torch.device,
    progress: Progress | None = None,
    place: ShardPlace = WHOLE,
    batches: bool = True,
) -> tuple[ModelRunner, float]:
    """Load, optimize and check a model, or shard 0 of it.

    Return its runner and the largest relative difference that the self-check saw. A ModelError says why that failed,
    or how much memory was free. `batches` is whether passes of several sequences are captured at start.
    """
    progress = progress or Progress(is_shown=False)
    progress.begin(f"loading {config.model.location} on {device}")
    free = free_bytes(device)
    try:
        loaded, link = _load(config, device, place)
        leading = None if link is None else LeadingShard(link)
        return prepare_model(loaded, config, device, progress, leading, batches)
    except Exception as error:
        if not _lacks_memory(error):
            raise
        sizes = "" if free is None else f": {_needed(config, place)}{free / GIB:.1f} GiB were free before loading"
        raise ModelError(f"model.path={config.model.location}: not enough memory on {device}{sizes}") from error


def _needed(config: RuntimeConfig, place: ShardPlace) -> str:
    """Return message text with the size of the weights on a GPU; empty if unknown."""
    if config.model.quantization_config is not None or config.model.device_map is not None or config.num_stages > 1:
        return ""
    size = size_of_model(config.model, config.dtype)
    return "" if size is None else f"the weights take {size.weight_bytes(place.num_shards) / GIB:.1f} GiB, "


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is a failed allocation."""
    return error is not None and (is_out_of_memory(error) or _lacks_memory(error.__cause__))


def ready_follower(config: RuntimeConfig, device: torch.device, place: ShardPlace) -> Follower:
    """Load a shard other than 0. Shard 0 checks the model."""
    loaded, link = _load(config, device, place)
    assert link is not None, "a whole model has no followers"
    _optimize(loaded, config, device, is_slice=True)
    model = ModelRunner(loaded, config.model.prefill_chunk, _strict_tokens(config), own_attention=True)
    return Follower(model.passes, loaded.config.get_text_config().num_hidden_layers, link)


def _load(config: RuntimeConfig, device: torch.device, place: ShardPlace) -> tuple[CausalLM, ShardLink | None]:
    """Return a model and None, or one shard's slice of it and the link to the other shards."""
    timeout = config.launcher.start_timeout
    if config.num_stages > 1:
        return load_in_stages(config.model, device, config.num_stages, config.dtype), None
    loaded = load_model(config.model, device, config.dtype, place, timeout)
    if place.is_whole:
        return loaded, None
    link = ShardLink(place, device, timeout)
    if config.compile != "off" and config.exactness == "fast":  # strict replicas all need the same one
        width = loaded.config.get_text_config().hidden_size
        link.reducer = fastest_reducer(link, width, loaded.dtype, device, timeout)
    slice_model(loaded, link)
    return loaded, link


def _strict_tokens(config: RuntimeConfig) -> int | None:
    return config.strict_tokens if config.exactness == "strict" else None


def prepare_model(
    loaded: CausalLM,
    config: RuntimeConfig,
    device: torch.device,
    progress: Progress | None = None,
    leading: LeadingShard | None = None,
    batches: bool = True,
) -> tuple[ModelRunner, float]:
    """Fuse, pack and check a Hugging Face causal LM, or shard 0's slice of it; see `ready_model`."""
    strict_tokens = _strict_tokens(config)
    progress = progress or Progress(is_shown=False)
    progress.begin("fusing and packing layers")
    changes = _optimize(loaded, config, device, is_slice=leading is not None)
    progress.begin("checking trees against plain forward passes")
    model = make_runner(loaded, config.model.prefill_chunk, strict_tokens, own_attention=True, leading=leading)
    if (reason := _why_no_graphs(model, config)) is None:
        model.enable_graphs(capture=True, batches=batches)
    else:
        model.disable_graphs(reason)
    try:
        return model, check_runner(model)
    except ModelError as error:
        hint = f" (with the runtime's own layers; try {' '.join(changes)})" if changes else ""
        raise ModelError(f"{error}{hint}") from error


def _why_no_graphs(model: ModelRunner, config: RuntimeConfig) -> str | None:
    """Return why this replica does not capture its passes; None if it does."""
    if config.compile == "off":
        return "compile=off"
    if model.feeds_chains:
        return "the model is fed chains of guesses"
    if model.leading is not None and not model.leading.can_capture:
        return "the all-reduces between the replica's shards cannot be captured"
    return why_uncapturable(model.tree_model)


def group_not_captured(model: ModelRunner, on_gpu: Sequence[bool], captured: Sequence[bool]) -> str | None:
    """Return why some replica on a GPU does not capture its passes as CUDA graphs; None if all do.

    `on_gpu` and `captured` are indexed by rank; `model` is this replica's.
    """
    ranks = [
        rank for rank, (is_gpu, is_captured) in enumerate(zip(on_gpu, captured, strict=True)) if is_gpu > is_captured
    ]
    if not ranks or (model.timer is not None and model.graphs is None):
        return model.why_no_graphs if ranks else None
    return f"only on replica {ranks[0]}, which has logged the reason"


def _optimize(loaded: CausalLM, config: RuntimeConfig, device: torch.device, is_slice: bool) -> list[str]:
    """Fuse and pack a model's layers as configured; return the settings that turn the applied changes off."""
    undo = []
    if _fuse(loaded, config):
        undo.append("model.fusing=off")
        if device.type == "cuda":
            torch.cuda.empty_cache()  # return freed memory to other processes on this GPU
    if config.model.packing == "auto":
        # Replicas with exactness=strict, and the shards of a replica, must make the same choice: do not measure there.
        measures = config.exactness == "fast" and not is_slice
        if _pack_fastest(loaded, config.cache_dir) if measures else pack_linears(loaded):
            undo.append("model.packing=off")
    return undo


def _fuse(loaded: CausalLM, config: RuntimeConfig) -> int:
    """Fuse a model's blocks as configured; return how many."""
    may_fuse = (
        config.model.fusing == "auto"
        and config.model.device_map is None
        and config.num_stages == 1
        and why_chains(loaded) is None
    )
    if not may_fuse:
        return 0
    if config.exactness == "fast":
        choose_attention(loaded, own_attention=True)  # blocks with eager attention, as gpt-oss's, would not be fused
    return fuse_blocks(loaded)


def _pack_fastest(model: CausalLM, cache_dir: str | None) -> bool:
    """Pack a model's layers in the fastest layout and return whether any is packed.

    It is measured once per model and machine: that takes up to a second, and with another layout results round
    differently. So the number of threads, which the number of replicas and an early start change, does not matter.
    """
    library, cpu = torch.__version__, (torch.backends.cpu.get_cpu_capability(), os.cpu_count())
    what = repr((model.config.to_json_string(), str(model.dtype), library, *cpu))
    name = f"packing-{hashlib.blake2b(what.encode(), digest_size=12).hexdigest()}.npz"
    files = CalibrationFiles(cache_dir, reports=False)  # the measurements of steps that follow will report it
    layout = files.load(name, ["layout"], lambda saved: str(saved["layout"]))
    if layout in LAYOUTS:
        return pack_as(model, layout) > 0
    fastest = pack_fastest(model)
    if fastest is not None:
        files.store(name, {"layout": np.array(fastest)})
    return fastest not in (None, "plain")


def choose_device(device: str, index: int) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; `index` is among the GPUs that this process sees."""
    if device_type(device) == "cpu":
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device=cuda: replica needs GPU {index}, but this process sees {torch.cuda.device_count()}")
    return torch.device("cuda", index)
