"""Decodes prompts with any drafter, on one model, as any number of replicas would, and checks every output."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from common import load_prompts_by_kind
from support.peers import SamDrafter

from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.distributed.group import CPU, Group
from lp_runtime.engine.calibration import Calibration
from lp_runtime.engine.decoder import Decoder
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.request import Request
from lp_runtime.engine.sampler_factory import SamplerSpec, make_sampler_spec
from lp_runtime.lookahead.drafters.base import Drafter
from lp_runtime.lookahead.drafters.best_first.drafter import BestFirstDrafter
from lp_runtime.lookahead.drafters.best_first.estimates import Rates
from lp_runtime.lookahead.state import DecodingRules, DecodingState
from lp_runtime.model.loader import eos_token_ids, load_model, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.cost_model import assumed_times
from studies.whole_tree import decode_whole_trees

NGRAM = 4  # tokens of the n-grams by which repetition is measured
GREEDY: Mapping[str, float] = {"temperature": 0.0}

# What drafts: settings of the runtime, or a peer's drafter.
Drafting = LookaheadConfig | Callable[[], Drafter]


@dataclass(frozen=True)
class Run:
    """One prompt's output and what it took.

    Attributes:
        tokens: new tokens.
        num_steps: steps, the prefill's included.
        num_fed: tokens that the busiest replica fed, over all steps without the prefill's.
        drafter: the request's, at the end.
        propose_seconds: over all steps.
        advance_seconds: over all steps.
        counted: what the drafter `full` has counted of candidates; None for other drafters.
    """

    tokens: list[int]
    num_steps: int
    num_fed: int
    drafter: Drafter
    propose_seconds: float
    advance_seconds: float
    counted: Rates | None

    @property
    def repeated(self) -> float:
        """Fraction of the output's 4-grams that occurred in it before."""
        ngrams = [tuple(self.tokens[i : i + NGRAM]) for i in range(len(self.tokens) - NGRAM + 1)]
        return 1 - len(set(ngrams)) / max(1, len(ngrams))


class Bench:
    """A model and prompts.

    Args:
        args: of the command: model, prompts, limit, each, max_new_tokens, eos.

    Attributes:
        prompts: (kind, token ids) of every prompt.
    """

    def __init__(self, args: argparse.Namespace):
        config = ModelConfig(path=args.model)
        self._model = ModelRunner(load_model(config, CPU, "float32"), config.prefill_chunk)
        self._calibration = Calibration(self._model, Group.alone(), None)
        self._max_new_tokens: int = args.max_new_tokens
        self._eos = eos_token_ids(self._model.model) if args.eos else frozenset()
        tokenizer = load_tokenizer(config)
        self.prompts: list[tuple[str, list[int]]] = [
            (kind, tokenizer(text, add_special_tokens=False)["input_ids"]) for kind, text in load_prompts_by_kind(args)
        ]
        self._expected: dict[tuple[int, str], list[int]] = {}

    def decode_all(self, drafting: Drafting, degree: int = 1, sampling: Mapping[str, float] = GREEDY) -> list[Run]:
        """Decode all prompts in order; the first time with a way of sampling, one token a step, too, to compare with.

        Args:
            drafting: what drafts. Draft tables that outlive requests are empty before the first prompt.
            degree: number of replicas.
            sampling: settings of SamplingConfig; the seed is the prompt's index.
        """
        for index in range(len(self.prompts)):
            if (index, repr(sampling)) not in self._expected:
                self._decode(Engine(self._model, Group.alone(), self._calibration), index, PLAIN, 1, sampling)
        engine = Engine(self._model, Group(0, degree, CPU), self._calibration)
        return [self._decode(engine, index, drafting, degree, sampling) for index in range(len(self.prompts))]

    def _decode(
        self, engine: Engine, index: int, drafting: Drafting, degree: int, sampling: Mapping[str, float]
    ) -> Run:
        settings = drafting if isinstance(drafting, LookaheadConfig) else LookaheadConfig()
        config = SamplingConfig(**sampling, seed=index if sampling["temperature"] else None)
        prompt = tuple(self.prompts[index][1])
        request = Request(prompt, settings, self._max_new_tokens, self._eos, config)
        spec = make_sampler_spec(self._model, request)
        if isinstance(drafting, LookaheadConfig):
            decoder = engine.open_decoder(request, spec)
        else:
            decoder = self._open_peer(drafting(), request, spec, degree)
        num_fed, propose_seconds, advance_seconds = 0, 0.0, 0.0
        try:
            steps = decode_whole_trees(
                self._model, decoder, request, on_prefill=lambda: self._show_prompt(decoder, prompt)
            )
            next(steps)  # the prefill's
            for decoded in steps:
                num_fed += max(decoded.step.shares.sizes)
                propose_seconds += decoded.propose_seconds
                advance_seconds += decoded.advance_seconds
        finally:
            engine.close_decoder(decoder)
        state = decoder.state
        if state.new_tokens != self._expected.setdefault((index, repr(sampling)), state.new_tokens):
            raise SystemExit(f"prompt {index}: the output is not that of one token a step")
        drafter = decoder.drafter
        counted = drafter.counted() if isinstance(drafter, BestFirstDrafter) else None
        return Run(state.new_tokens, state.num_steps, num_fed, drafter, propose_seconds, advance_seconds, counted)

    def _open_peer(self, drafter: Drafter, request: Request, spec: SamplerSpec, degree: int) -> Decoder:
        """Return the decoder of a drafter that the runtime does not have."""
        rules = DecodingRules(request.max_new_tokens, request.eos_token_ids)
        num_nodes = drafter.max_nodes + drafter.max_committed
        budget = StepBudget(assumed_times(degree, num_nodes), False, None)
        return Decoder(DecodingState(request.prompt_ids, rules, drafter), budget, spec.build(drafter.num_top_k))

    @torch.inference_mode()
    def _show_prompt(self, decoder: Decoder, prompt: tuple[int, ...]) -> None:
        """Show SAM decoding the top-k candidates of the prompt's tokens; other drafters do not look at them."""
        drafter, sampler = decoder.drafter, decoder.sampler
        if not isinstance(drafter, SamDrafter):
            return
        logits = self._model.model(torch.tensor([prompt])).logits[0].float()
        tree = decoder.propose_prefill().tree
        values, _ = sampler.sample(StepLogits(logits), tree, [0] * len(prompt), prompt)
        top_k = sampler.unpack(values.numpy())[2]
        assert top_k is not None
        drafter.note_prompt(prompt, top_k)
