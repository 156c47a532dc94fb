"""Choice of a model's attention: its configured one, or that of tree_attention.py instead."""

from __future__ import annotations

import random
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from lp_runtime.errors import ModelError
from lp_runtime.kernels.dispatch import on
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.hf.config import attention_of, of_text_model
from lp_runtime.model.hf.differences import TOLERANCES, lasting_difference, row_differences

ATTENTIONS = ("sdpa", "eager")
NUM_TOKENS = 8  # tokens of the text on which two attentions are compared
SINKS = "sinks"  # name of the parameter in attention blocks with attention sinks

Settings = str | dict[str, str]  # of `set_attn_implementation`


def choose_attention(model: PreTrainedModel, own_attention: bool) -> str:
    """Replace a model's attention by that of tree_attention.py where possible; return the resulting name."""
    attention = attention_of(model.config.get_text_config())
    if attention not in (*ATTENTIONS, TREE):
        raise ModelError(f"attn_implementation={attention}: must be one of {', '.join(ATTENTIONS)}")
    if not own_attention or attention == TREE or not model.is_backend_compatible():
        return attention
    has_sinks = any(isinstance(getattr(module, SINKS, None), nn.Parameter) for module in model.modules())
    # eager may have been configured on purpose, except with attention sinks: transformers offers these no other.
    if attention == "eager" and not has_sinks:
        return attention
    before = of_text_model(model, attention)
    ours = of_text_model(model, TREE)
    if has_sinks:
        worst = lasting_difference(partial(_differences, model, before, ours), 0, model.dtype)
        if not worst <= TOLERANCES.get(model.dtype, 0.0):
            model.set_attn_implementation(before)
            return attention
    model.set_attn_implementation(ours)
    return TREE


@torch.inference_mode()
def _differences(model: PreTrainedModel, before: Settings, ours: Settings, rng: random.Random) -> list[float]:
    """Return the relative difference of the logits of each token of a random text with two attentions."""
    size = model.config.get_text_config().vocab_size
    ids = torch.tensor([[rng.randrange(size) for _ in range(NUM_TOKENS)]], device=model.device)
    logits = []
    for attention in (before, ours):
        model.set_attn_implementation(attention)
        with on(model.device):
            logits.append(model(input_ids=ids, use_cache=False).logits[0].float())
    return row_differences(logits[1], logits[0])
