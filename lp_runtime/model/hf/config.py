"""A model's context length and attention, read from its class and configuration."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.errors import ModelError
from lp_runtime.model.hf.rotary_lengths import RotaryLengths

CACHE_DROPPING_TYPES = ("phi3", "phi4_multimodal")  # their `generate` drops the cache where rotary factors change


def context_length(config: PreTrainedConfig, lengths: RotaryLengths) -> int | None:
    """Return how many positions a sequence may have; None if the model sets no limit.

    transformers' own rotary modules choose the factors of all tokens of a pass by its longest position, so a token's
    logits would depend on what else is fed. If these modules could not be replaced (`lengths` is UNCHANGING), the
    context ends at the length where factors change. The same holds for model types whose cache `generate` drops at that
    length.
    """
    length = max_positions(config)
    if lengths.change:  # "dynamic" factors extend the context beyond max_position_embeddings
        return length and max(length, lengths.threshold + lengths.num_rows - 1)
    original = getattr(config, "original_max_position_embeddings", None)
    rope = field_of(config, "rope_parameters") or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if "longrope" in (parameters.get("rope_type"), parameters.get("type")):
            length = min(
                filter(None, (length, parameters.get("original_max_position_embeddings") or original)), default=None
            )
    if config.model_type in CACHE_DROPPING_TYPES:
        length = min(filter(None, (length, original)), default=None)
    return length


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that a (text) configuration allows; None for no limit."""
    names = "max_position_embeddings", "max_target_positions"
    length = next(filter(None, (getattr(config, name, None) for name in names)), None)
    if config.model_type == "mpt":
        length = config.max_seq_len
    return length if length is None or length > 0 else None  # some configurations have -1


def config_json(location: str, revision: str | None) -> str:
    """Return a model's config.json, as transformers reads it, with sorted keys; empty if there is none."""
    try:
        return json.dumps(PreTrainedConfig.get_config_dict(location, revision=revision or "main")[0], sort_keys=True)
    except (OSError, ValueError):
        return ""


def forward_options(model: PreTrainedModel) -> dict[str, object]:
    """Return the keyword arguments of every forward pass of a model.

    A mixture whose configuration asks for its routers' logits, as after a fine-tuning, would compute a loss from them
    that needs transformers' own mask.
    """
    asks = getattr(model.config.get_text_config(), "output_router_logits", False)
    return {"output_router_logits": False} if asks else {}


def differs_by_layer(config: PreTrainedConfig, name: str) -> bool:
    """Whether layers of a model have different values of a field, so that its configuration has none."""
    try:
        getattr(config, name, None)
    except RuntimeError:  # raised by transformers for fields of `per_layer_config`
        return True
    return False


def field_of(config: PreTrainedConfig, name: str) -> Any:
    """Return a field of a (text) configuration, None if it has no such field; ModelError if it differs by layer."""
    if differs_by_layer(config, name):
        raise ModelError(f"{config.model_type}: its layers have different values of {name}, which is not supported")
    return getattr(config, name, None)


def has_latents(config: PreTrainedConfig) -> bool:
    """Whether a model caches latents, from which its attention computes keys and values (DeepSeek V2 and V3)."""
    text = config.get_text_config()
    return differs_by_layer(text, "kv_lora_rank") or bool(getattr(text, "kv_lora_rank", None))


def attention_of(config: PreTrainedConfig) -> str:
    return config._attn_implementation  # no public attribute exists


def attention_settings(model: PreTrainedModel) -> str | dict[str, str]:
    """Return the attention of a model and of its sub-models, as an argument of `set_attn_implementation`."""
    config = model.config
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    if not parts:
        return attention_of(config)
    return {"": attention_of(config)} | {name: attention_of(part) for name, part in parts.items()}


def of_text_model(model: PreTrainedModel, attention: str) -> str | dict[str, str]:
    """Return a model's attention settings, for `set_attn_implementation`, with the text model's replaced."""
    settings = attention_settings(model)
    if isinstance(settings, str):
        return attention
    text = model.config.get_text_config()
    # The model may itself be the text model.
    name = next((name for name in settings if name and getattr(model.config, name) is text), "")
    return settings | {name: attention}
