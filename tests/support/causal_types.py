"""Small random models of all types of transformers' causal LM mapping, run with the drop-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lp_runtime import lookahead_generate
from lp_runtime.errors import LookaheadError
from support.causal_configs import VOCABULARY, small_config

PROMPT_TOKENS, NEW_TOKENS = (1, 12, 70), 48
FIRST_TOKEN = 8  # prompts avoid the lowest token ids, which have a meaning in some types (mostly padding)
NOISE = 0.1  # standard deviation of the noise on parameters that are constant at first
NEAR_TIE = 1e-4  # rounding may swap two logits that are closer than this
FEW_TOKENS = 3  # an output of fewer distinct tokens shows little


class Outcome(NamedTuple):
    """The result of the drop-in on a model.

    Attributes:
        kind: a key of KINDS.
        reason: the reason in one line; empty or a remark if exact.
    """

    kind: str
    reason: str = ""


KINDS = {
    "exact": "the drop-in's tokens are those of `generate`",
    "refused": "the drop-in refuses the model in one line",
    "impossible": "the model cannot be made, or `generate` fails by itself",
    "disputed": "`generate` differs from itself without a cache, which the drop-in agrees with",
    "near tie": "tokens differ where the two best logits hardly do",
    "error": "the drop-in fails otherwise than by one line",
    "wrong": "tokens differ",
}


def small_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random model in float32, in eval mode, in which no parameter is constant.

    Raises:
        Exception: any error of the library if such a model cannot be made.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all():
                parameter += NOISE * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    return model


def outcome_of(
    model_type: str, changes: Mapping[str, Any] | None = None, prompts: Sequence[int] = PROMPT_TOKENS, seed: int = 0
) -> Outcome:
    """Run the drop-in on a small model of a type, with greedy decoding; return the outcome.

    Args:
        model_type: one of TYPES.
        changes: fields of the text part, as `variants_of` gives them.
        prompts: lengths in tokens of the prompts.
        seed: of the weights and prompts.
    """
    try:
        model = small_model(small_config(model_type, changes), seed)
    except Exception as error:  # any error of the library
        return Outcome("impossible", f"not instantiable: {_shown(error)}")
    return compare(model, prompts, seed)


def compare(model: PreTrainedModel, prompts: Sequence[int] = PROMPT_TOKENS, seed: int = 0) -> Outcome:
    """Run the drop-in on prompts; return the outcome of the first prompt that is not exact.

    Args:
        model: in float32, in eval mode.
        prompts: lengths in tokens of the prompts.
        seed: of the prompts.
    """
    rng = torch.Generator().manual_seed(seed)
    most = 0
    for length in prompts:
        prompt = torch.randint(FIRST_TOKEN, VOCABULARY, (1, length), generator=rng)
        try:
            expected = greedy(model, prompt)
        except Exception as error:  # any error of the library
            return Outcome("impossible", f"generate fails: {_shown(error)}")
        try:
            actual = greedy(model, prompt, custom_generate=lookahead_generate, W=7, N=5, G=7)
        except LookaheadError as error:
            is_one_line = len(str(error).splitlines()) == 1 and "Traceback" not in str(error)
            return Outcome("refused" if is_one_line else "error", str(error))
        except Exception as error:  # any other error is a bug of this package
            return Outcome("error", f"{type(error).__name__}: {_shown(error)}")
        if actual != expected:
            return _difference(model, prompt, expected, actual)
        most = max(most, len(set(expected)))
    return Outcome("exact", f"no more than {most} distinct tokens" if most < FEW_TOKENS else "")


def greedy(model: PreTrainedModel, prompt: torch.Tensor, **settings: Any) -> list[int]:
    """Return the new tokens of greedy decoding by `generate`.

    Args:
        model: the model.
        prompt: [1, L] token ids.
        settings: further arguments of `generate`.
    """
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0,
        **settings,
    )  # fmt: skip
    return output[0, prompt.shape[1] :].tolist()


def _difference(model: PreTrainedModel, prompt: torch.Tensor, expected: list[int], actual: list[int]) -> Outcome:
    """Return the outcome if the tokens of `generate` and of the drop-in differ."""
    pairs = list(zip(expected, actual, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    text = torch.cat([prompt, torch.tensor([expected[:first]], dtype=torch.int64)], dim=1)
    where = f"prompt of {prompt.shape[1]}, new token {first}"
    try:
        with torch.inference_mode():
            logits = model(input_ids=text, use_cache=False).logits[0, -1].float()
        uncached = greedy(model, prompt, use_cache=False)
    except Exception as error:  # any error of the library
        return Outcome("wrong", f"{where}; a pass without a cache fails: {_shown(error)}")
    best = logits.topk(2).values
    gap = (best[0] - best[1]).item()
    where += f", the two best logits differ by {gap:.2g}"
    if gap < NEAR_TIE:
        return Outcome("near tie", where)
    return Outcome("disputed" if actual == uncached else "wrong", where)


def _shown(error: Exception) -> str:
    """Return a foreign error as one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
