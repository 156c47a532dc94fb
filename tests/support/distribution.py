"""Chi-square tests of sampled tokens against transformers' probabilities.

The tokens are the first new one on the trained model, and the third on a random model of 64 token ids, where the exact
distribution is summed over all 4,096 prefixes. The expected probabilities come from transformers alone: logits of plain
forward passes, through its own processors, and a softmax. Each test is repeated with a sampler that is wrong on
purpose.
Used by tests/sampling/test_distribution.py and by `benchmarks/correctness.py distribution`.
Letters: V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel

from lp_runtime import LookaheadConfig, ModelConfig, SamplingConfig
from lp_runtime.decoder.sampler_factory import make_sampler
from lp_runtime.distributed.transport.group import CPU
from lp_runtime.model.loading.loader import load_model, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.hf_settings import build_processors
from support.engines import engine_of

SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
)
LOOKAHEAD = LookaheadConfig(W=4, N=3, G=4)
MIN_EXPECTED = 5.0  # rarer tokens are counted together, as the test requires
RIGHT = "right"  # the correct sampler


class ColdNoise(GumbelNoise):
    """Wrong on purpose: less noise than there should be."""

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        return 0.9 * super().at(positions)


class FrozenNoise(GumbelNoise):
    """Wrong on purpose: the same noise at every position."""

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        return super().at([0] * len(positions))


SAMPLERS = {RIGHT: GumbelNoise, "cold": ColdNoise, "frozen": FrozenNoise}


@dataclass(frozen=True)
class Case:
    """A token whose distribution is known.

    Attributes:
        token: which token, in words.
        position: index of the token among the new ones.
        prompt: token ids.
        expected: maps sampling settings to the token's [V] probabilities.
    """

    token: str
    position: int
    model: PreTrainedModel
    prompt: list[int]
    expected: Callable[[SamplingConfig], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """The result of one test.

    Attributes:
        token: which token.
        sampling: the settings.
        sampler: a key of SAMPLERS.
        p_value: of the sampled tokens.
    """

    token: str
    sampling: Mapping[str, float]
    sampler: str
    p_value: float


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of observed counts under probabilities; rare outcomes are merged into one.

    Args:
        counts: [V] how often each outcome was seen.
        probabilities: [V] expected probabilities.
    """
    expected = probabilities.double() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token was sampled that has no probability"
    common = expected >= MIN_EXPECTED
    if not common.any():  # too few samples to tell anything
        return 1.0
    observed = torch.cat([counts[common].double(), counts[~common].double().sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    if expected[-1] < MIN_EXPECTED:  # too rare even together: add them to the smallest of the others
        last = expected[:-1].argmin()
        observed[last], expected[last] = observed[last] + observed[-1], expected[last] + expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(degrees, statistic / 2).item()


def probabilities_after(model: PreTrainedModel, sampling: SamplingConfig, texts: torch.Tensor) -> torch.Tensor:
    """Return [n, V] probabilities of the token after each text, by transformers alone.

    Args:
        model: the model.
        sampling: the settings.
        texts: [n, L] token ids.
    """
    processors: LogitsProcessorList = build_processors(model, texts[0].tolist(), sampling, 8, ())
    with torch.inference_mode():
        logits = model(input_ids=texts).logits[:, -1].float()
    return processors(texts, logits).double().softmax(-1)


def third_token(model: PreTrainedModel, sampling: SamplingConfig, prompt: Sequence[int]) -> torch.Tensor:
    """Return [V] exact probabilities of the third new token: the sum over all first and second tokens."""
    size = model.config.vocab_size
    start = torch.tensor([list(prompt)])
    first = probabilities_after(model, sampling, start)[0]
    ids = torch.arange(size)
    after_one = torch.cat([start.expand(size, -1), ids[:, None]], dim=1)
    second = probabilities_after(model, sampling, after_one)  # [V, V]
    after_two = torch.cat([after_one.repeat_interleave(size, 0), ids.repeat(size)[:, None]], dim=1)
    third = probabilities_after(model, sampling, after_two).view(size, size, size)
    return torch.einsum("a,ab,abc->c", first, second, third)


def sample_tokens(case: Case, sampling: Mapping[str, float], num_seeds: int, noise: type[GumbelNoise]) -> torch.Tensor:
    """Return [V] how often each token was sampled, over seeds 0 to num_seeds - 1.

    Args:
        sampling: settings of SamplingConfig.
        noise: class of a sample's noise.
    """
    model = ModelRunner(case.model, prefill_chunk=2048)
    engine = engine_of(model)
    actual: Counter[int] = Counter()
    config = SamplingConfig(**sampling, seed=0)
    request = Request(tuple(case.prompt), LOOKAHEAD, case.position + 1, sampling=config)
    sampler = make_sampler(model, request)
    for seed in range(num_seeds):
        *outputs, _ = engine.run(request, replace(sampler, noise=noise(seed, 0, model.vocabulary_size, CPU)))
        actual[[token for output in outputs for token in output.token_ids][case.position]] += 1
    counts = torch.zeros(model.vocabulary_size, dtype=torch.int64)
    for token, count in actual.items():
        counts[token] = count
    return counts


def first_token_of_a_prompt(config: ModelConfig, text: str) -> Case:
    """Return the case of a model's first new token."""
    model = load_model(config, CPU, "float32")
    prompt = load_tokenizer(config)(text).input_ids

    def expected(sampling: SamplingConfig) -> torch.Tensor:
        return probabilities_after(model, sampling, torch.tensor([prompt]))[0]

    return Case("first token, trained model", 0, model, prompt, expected)


def third_token_of_a_small_model() -> Case:
    """Return the case of the third new token of a random model of 64 token ids with widely spread logits."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.25, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = load_model(ModelConfig(path=folder), CPU, "float32")
    prompt = [1, 2, 3, 1, 2]
    return Case("third token, 64 ids", 2, model, prompt, lambda sampling: third_token(model, sampling, prompt))


def chi_square_rows(
    num_seeds: int, model_path: str | None = None, settings: Sequence[Mapping[str, float]] = SETTINGS
) -> Iterator[Row]:
    """Test every case with every setting, with the right sampler and with one that is wrong.

    Args:
        num_seeds: samples of each test.
        model_path: directory or hub id of the trained model; None for the demo model.
        settings: of SamplingConfig.

    Yields:
        a row per test.
    """
    first = first_token_of_a_prompt(ModelConfig(path=model_path), "def fib(n):\n    return ")
    for case in (first, third_token_of_a_small_model()):
        for sampling in settings:
            expected = case.expected(SamplingConfig(**sampling))
            for name in (RIGHT, "frozen" if case.position else "cold"):
                counts = sample_tokens(case, sampling, num_seeds, SAMPLERS[name])
                yield Row(case.token, sampling, name, chi_square(counts, expected))
