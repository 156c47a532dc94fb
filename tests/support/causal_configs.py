"""Small configurations of every type of transformers' causal LM mapping.

They are made from the library's classes. Rules by field name shrink the fields, so that a new type needs no entry here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
DEFAULT = "default"
VOCABULARY, HIDDEN, LAYERS, CONTEXT_TOKENS = 97, 32, 4, 512
SLIDING = "sliding_attention"
SHORT_TOKENS = (8, 40)  # of windows, chunks and thresholds: below the self-check's shortest prompt, and above it
SHARED = {"num_kv_shared_layers": 2, "layer_types": [SLIDING, "full_attention"] * 2, "sliding_window": SHORT_TOKENS[0]}

# The largest value of a field by its name. The first pattern that matches decides; None keeps the default.
SIZES: tuple[tuple[str, int | None], ...] = (
    (r"^(n_|num_)?(mel|codebooks|channels|langs)|^encoder_hash|kernel|conv|ngram|patch|image_|merge_size", None),
    (r"token_id$|token_index$|_index$|token_ids$|_factor$|tokens_per_|mtp|nextn", None),
    (r"vocab", VOCABULARY),
    (r"_period$|_interval$|_pattern$|^layer_group_size$|every_n_layers$|^interleave_moe|^max_window_layers$", 2),
    (
        r"_offset$|_dense_replace$|dense_layers$|^moe_layer_start|^topk_group$|^n_groups?$|^num_expert_group$|ngroups$",
        1,
    ),
    (r"^num_kv_shared_layers$", 0),
    (r"^(.*_)?n?_?(layers?|blocks)$|^moe_layer_end", LAYERS),
    (r"key_value_heads$|kv_heads$|^linear_num_key_heads$", 2),
    (r"heads?$", 4),
    (r"head_?dim$|^dim_head$|^d_head$|^d_kv$|kv_channels|rotary_dim|head_size$|_d_head$|pre_attn_scalar", 8),
    (r"_rank$|lowrank$|_state$|state_size$|^d_rel$", 8),
    (r"per_tok(en)?$|^moe_k$|^moe_topk$", 2),
    (r"experts$|^zero_expert_num$", 4),
    (r"per_layer_input$|ple_embed_dim", 8),
    (r"intermediate_size|ffn|_ff$|^dff$|feed_forward_size|inner$", 48),
    (r"hidden_size|d_model|n_embd|emb_dim|embed_dim|embedding_(size|dim)|model_base$|_d_ssm$|proj_dim|mid_dim", HIDDEN),
    (
        r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|model_max_length)$",
        CONTEXT_TOKENS,
    ),
)
# Names of lengths over positions or keys: windows, chunks, thresholds.
LENGTHS = re.compile(
    r"window(_size|_len)?$|chunk_(size|length)$|floor(_scale)?$|extent$|^block_size$|^index_(topk|block_size)$|mem_len$"
    r"|^original_max_position_embeddings$|^local_attention$|max_distance$"
)
NO_LENGTHS = re.compile(r"time_step|mamba|audio|_init_")
CHOICES = {
    "use_sliding_window": True,
    "is_decoder": True,
    "attn_temperature_tuning": True,
    "tie_word_embeddings": False,  # a small model with tied embeddings repeats its last token
}
# Fields without a default that some types need.
UNSET = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
SCALES = {"initializer_range": 0.3, "init_std": 0.3, "initializer_std": 0.3, "attn_scale": 0.5}
ROPE_LENGTH = "original_max_position_embeddings"  # a separate field, or one of RoPE's parameters
# Other variants, by type and name.
EXTRA_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "falcon": {"ALiBi": {"alibi": True}},
    "llama4_text": {"no scaled queries": {"attn_temperature_tuning": False, "attention_chunk_size": 40}},
    "llama": {"dynamic RoPE": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}},
    "mpt": {"no ALiBi": {"attn_config": {"alibi": False}}},
    "nemotron_h": {"no Mamba": {"layers_block_type": ["full_attention", "mlp"] * 2}},
    "phi3": {
        "long RoPE": {
            ROPE_LENGTH: 96,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                ROPE_LENGTH: 96,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
            },
        }
    },
}
TOKEN_IDS = ("bos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")
# Fields that the rules by name get wrong, by type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": LAYERS},  # counted for the cache, though there is no encoder
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", SLIDING)}
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": (8, HIDDEN - 8), "num_buckets": 4},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}


def variants_of(model_type: str) -> dict[str, dict[str, Any]]:
    """Return the variants of a type's small configuration: by name, the fields set in the text part.

    In addition to DEFAULT, there is a variant for each field that may be a length and each of SHORT_TOKENS, one with
    shared layers if the type has them, and those of EXTRA_VARIANTS.

    Args:
        model_type: one of TYPES.
    """
    text_class = _text_class(CONFIG_MAPPING[model_type])
    variants: dict[str, dict[str, Any]] = {DEFAULT: {}}
    defaults = _defaults(text_class)
    names = [name for name, default in defaults.items() if _may_be_length(name, default)]
    if ROPE_LENGTH not in names and ROPE_LENGTH in (_rope_of(text_class) or {}):
        names.append(ROPE_LENGTH)
    for name in names:
        variants |= {f"{name}={tokens}": {name: tokens} for tokens in SHORT_TOKENS}
    if "num_kv_shared_layers" in defaults:
        variants["shared layers"] = SHARED
    return variants | EXTRA_VARIANTS.get(model_type, {})


def small_config(model_type: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return the configuration of a model of a few thousand weights.

    Args:
        model_type: one of TYPES.
        changes: fields of the text part, as `variants_of` gives them.

    Raises:
        Exception: any error of the library if such a configuration cannot be made.
    """
    config_class = CONFIG_MAPPING[model_type]
    return _small(config_class, _text_class(config_class), changes or {})


