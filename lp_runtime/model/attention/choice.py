"""Choice of a model's attention: its configured one, or that of tree_attention.py instead."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from lp_runtime.errors import ModelError
from lp_runtime.kernels.dispatch import on
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.hf.config import attention_of, of_text_model
from lp_runtime.model.hf.differences import TOLERANCES, difference_of

ATTENTIONS = ("sdpa", "eager")
NUM_TOKENS = 8  # tokens of the text on which two attentions are compared
SINKS = "sinks"  # name of the parameter in attention blocks with attention sinks


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
    expected = _logits(model) if has_sinks else None
    before = of_text_model(model, attention)
    model.set_attn_implementation(of_text_model(model, TREE))
    if expected is not None and not difference_of(_logits(model), expected) <= TOLERANCES.get(model.dtype, 0.0):
        model.set_attn_implementation(before)
        return attention
    return TREE


@torch.inference_mode()
def _logits(model: PreTrainedModel) -> torch.Tensor:
    size = model.config.get_text_config().vocab_size
    ids = torch.arange(1, NUM_TOKENS + 1, device=model.device)[None] % size
    with on(model.device):
        return model(input_ids=ids, use_cache=False).logits[0].float()
