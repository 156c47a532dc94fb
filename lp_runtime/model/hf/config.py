"""What a model's class and configuration say of it: its context, its attention."""

from __future__ import annotations

import json

from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.model.hf.rotary_lengths import RotaryLengths

CACHE_DROPPING_TYPES = ("phi3", "phi4_multimodal")  # their prepare_inputs_for_generation drops the cache


def context_length(config: PreTrainedConfig, lengths: RotaryLengths) -> int | None:
    """Return how many positions a sequence may have; None if the model sets no limit.

    Where rotary factors change with the length, transformers' own modules take those of all tokens of a pass by its
    longest position, so a token's logits would depend on what else is fed. A model whose modules are not replaced is
    used up to the length at which factors change. So are types whose cache `generate` drops there.

    Args:
        config: the model's (text) configuration.
        lengths: at which the rotary factors change, where each token has those of its own length; UNCHANGING where
            transformers' modules stay.
    """
    length = max_positions(config)
    if lengths.change:  # "dynamic" factors are made for more positions than max_position_embeddings
        return length and max(length, lengths.threshold + lengths.num_rows - 1)
    original = getattr(config, "original_max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if "longrope" in (parameters.get("rope_type"), parameters.get("type")):
            length = min(
                filter(None, (length, parameters.get("original_max_position_embeddings") or original)), default=None
            )
    if config.model_type in CACHE_DROPPING_TYPES:
        length = min(filter(None, (length, original)), default=None)
    return length


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions a (text) configuration names; None for no limit."""
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    return length if length is None or length > 0 else None  # some say -1


def config_json(location: str, revision: str | None) -> str:
    """Return a model's config.json as transformers reads it, as text; empty if there is none.

    Args:
        location: a directory or hub id.
        revision: branch, tag or commit of a hub id.
    """
    try:
        return json.dumps(PreTrainedConfig.get_config_dict(location, revision=revision or "main")[0], sort_keys=True)
    except (OSError, ValueError):
        return ""


def attention_of(config: PreTrainedConfig) -> str:
    """Return the name of the attention implementation that a (text) configuration has."""
    return config._attn_implementation  # transformers has no public name for it


def takes_attention(model: PreTrainedModel) -> bool:
    """Whether a model takes any attention function, and not only those that its own code names."""
    return model.is_backend_compatible()


def attention_settings(model: PreTrainedModel) -> str | dict[str, str]:
    """Return the attention of a model and of its sub-models, in the form that `set_attn_implementation` takes."""
    config = model.config
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    if not parts:
        return attention_of(config)
    return {"": attention_of(config)} | {name: attention_of(part) for name, part in parts.items()}


def of_text_model(model: PreTrainedModel, attention: str) -> str | dict[str, str]:
    """Return a model's attention settings with another attention for the text model.

    Args:
        model: the text model itself, or a model that has it as one of several sub-models.
        attention: name of the text model's attention.

    Returns:
        What `set_attn_implementation` takes; see `attention_settings`.
    """
    settings = attention_settings(model)
    if isinstance(settings, str):
        return attention
    text = model.config.get_text_config()
    name = next((name for name in settings if name and getattr(model.config, name) is text), "")
    return settings | {name: attention}
