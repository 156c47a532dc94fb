"""Random configurations of common families: everything that attention depends on is random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NUM_LAYERS = 3
FULL, SLIDING = "full_attention", "sliding_attention"
SHORT_LENGTHS = (4, 8, 16, 24, 40)  # of windows, in tokens: below the text's length
ROPES: dict[str, dict[str, Any]] = {  # in addition to rope_theta
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def _common(rng: random.Random) -> dict[str, Any]:
    """Return numbers of heads, and the fields that all families have."""
    heads, groups = rng.choice([(4, 4), (4, 2), (4, 1), (6, 3), (2, 1)])
    return {
        "hidden_size": 8 * heads,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 512,
        "tie_word_embeddings": rng.random() < 0.5,
    }


def _rope(rng: random.Random) -> dict[str, Any]:
    """Return rotary embeddings of a random kind."""
    kind = rng.choice(list(ROPES))
    return {"rope_parameters": {"rope_type": kind, "rope_theta": rng.choice([100.0, 1e4, 5e5]), **ROPES[kind]}}


def _bias(rng: random.Random) -> dict[str, Any]:
    """Return whether projections have biases."""
    return {"attention_bias": rng.random() < 0.5}


def _head_dim(rng: random.Random) -> dict[str, Any]:
    """Return a head size that is independent of the hidden size."""
    return {"head_dim": rng.choice([4, 8, 16])}


def _window(rng: random.Random) -> dict[str, Any]:
    """Return one sliding window for all layers, or none."""
    return {"sliding_window": rng.choice([None, *SHORT_LENGTHS])}


def _mixed(rng: random.Random) -> dict[str, Any]:
    """Return layers of both kinds, and their sliding window."""
    kinds = [FULL, SLIDING, *(rng.choice([FULL, SLIDING]) for _ in range(NUM_LAYERS - 2))]
    rng.shuffle(kinds)
    return {"layer_types": kinds, "sliding_window": rng.choice(SHORT_LENGTHS)}


def _scaled(rng: random.Random) -> dict[str, Any]:
    """Return a scale of the scores."""
    return {"query_pre_attn_scalar": rng.choice([4, 8, 32])}


def _capped(rng: random.Random) -> dict[str, Any]:
    """Return soft caps of scores and logits."""
    return {"attn_logit_softcapping": rng.choice([None, 2.0, 50.0]), "final_logit_softcapping": rng.choice([None, 5.0])}


def _experts(rng: random.Random) -> dict[str, Any]:
    """Return numbers of experts."""
    return {"num_local_experts": rng.choice([2, 4]), "num_experts_per_tok": rng.choice([1, 2])}


def _partial(rng: random.Random) -> dict[str, Any]:
    """Return rotary embeddings of a part of each head, and whether attention and MLP are parallel."""
    part = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])}
    return {"use_parallel_residual": rng.random() < 0.5, "rope_parameters": part}


def _multipliers(rng: random.Random) -> dict[str, Any]:
    """Return a scale of the scores, and one of residuals."""
    return {"attention_multiplier": rng.choice([0.1, 0.35, 1.0]), "residual_multiplier": rng.choice([0.5, 1.0])}


Part = Callable[[random.Random], dict[str, Any]]
FAMILIES: dict[str, tuple[Part, ...]] = {
    "llama": (_common, _rope, _bias, _head_dim),
    "mistral": (_common, _rope, _head_dim, _window),
    "mixtral": (_common, _rope, _window, _experts),
    "qwen2": (_common, _rope, lambda rng: _mixed(rng) | {"use_sliding_window": True}),
    "qwen3": (_common, _rope, _bias, _head_dim, lambda rng: _mixed(rng) | {"use_sliding_window": True}),
    "gemma2": (_common, _head_dim, _mixed, _scaled, _capped),
    "gemma3_text": (_common, _head_dim, _mixed, _scaled),
    "granite": (_common, _rope, _bias, _multipliers),
    "gpt_neox": (_common, _partial, _bias),
    "olmo2": (_common, _rope, _bias),
}


def random_fields(family: str, rng: random.Random) -> dict[str, Any]:
    """Return random fields of the configuration of a family in FAMILIES."""
    fields: dict[str, Any] = {}
    for part in FAMILIES[family]:
        fields |= part(rng)
    return fields
