"""What a model's class and configuration say of it: its context, its attention."""

from __future__ import annotations


def context_length(config) -> int | None:
    """Positions that a text may have; None if the model sets no limit.

    Long RoPE takes other rotary factors for a whole pass as soon as one position in it is beyond the original context,
    so what a token gives would depend on what else is fed; such a model is used within its original context.
    """
    length = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if "longrope" in (parameters.get("rope_type"), parameters.get("type")):
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            length = min(filter(None, (length, original)), default=None)
    return length


def takes_attention(model) -> bool:
    """Whether a model takes any attention function, and not only those that its own code names."""
    return bool(getattr(model, "_supports_attention_backend", False))


def attention_settings(model) -> str | dict[str, str]:
    """The attention of a model and of its sub-models, in the form that `set_attn_implementation` takes."""
    config = model.config
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    if not parts:
        return config._attn_implementation
    return {"": config._attn_implementation} | {name: part._attn_implementation for name, part in parts.items()}


def of_text_model(model, attention: str) -> str | dict[str, str]:
    """The same with another attention for the model of text, which may be one of several sub-models."""
    settings = attention_settings(model)
    if isinstance(settings, str):
        return attention
    text = model.config.get_text_config()
    name = next((name for name in settings if name and getattr(model.config, name) is text), "")
    return settings | {name: attention}
