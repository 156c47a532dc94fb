"""Loading a model or a tokenizer from a directory or a hub id, with every failure in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lp_runtime.config.settings import ModelConfig
from lp_runtime.errors import ModelError, first_line
from lp_runtime.model.location import check_location
from lp_runtime.utils.warnings import without_warnings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def quiet() -> Iterator[None]:
    """Loading without progress bars and notices; what matters is raised."""
    libraries = (transformers_logging, hub_logging)
    verbosities = [library.get_verbosity() for library in libraries]
    bars = transformers_logging.is_progress_bar_enabled()
    for library in libraries:
        library.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with without_warnings():  # what is imported on the way has notices of its own
            yield
    finally:
        for library, verbosity in zip(libraries, verbosities, strict=True):
            library.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def load_model(config: ModelConfig, device: torch.device, dtype: str):
    """Load a causal LM in eval mode onto `device`.

    Args:
        config: where and how.
        device: the replica's device.
        dtype: "auto" is the checkpoint's on CUDA and float32 on a CPU; else a name in DTYPES.

    Raises:
        ModelError: if anything is missing, broken or does not match the architecture.
    """
    check_location(config)
    torch_dtype = DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto")
    attention = None if config.attn_implementation == "auto" else config.attn_implementation
    optional = {"device_map": config.device_map, "quantization_config": config.quantization_config}
    try:
        with quiet():
            model, loading = AutoModelForCausalLM.from_pretrained(
                config.location,
                dtype=torch_dtype,
                revision=config.revision or "main",
                trust_remote_code=config.trust_remote_code,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, in one line
                **{name: value for name, value in optional.items() if value is not None},
            )
            if config.device_map is None and model.device != device:
                model = model.to(device)
            model = model.eval()
    except Exception as error:  # from_pretrained raises what its many back ends raise
        what = (
            "cannot be loaded" if Path(config.location).is_dir() else "no such directory, and no such model on the hub"
        )
        raise ModelError(f"model.path={config.location}: {what}: {first_line(error)}") from error
    # transformers fills what a checkpoint lacks with random weights; that is not the user's model.
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(key if isinstance(key, str) else key[0] for key in loading.get(kind, ())):
            what = "lack" if kind == "missing_keys" else "have the wrong shape for"
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"model.path={config.location}: the weights {what} {names[0]}{more}")
    return model


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer.

    Raises:
        ModelError: if it is missing or broken.
    """
    check_location(config)
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(
                config.location, revision=config.revision or "main", trust_remote_code=config.trust_remote_code
            )
    except Exception as error:
        raise ModelError(f"model.path={config.location}: no usable tokenizer: {first_line(error)}") from error


def eos_token_ids(model) -> frozenset[int]:
    """End-of-sequence ids: the generation config's, else the model config's; empty if there are none."""
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
