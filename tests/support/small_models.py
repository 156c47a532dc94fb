"""Small random models of many families, for tests and measurements.

They are of transformers' classes and have a few thousand weights. Attention windows are smaller than the sequences that
are decoded, so that every kind of layer matters.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPE_THRESHOLD = 32  # text length beyond which the rotary factors of DYNAMIC and LONG change
DYNAMIC = {
    "max_position_embeddings": ROPE_THRESHOLD,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
LONG = {
    "original_max_position_embeddings": ROPE_THRESHOLD,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": ROPE_THRESHOLD,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 5.0, 8.0],
    },
}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# By our name: transformers' name, and settings in addition to SHAPE.
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mixtral": ("Mixtral", {"sliding_window": 8, **EXPERTS}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, **SLIDING}),
    "gemma3": ("Gemma3", {"head_dim": 8, **SLIDING}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "phi3_longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
            },
        },
    ),
    "gpt2": ("GPT2", {}),
    "gpt_bigcode": ("GPTBigCode", {}),
    "gptj": ("GPTJ", {"rotary_dim": 8}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_oss": ("GptOss", {"head_dim": 8, **EXPERTS, **SLIDING}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "falcon": ("Falcon", {"alibi": False, "num_kv_heads": 2}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "stablelm": ("StableLm", {}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "granite": ("Granite", {}),
    "smollm3": ("SmolLM3", {}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "exaone4": ("Exaone4", {"sliding_window": 8}),
    "llama4": (
        "Llama4",
        {
            "attention_chunk_size": 8,
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": False,
        },
    ),
}
# Models that must be refused, and a part of the reason that the error names.
REFUSED: dict[str, tuple[str, dict, str]] = {
    "bloom": ("Bloom", {}, "ALiBi"),
    "falcon_alibi": ("Falcon", {"alibi": True}, "ALiBi"),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "ALiBi"),
    "gpt_neo": (
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
        "layers of type local have window_size=8",
    ),
    "mamba": ("Mamba", {"state_size": 8}, "carry a state from token to token"),
    "rwkv": ("Rwkv", {}, "carry a state from token to token"),
    "doge": ("Doge", {"keep_window_size": 64}, "keeps the best keep_window_size=64 of all keys"),
    "llama4_scaled": ("Llama4", {"no_rope_layers": [1, 0], "floor_scale": 100}, "floor_scale=100"),
    "openai_gpt": ("OpenAIGPT", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "has no KV cache"),
    "jamba": ("Jamba", {}, "carry a state from token to token"),
    "recurrent_gemma": ("RecurrentGemma", {}, "cannot be fed a token tree"),
    "qwen3_next": ("Qwen3Next", {}, "carry a state from token to token"),
}


def random_model(name: str = "Llama", seed: int = 0, attention: str | None = None, **settings: Any) -> PreTrainedModel:
    """Return a random causal LM in float32, in eval mode.

    Args:
        name: of the architecture, as in LlamaConfig.
        seed: of the weights.
        attention: the model's attn_implementation; None for the library's choice.
        settings: of the model's configuration, in addition to SHAPE.
    """
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**(SHAPE | settings))
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()
