"""Models of the GPU studies, by name; they are made in GPU memory, so none is downloaded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import common  # noqa: F401  # makes scripts/ importable
import torch
from inflate_model import inflated
from inflation_shapes import SHAPES
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MixtralConfig, PreTrainedConfig
from transformers.models.glm4.configuration_glm4 import Glm4Config
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from lp_runtime.config.settings import DEMO_MODEL, ModelConfig, RuntimeConfig
from lp_runtime.model.hf.types import CausalLM
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.loading import prepare_model

CONTEXT_TOKENS = 1 << 16  # context of inflated models: more than any study's prefix
UNUSED_TOKEN = 0  # the demo model's end-of-text token, which no prompt contains
GEMMA_12B = {
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
}
RANDOM: dict[
    str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]
] = {  # models with random weights, and their sizes
    # Mixtures of experts: about 5.5B parameters, 12 layers of Qwen3-30B-A3B and of gpt-oss-20b, and a tiny one.
    "experts": (
        MixtralConfig,
        {
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
        },
    ),
    "qwen3_experts": (
        Qwen3MoeConfig,
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "gpt_oss": (GptOssConfig, {"num_hidden_layers": 12, "num_local_experts": 32}),
    "small_experts": (
        MixtralConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    # Other rotations: GLM-4-9B (half of each head, neighbours) and Phi-4-mini (three quarters, halves).
    "glm4": (
        Glm4Config,
        {
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
    ),
    "phi4_mini": (
        Phi3Config,
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    # The shape of Gemma 3 12B, whose windows of 1,024 tokens are in five layers of six; the same without windows; and
    # a tiny one with a window of 64.
    "windows": (Gemma3TextConfig, GEMMA_12B | {"sliding_window": 1024}),
    "no_windows": (Gemma3TextConfig, GEMMA_12B | {"layer_types": ["full_attention"] * 48}),
    "small_windows": (
        Gemma3TextConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 64,
        },
    ),
}


def load_named(name: str, dtype: str, device: torch.device, vocabulary_size: int | None = None) -> CausalLM:
    """Return a model on its device, as transformers would have loaded it.

    Args:
        name: demo; a shape that the demo model is inflated to; a model of RANDOM; or a directory.
        dtype: torch's name without "torch."; auto for the checkpoint's, or float32 for models made here.
        device: where the model is made.
        vocabulary_size: size to which the embedding and the head are padded; None for no padding.
    """
    made_dtype = "float32" if dtype == "auto" else dtype
    if name in RANDOM:
        model = random_model(name, made_dtype, device)
    elif name in SHAPES:
        model = inflated(DEMO_MODEL, SHAPES[name], made_dtype, device)
        model.config.max_position_embeddings = CONTEXT_TOKENS
    else:
        model = load_model(ModelConfig(path=None if name == "demo" else name), device, dtype)
    if vocabulary_size is not None:
        pad_vocabulary(model, vocabulary_size)
    return model


def random_model(name: str, dtype: str, device: torch.device, **changes: int) -> CausalLM:
    """Return a model of RANDOM, which never ends a text; `changes` replace some of its sizes."""
    kind, sizes = RANDOM[name]
    ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    config = kind(**sizes | changes, vocab_size=4096, max_position_embeddings=CONTEXT_TOKENS, **ends)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


@torch.no_grad()
def pad_vocabulary(model: CausalLM, size: int) -> None:
    """Add rows to a model's embedding and head, so that both cost as much as with a larger vocabulary.

    New rows are copies of a token that is never likely, so greedy texts do not change.

    Args:
        model: changed in place; its head is untied.
        size: new number of rows, at least the current one.
    """
    old = model.config.get_text_config().vocab_size
    if size < old:
        raise SystemExit(f"vocabulary={size}: must be at least the model's own {old}")
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    for module in {id(each): each for each in (embedding, head)}.values():
        copies = module.weight[UNUSED_TOKEN].expand(size - old, -1)
        module.weight = nn.Parameter(torch.cat([module.weight, copies]), requires_grad=False)
    head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    embedding.num_embeddings = head.out_features = size
    model.config.get_text_config().vocab_size = size


def runner_of(
    name: str, config: RuntimeConfig, device: torch.device, vocabulary_size: int | None = None
) -> ModelRunner:
    """Return a named model (see `load_named`), fused, captured and checked as the settings say."""
    return prepare_model(load_named(name, config.dtype, device, vocabulary_size), config, device)[0]


def free_memory(device: torch.device) -> None:
    """Release the device memory of deleted models."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
