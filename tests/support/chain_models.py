"""Small models that are fed chains, and requests for them, for tests and the study of chains."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.request.output import Report, StepOutput
from lp_runtime.request.request import Request
from support.causal_configs import VOCABULARY, small_config
from support.causal_types import small_model
from support.engines import engine_of

# Types whose layers carry a state from token to token.
RECURRENT = (
    "qwen3_next",
    "qwen3_5_text",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2_moe",
    "falcon_h1",
    "bamba",
    "olmo_hybrid",
    "kimi_linear",
    "zamba2",
    "zaya",
)
CHUNK_TOKENS = 7  # of prompts
NEW_TOKENS = 40
LAYER_SCALE = 0.2  # factor on the weights of layers
LOOKAHEADS = (
    LookaheadConfig(),
    LookaheadConfig(W=5, N=3, G=5, drafter="full"),
    LookaheadConfig(W=15, N=5, G=15, drafter="full"),
    LookaheadConfig(budget=5),
    LookaheadConfig(budget=12),
    LookaheadConfig(drafter="prompt_lookup"),
    LookaheadConfig(drafter="recycling"),
)


def model_of(model_type: str) -> PreTrainedModel:
    """Return a small random model whose layers do little, so that texts repeat and guesses are right."""
    model = small_model(small_config(model_type), seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "lm_head" not in name:
                parameter *= LAYER_SCALE
    return model


def request_of(number: int) -> Request:
    """Return a request whose prompt, settings and sampler are seeded by `number`; every third one samples."""
    rng = random.Random(number)
    piece = [rng.randrange(8, VOCABULARY) for _ in range(rng.randrange(2, 12))]
    prompt = tuple(piece * rng.randrange(1, 4))
    temperature = rng.choice([0.3, 0.7, 1.0]) if number % 3 == 1 else 0.0
    return Request(
        prompt, rng.choice(LOOKAHEADS), NEW_TOKENS, sampling=SamplingConfig(temperature=temperature, seed=number)
    )


def decode(group: Group, model: PreTrainedModel, requests: Sequence[Request]) -> list[tuple[list[int], Report]]:
    """Decode requests on a replica of a group; return (tokens, report) of each."""
    engine = engine_of(ChainRunner(model, CHUNK_TOKENS), group)
    results = []
    for request in requests:
        *outputs, report = engine.run(request)
        assert isinstance(report, Report)
        tokens = [token for output in outputs if isinstance(output, StepOutput) for token in output.token_ids]
        results.append((tokens, report))
    return results


def decode_type(group: Group, model_type: str, requests: Sequence[Request]) -> list[tuple[list[int], Report]]:
    """Make a model and decode requests: see `decode`."""
    return decode(group, model_of(model_type), requests)
