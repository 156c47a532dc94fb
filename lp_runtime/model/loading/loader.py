"""Loader of models and tokenizers from a directory or hub id; reports every failure in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lp_runtime.config.settings import ModelConfig
from lp_runtime.distributed.shards import ShardPlace, loading_group
from lp_runtime.errors import LookaheadError, ModelError, first_line
from lp_runtime.model.hf.location import check_location
from lp_runtime.model.tensor_parallel.slicing import check_shards, own_plan
from lp_runtime.utils.warnings import SharedContext, without_warnings

WHOLE = ShardPlace()  # of a process that holds a whole model
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    libraries = (transformers_logging, hub_logging)
    verbosities = [library.get_verbosity() for library in libraries]
    bars = transformers_logging.is_progress_bar_enabled()
    for library in libraries:
        library.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for library, verbosity in zip(libraries, verbosities, strict=True):
            library.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


QUIET_LIBRARIES = SharedContext(_quiet_libraries)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars, notices and warnings of transformers, the hub, and packages imported in the block."""
    with QUIET_LIBRARIES, without_warnings():
        yield


def load_model(
    config: ModelConfig, device: torch.device, dtype: str, place: ShardPlace = WHOLE, timeout: float = 600.0
) -> PreTrainedModel:
    """Load a causal LM in eval mode, or this shard's slices of it in the form transformers leaves them.

    Raises LaunchError if the shards of the replica do not all connect.

    Args:
        device: receives the model, unless `config.device_map` says otherwise.
        dtype: a name in DTYPES; "auto" is the checkpoint's dtype on CUDA and float32 on a CPU.
        place: which shard of its replica this process is; pass a shard's result on to `slice_model`.
        timeout: seconds within which all shards of the replica must have loaded.
    """
    check_location(config)
    options = _load_options(config, device, dtype)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            if not place.is_whole:
                options |= _slice_options(config, place)
                stack.enter_context(loading_group(place, device, timeout))
            loaded = AutoModelForCausalLM.from_pretrained(config.location, **options)
            model, loading = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)  # output_loading_info gives a pair
            if config.device_map is None and model.device != device:
                model = model.to(device)  # type: ignore[arg-type]  # its decorator hides that it is a method
            model = model.eval()
    except LookaheadError:
        raise
    except Exception as error:  # from_pretrained lets any exception of its many back ends through
        what = (
            "cannot be loaded" if Path(config.location).is_dir() else "no such directory, and no such model on the hub"
        )
        raise ModelError(f"model.path={config.location}: {what}: {first_line(error)}") from error
    _check_weights(config, loading)
    return model


def without_memory(config: ModelConfig, dtype: str) -> PreTrainedModel:
    """Build a model on the meta device: names and shapes, no weights; dtype "auto" is the checkpoint's."""
    with quiet():
        hf_config = AutoConfig.from_pretrained(config.location, **_source(config))
        given = DTYPES.get(dtype) or getattr(hf_config, "dtype", None) or torch.float32
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, dtype=given, trust_remote_code=config.trust_remote_code)


def _source(config: ModelConfig) -> dict[str, Any]:
    return {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}


def _load_options(config: ModelConfig, device: torch.device, dtype: str) -> dict[str, Any]:
    optional = {"device_map": config.device_map, "quantization_config": config.quantization_config}
    return {
        "dtype": DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto"),
        **_source(config),
        "use_safetensors": config.use_safetensors or None,  # None: transformers prefers safetensors files
        "attn_implementation": None if config.attn_implementation == "auto" else config.attn_implementation,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # _check_weights reports them in one line
        **{name: value for name, value in optional.items() if value is not None},
    }


def _slice_options(config: ModelConfig, place: ShardPlace) -> dict[str, Any]:
    """Return the arguments for `from_pretrained` to load slices; ModelError if it cannot be sliced."""
    from transformers.distributed.configuration_utils import DistributedConfig

    hf_config = AutoConfig.from_pretrained(config.location, **_source(config))
    check_shards(hf_config, place.num_shards)
    return {"distributed_config": DistributedConfig(tp_size=place.num_shards, tp_plan=own_plan(hf_config))}


def _check_weights(config: ModelConfig, loading: dict[str, Any]) -> None:
    """Refuse a checkpoint with missing or misshapen weights, which transformers fills with random numbers."""
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(key if isinstance(key, str) else key[0] for key in loading.get(kind, ())):
            what = "lack" if kind == "missing_keys" else "have the wrong shape for"
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"model.path={config.location}: the weights {what} {names[0]}{more}")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    check_location(config)
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(config.location, **_source(config))
    except Exception as error:
        raise ModelError(f"model.path={config.location}: no usable tokenizer: {first_line(error)}") from error


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the end-of-sequence ids of a model's generation config, else of its config; may be empty."""
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else (each for each in ids if each is not None))
    return frozenset()
