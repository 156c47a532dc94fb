"""Does sampling follow the model's distribution? Chi-square tests of drawn tokens against transformers' probabilities.

    python benchmarks/distribution.py                        # 20,000 seeds a row, about 10 minutes on 2 cores
    python benchmarks/distribution.py --seeds 2000

Of the first new token on the trained model, and of the third on a random model of 64 token ids, where the exact
distribution is summed over all 4,096 prefixes. The expected probabilities come from transformers alone: logits of plain
forward passes, through its own processors, and a softmax. Each row is repeated with a sampler that is wrong on purpose,
which the same test must reject:

    cold       the noise is scaled by 0.9: a first token of a wrong distribution
    frozen     the noise of every position is that of one position: right token by token, but not independent
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence

import torch
from common import machine, markdown
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from lp_runtime import LookaheadConfig, ModelConfig, SamplingConfig
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.request import Request
from lp_runtime.engine.sampler_factory import make_sampler
from lp_runtime.model.loader import load_model, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.hf_settings import build_processors

CPU = torch.device("cpu")
SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
)
LOOKAHEAD = LookaheadConfig(W=4, N=3, G=4)
LEAST_EXPECTED = 5.0  # rarer tokens are counted together, as the test needs


class ColdNoise(GumbelNoise):
    """Wrong on purpose: less noise than there should be."""

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        return 0.9 * super().at(positions)


class FrozenNoise(GumbelNoise):
    """Wrong on purpose: the same noise at every position."""

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        return super().at([0] * len(positions))


SAMPLERS = {"right": GumbelNoise, "cold": ColdNoise, "frozen": FrozenNoise}


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The p-value of observed counts [V] under probabilities [V]; rare outcomes are merged into one."""
    expected = probabilities.double() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token was drawn that has no probability"
    common = expected >= LEAST_EXPECTED
    observed = torch.cat([counts[common].double(), counts[~common].double().sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    if expected[-1] < LEAST_EXPECTED:  # even together too rare: into the smallest of the others
        last = expected[:-1].argmin()
        observed[last], expected[last] = observed[last] + observed[-1], expected[last] + expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(degrees, statistic / 2).item()


def probabilities_after(model, sampling: SamplingConfig, texts: torch.Tensor) -> torch.Tensor:
    """[n, V] of the token after each text [n, L], by transformers alone."""
    processors: LogitsProcessorList = build_processors(model, texts[0].tolist(), sampling, 8, ())
    with torch.inference_mode():
        logits = model(input_ids=texts).logits[:, -1].float()
    return processors(texts, logits).double().softmax(-1)


def third_token(model, sampling: SamplingConfig, prompt: list[int]) -> torch.Tensor:
    """[V] exact probabilities of the third new token: the sum over all first and second ones."""
    size = model.config.vocab_size
    start = torch.tensor([prompt])
    first = probabilities_after(model, sampling, start)[0]
    ids = torch.arange(size)
    after_one = torch.cat([start.expand(size, -1), ids[:, None]], dim=1)
    second = probabilities_after(model, sampling, after_one)  # [V, V]
    after_two = torch.cat([after_one.repeat_interleave(size, 0), ids.repeat(size)[:, None]], dim=1)
    third = probabilities_after(model, sampling, after_two).view(size, size, size)
    return torch.einsum("a,ab,abc->c", first, second, third)


def draw_tokens(
    model, sampling: dict, prompt: Sequence[int], num_seeds: int, position: int, noise: type[GumbelNoise]
) -> torch.Tensor:
    """[V] how often each token was drawn as new token `position` (from 0), over seeds 0, 1, ..."""
    tree_model = ModelRunner(model, prefill_chunk=2048)
    loop = Engine(tree_model, 0, 1, CPU)
    found: Counter[int] = Counter()
    first = Request(tuple(prompt), LOOKAHEAD, position + 1, sampling=SamplingConfig(**sampling, seed=0))
    drawing = make_sampler(tree_model, first)
    for seed in range(num_seeds):
        drawing.noise = noise(seed, 0, tree_model.vocabulary_size, CPU)
        tokens = [token for run in list(loop.run(first, drawing))[:-1] for token in run.token_ids]
        found[tokens[position]] += 1
    counts = torch.zeros(tree_model.vocabulary_size, dtype=torch.int64)
    for token, count in found.items():
        counts[token] = count
    return counts


def first_token_of_a_prompt(config: ModelConfig, text: str):
    """(model, prompt, function of the settings that gives the expected [V] probabilities)"""
    model = load_model(config, CPU, "float32")
    prompt = load_tokenizer(config)(text).input_ids
    return model, prompt, lambda sampling: probabilities_after(model, sampling, torch.tensor([prompt]))[0]


def third_token_of_a_small_model():
    """As above, for a random model of 64 token ids, whose logits are spread widely."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.25, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = load_model(ModelConfig(path=folder), CPU, "float32")
    prompt = [1, 2, 3, 1, 2]
    return model, prompt, lambda sampling: third_token(model, sampling, prompt)


def rows(num_seeds: int, model_path: str | None = None, settings: Sequence[dict] = SETTINGS) -> list[list]:
    """A row a case: what, settings, sampler, p-value."""
    first = first_token_of_a_prompt(ModelConfig(path=model_path), "def fib(n):\n    return ")
    cases = [("first token, trained model", 0, *first), ("third token, 64 ids", 2, *third_token_of_a_small_model())]
    found = []
    for what, position, model, prompt, expected_of in cases:
        for sampling in settings:
            expected = expected_of(SamplingConfig(**sampling))
            for name in ("right", "frozen" if position else "cold"):
                counts = draw_tokens(model, sampling, prompt, num_seeds, position, SAMPLERS[name])
                found.append([what, sampling, name, chi_square(counts, expected)])
                print(*found[-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="directory or hub id; the demo model if not given")
    parser.add_argument("--seeds", type=int, default=20_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(args.seeds, args.model)
    table = [[what, ", ".join(f"{k} {v}" for k, v in s.items()), name, f"{p:.3g}"] for what, s, name, p in found]
    print(f"{machine()}; {args.seeds} seeds a row\n")
    print(markdown(["token", "settings", "sampler", "p-value"], table))
    right = [p for *_, name, p in found if name == "right"]
    wrong = [p for *_, name, p in found if name != "right"]
    sys.exit(0 if min(right) > 1e-3 and max(wrong) < 1e-4 else 1)


if __name__ == "__main__":
    main()
