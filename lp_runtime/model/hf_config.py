"""What a model's class and configuration say of it: its context, its attention."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.model.rotary_lengths import RotaryLengths

CACHE_DROPPING_TYPES = ("phi3", "phi4_multimodal")  # their prepare_inputs_for_generation drops the cache


def context_length(config: PreTrainedConfig, lengths: RotaryLengths) -> int | None:
    """Return how many positions a sequence may have; None if the model sets no limit.

    Rotary factors that change with the length do so for all tokens of a pass, which a tree's are no text of. A model in
    which that stands as it is (lengths without tables) is used up to the length at which they change. So are types
    whose cache `generate` drops there.

    Args:
        config: the model's (text) configuration.
        lengths: at which the rotary factors change, where each token has those of its own length.
    """
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    length = length if length is None or length > 0 else None  # some say -1
    if lengths.tables:
        return length and max(length, *(threshold + num_rows - 1 for threshold, num_rows in lengths.tables))
    return min(filter(None, (length, *_original_lengths(config))), default=None)


def _original_lengths(config: PreTrainedConfig) -> list[int | None]:
    """Return the lengths that a model was first trained with, where more than those must not be fed to it."""
    original = getattr(config, "original_max_position_embeddings", None)
    lengths = [original] if config.model_type in CACHE_DROPPING_TYPES else []
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if "longrope" in (parameters.get("rope_type"), parameters.get("type")):
            lengths.append(parameters.get("original_max_position_embeddings") or original)
    return lengths


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
