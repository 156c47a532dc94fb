"""Classes of transformers that signatures outside of model/ and sampling/ name."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

CausalLM = PreTrainedModel
Tokenizer = PreTrainedTokenizerBase

__all__ = ["CausalLM", "GenerationConfig", "StoppingCriteriaList", "Tokenizer"]
