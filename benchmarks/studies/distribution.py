"""Chi-square tests of sampled tokens against transformers' probabilities.

    python benchmarks/correctness.py distribution   # 20,000 seeds a row, 10 minutes on 2 cores
    python benchmarks/correctness.py distribution --seeds 2000

The tokens are the first new token on the trained model, and the third on a random model of 64 token ids, where the
exact distribution is summed over all 4,096 prefixes. The expected probabilities come from transformers alone: logits of
plain forward passes, its own processors, and a softmax. Each row is repeated with samplers that are deliberately wrong,
which the test must reject:

    cold       the noise is scaled by 0.9: the distribution of the first token is wrong
    frozen     every position uses the noise of one position: each token is right by itself, but they are dependent

The exit status is 1 if a right sampler is rejected (p <= 1e-3) or a wrong one is not (p >= 1e-4).
"""

from __future__ import annotations

import argparse

import torch
from common import Results, add_model_argument
from support.distribution import RIGHT, SETTINGS, chi_square_rows

MIN_RIGHT_P = 1e-3
MAX_WRONG_P = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_model_argument(parser)
    parser.add_argument("--seeds", type=int, default=20_000)


def run(args: argparse.Namespace) -> int:
    """Test every sampler; return 1 if a test decides wrongly."""
    torch.set_num_threads(1)
    results = Results("distribution", args.output, {"p-value": ".3g"})
    right: list[float] = []
    wrong: list[float] = []
    for row in chi_square_rows(args.seeds, args.model, SETTINGS):
        settings = ", ".join(f"{name} {value}" for name, value in row.sampling.items())
        results.add({"token": row.token, "settings": settings, "sampler": row.sampler, "p-value": row.p_value})
        (right if row.sampler == RIGHT else wrong).append(row.p_value)
    results.finish(f"{args.seeds} seeds a row")
    return 0 if min(right) > MIN_RIGHT_P and max(wrong) < MAX_WRONG_P else 1