def _defaults(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the declared default of each field of a configuration class."""
    return {field.name: field.default for field in dataclasses.fields(config_class)}


def _may_be_length(name: str, default: object) -> bool:
    """Whether a field of a configuration may be a length over positions or keys."""
    is_number = default is None or (isinstance(default, int) and not isinstance(default, bool))
    return is_number and bool(LENGTHS.search(name)) and not NO_LENGTHS.search(name)


def _part_class(config_class: type[PreTrainedConfig], name: str) -> type[PreTrainedConfig]:
    """Return the class of a part of a composite configuration."""
    part = config_class.sub_configs[name]
    return type(getattr(config_class(), name)) if part is AutoConfig else part


def _text_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the class of the text part of a configuration class; the class itself if it has none."""
    if "text_config" not in config_class.sub_configs:
        return config_class
    try:
        return _part_class(config_class, "text_config")
    except Exception:  # the library's default is invalid: making a configuration raises the error
        return config_class


def _rope_of(config_class: type[PreTrainedConfig]) -> dict[str, Any] | None:
    """Return RoPE's parameters in a class's default configuration; None if it has none."""
    try:
        return getattr(config_class(), "rope_parameters", None)
    except Exception:  # the library's default is invalid: making a configuration raises the error
        return None


def _small(
    config_class: type[PreTrainedConfig], text_class: type[PreTrainedConfig], changes: Mapping[str, Any]
) -> PreTrainedConfig:
    """Return a small configuration of a class, with small parts; only the text class gets the changes."""
    fields: dict[str, Any] = {"eos_token_id": None}
    for name, default in _defaults(config_class).items():
        value = _shrunk(name, default)
        if value is not default:
            fields[name] = value
    if "kv_lora_rank" in fields:  # every head has its own keys
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name in config_class.sub_configs:
        part_class = _part_class(config_class, name)
        if issubclass(part_class, PreTrainedConfig):
            fields[name] = _small(part_class, text_class, changes)
    fields |= OVERRIDES.get(config_class.model_type, {})
    if config_class is text_class:
        fields |= changes
    config = config_class(**fields)
    if config_class is text_class and (further := _further(config, changes)):
        config = config_class(**fields | further)
    return config


def _shrunk(name: str, default: Any) -> Any:
    """Return the value of a field in a small configuration; the default object if it does not change."""
    if name in CHOICES or name in SCALES:
        return (CHOICES | SCALES)[name]
    if default is None:
        return UNSET.get(name)
    if not isinstance(default, int) or isinstance(default, bool):
        return default
    if name in TOKEN_IDS:
        return default if default < VOCABULARY else 1
    for pattern, largest in SIZES:
        if re.search(pattern, name):
            return default if largest is None else min(default, largest)
    return default


def _further(config: PreTrainedConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that mix sliding and full layers, and that set RoPE's length as in the changes."""
    fields: dict[str, Any] = {}
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds) == {SLIDING}:
        fields["layer_types"] = [SLIDING, "full_attention"] * (len(kinds) // 2)
    rope = getattr(config, "rope_parameters", None)
    if rope and ROPE_LENGTH in rope and ROPE_LENGTH in changes:
        fields["rope_parameters"] = rope | {ROPE_LENGTH: changes[ROPE_LENGTH]}
    return fields
