"""transformers' classes that signatures outside of model/ and sampling/ refer to."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

CausalLM = PreTrainedModel
Tokenizer = PreTrainedTokenizerBase

__all__ = ["CausalLM", "GenerationConfig", "StoppingCriteriaList", "Tokenizer"]
