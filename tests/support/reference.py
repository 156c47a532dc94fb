"""Real prompts and their greedy outputs by transformers: the reference for all launchers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lp_runtime import SamplingConfig

MAX_NEW_TOKENS = 32
SAMPLING = SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=11)
PROMPTS = [
    '''from typing import List


def has_close_elements(numbers: List[float], threshold: float) -> bool:
    """Check if in given list of numbers, are any two numbers closer to each other than the given threshold."""
    for index, number in enumerate(numbers):
''',
    """class Stack:
    def __init__(self):
        self._items = []

    def push(self, item):
""",
    "import os\n",
]


def greedy(model_dir: Path, prompts: list[str] = PROMPTS, max_new_tokens: int = MAX_NEW_TOKENS) -> list[list[int]]:
    """Return the new token ids of greedy `generate` in float32, without a stop at end-of-sequence tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    outs = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=None,
            max_new_tokens=max_new_tokens,
            eos_token_id=-1,  # no token
            pad_token_id=0,
        )
        outs.append(out[0, ids.shape[1] :].tolist())
        assert len(outs[-1]) == max_new_tokens
    return outs
