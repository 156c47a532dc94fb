"""Which attention a model is run with."""

from __future__ import annotations

from transformers import PreTrainedModel

from lp_runtime.errors import ModelError
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.hf_config import attention_of, of_text_model, takes_attention

ATTENTIONS = ("sdpa", "eager")


def choose_attention(model: PreTrainedModel, own: bool) -> str:
    """Return the attention that a model has, after it was given ours where that is wanted and possible.

    Args:
        model: the loaded model.
        own: whether to give it the attention of tree_attention.py in place of sdpa, for good.

    Raises:
        ModelError: if the model's attention does not take a tree's mask.
    """
    attention = attention_of(model.config.get_text_config())
    if attention not in (*ATTENTIONS, TREE):
        raise ModelError(f"attn_implementation={attention}: must be one of {', '.join(ATTENTIONS)}")
    if own and attention == "sdpa" and takes_attention(model):
        model.set_attn_implementation(of_text_model(model, TREE))
        return TREE
    return attention
