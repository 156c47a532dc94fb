"""Memory that a model needs on each GPU of a replica, computed before any weight is read.

The model is built on torch's meta device, so names and shapes are those that loading will produce; the tensor-parallel
plan says which of them are split. Quantized checkpoints count with the size of their files.

Letters: P shards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from lp_runtime.config.settings import DEFAULT_CONTEXT_TOKENS, ModelConfig
from lp_runtime.errors import ModelError, first_line
from lp_runtime.model.capacity import bytes_of_tokens
from lp_runtime.model.hf.config import has_latents, max_positions
from lp_runtime.model.hf.location import check_location
from lp_runtime.model.kv_cache.cache_names import CACHE_NAMES, cache_name
from lp_runtime.model.kv_cache.slots import STEP_TOKENS
from lp_runtime.model.loading.loader import without_memory
from lp_runtime.model.loading.pipeline import Part, parts_of, stages_of
from lp_runtime.model.tensor_parallel.slicing import check_shards, is_quantized, is_split, own_plan, splits_keys

log = logging.getLogger(__name__)

LOGITS_BYTES = 4  # of one logit: samplers compute in float32
FED_TOKENS = 3  # fewer than any sliding window, and no size of a layer
HEADER_LENGTH = struct.Struct("<Q")  # first field of a safetensors file: the length of its JSON header in bytes


class ModelSize(NamedTuple):
    """Memory needs of a model, in bytes, from which those of each GPU are computed."""

    config: PreTrainedConfig
    parts: tuple[Part, ...]  # for pipeline parallelism; empty if the layers are not in one list
    # (bytes of a row or column, number of them) of each parameter that shards divide.
    split: tuple[tuple[int, int], ...]
    whole: int  # bytes of all tensors that every shard holds in full
    token_bytes: int  # of one token's keys and values in all layers, not divided
    # Of the logits of the largest step, which captured passes keep allocated, and of a sequence's recurrent states.
    pass_bytes: int
    context_tokens: int  # prompt and output tokens, together, that a replica must be able to hold

    def weight_bytes(self, num_shards: int) -> int:
        """Return the bytes of weights on each of P GPUs; if they are not divided evenly, on the fullest."""
        return self.whole + sum(row * -(-number // num_shards) for row, number in self.split)

    def cache_bytes_per_token(self, num_shards: int) -> int:
        return self.token_bytes // num_shards if splits_keys(self.config) else self.token_bytes

    def needed_bytes(self, num_shards: int, num_bytes: int = 0) -> int:
        """Return the free bytes that each of P GPUs needs to load slices, with `num_bytes` for NCCL's buffers."""
        cache = bytes_of_tokens(self.context_tokens, self.cache_bytes_per_token(num_shards))
        return self.weight_bytes(num_shards) + self.pass_bytes + cache + num_bytes

    def needed_for_layers(self, num_gpus: int, num_bytes: int = 0) -> int:
        """Return the same as `needed_bytes` for loading the model by whole layers (pipeline)."""
        stages = stages_of(self.parts, num_gpus)
        weights, layers = [0] * num_gpus, [0] * num_gpus
        for part, stage in zip(self.parts, stages, strict=True):
            weights[stage] += part.num_bytes
            layers[stage] += part.num_layers
        each_layer = -(-self.token_bytes // max(1, sum(layers)))
        caches = [bytes_of_tokens(self.context_tokens, number * each_layer) for number in layers]
        return max(map(sum, zip(weights, caches, strict=True))) + self.pass_bytes + num_bytes

    def check_shards(self, num_shards: int) -> None:
        if num_shards > 1:
            check_shards(self.config, num_shards)


def size_of_model(config: ModelConfig, dtype: str, context_tokens: int | None = None) -> ModelSize | None:
    """Compute a model's memory needs from its configuration and, if quantized, the headers of its files.

    Returns None if the configuration is broken, for example; loading the model then reports the reason.
    `context_tokens` are those of ModelSize; None for the model's context length, at most DEFAULT_CONTEXT_TOKENS.
    """
    try:
        check_location(config)
        model = without_memory(config, dtype)
        parts: tuple[Part, ...] = ()
        with contextlib.suppress(ModelError):  # the layers are not in one list
            parts = tuple(parts_of(model))
        text = model.config.get_text_config()
        length = max_positions(text) or DEFAULT_CONTEXT_TOKENS
        per_token, per_sequence = _cached_numbers(model)
        logits_bytes = STEP_TOKENS * text.vocab_size * (model.dtype.itemsize + LOGITS_BYTES)
        others = {
            "config": model.config,
            "token_bytes": model.dtype.itemsize * per_token,
            "pass_bytes": logits_bytes + model.dtype.itemsize * per_sequence,
            "context_tokens": context_tokens or min(length, DEFAULT_CONTEXT_TOKENS),
        }
        if is_quantized(model.config) and (num_bytes := safetensors_bytes(config.location)):
            scale = num_bytes / sum(each.num_bytes for each in parts) if parts else 0
            parts = tuple(each._replace(num_bytes=int(each.num_bytes * scale)) for each in parts)
            return ModelSize(parts=parts, split=(), whole=num_bytes, **others)
        split, whole = _divided_bytes(model)
        return ModelSize(parts=parts, split=split, whole=whole, **others)
    except Exception as error:  # configurations and transformers' many models raise anything
        log.debug("the size of %s cannot be determined: %s", config.location, first_line(error))
        return None


def _divided_bytes(model: PreTrainedModel) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return (bytes of a row, number of rows) of each parameter that shards divide, and the other bytes."""
    plan = dict(model.tp_plan or {}) | (own_plan(model.config) or {})
    split, whole = [], sum(each.nbytes for each in model.buffers())
    for name, tensor in model.named_parameters():
        dimension = is_split(plan, name, tensor.ndim)
        if dimension is None:
            whole += tensor.nbytes
        else:
            split.append((tensor.nbytes // tensor.shape[dimension], tensor.shape[dimension]))
    return tuple(split), whole


def _cached_numbers(model: PreTrainedModel) -> tuple[int, int]:
    """Return the elements of a token's keys and values in all layers, and those of a sequence's recurrent states.

    Reads them from the cache after a pass without weights.
    """
    try:
        tensors = _cached_tensors(model)
    except Exception as error:  # of models' own code: some read values of tensors
        log.debug("%s cannot run without weights: %s", type(model).__name__, first_line(error))
        return _usual_numbers(model.config.get_text_config()), 0
    keys = [each.numel() for each in tensors if each.ndim == 4 and each.shape[2] == FED_TOKENS]
    return sum(keys) // FED_TOKENS, sum(each.numel() for each in tensors) - sum(keys)


@torch.inference_mode()
def _cached_tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the tensors of a cache after FED_TOKENS tokens; `model` is on the meta device."""
    cache = DynamicCache(config=model.config)
    ids = torch.zeros((1, FED_TOKENS), dtype=torch.int64, device=model.device)
    model.eval()(input_ids=ids, use_cache=True, **{cache_name(model) or CACHE_NAMES[0]: cache})
    values = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [each for value in values for each in (value.values() if isinstance(value, dict) else (value,))]
    return [each for each in tensors if isinstance(each, torch.Tensor)]


def _usual_numbers(config: PreTrainedConfig) -> int:
    """Return the elements of a token's keys and values by a (text) configuration.

    Layers with a recurrent state count as if they had keys.
    """
    if has_latents(config):
        return config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    heads, size = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    if not heads:
        return 0
    num_keys = getattr(config, "num_key_value_heads", None) or heads
    return config.num_hidden_layers * num_keys * 2 * (size or config.hidden_size // heads)


def safetensors_bytes(folder: str) -> int:
    """Return the bytes of all tensors in the files that a directory is loaded from; 0 for a hub id or without files."""
    total = 0
    for path in _weight_files(Path(folder)):
        with path.open("rb") as file:
            (header,) = HEADER_LENGTH.unpack(file.read(HEADER_LENGTH.size))
        total += path.stat().st_size - HEADER_LENGTH.size - header
    return total


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads; others may hold the same weights in another layout."""
    if (single := folder / SAFE_WEIGHTS_NAME).is_file():
        return [single]
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in set(names)]
    return list(folder.glob("*.safetensors"))
