"""Decodes prompts with any drafter on one model, as n replicas would, and checks every output."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from common import load_tasks
from peers import Peer
from workloads import texts_of

from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.calibration.step_meter import StepMeasurement
from lp_runtime.calibration.vocabulary_prior import ask
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.decoder.decoder import Decoder, DrafterSetup
from lp_runtime.decoder.sampler_factory import make_sampler
from lp_runtime.distributed.transport.group import CPU, Group
from lp_runtime.engine.engine import Engine
from lp_runtime.lookahead.drafter import Drafter
from lp_runtime.lookahead.state import DecodingRules, DecodingState
from lp_runtime.lookahead.top_k import K
from lp_runtime.model.kv_cache.slots import STEP_TOKENS
from lp_runtime.model.loading.loader import eos_token_ids, load_model, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.tokenizer import check_chat_template, encode, encode_chat
from lp_runtime.request.request import Request
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.cost_model import assumed_times, interpolate
from studies.recorded_model import RecordedModel, Recording

NGRAM = 4  # tokens per n-gram, to measure repetition
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
KEPT_TAG = 7  # arbitrary tag of draft tables that outlive requests
HOST_NS = 350_000  # assumed host time of a step, if step times are given

# Settings of a drafter of the runtime, or a factory of a peer's drafter.
Drafting = LookaheadConfig | Callable[[], Drafter]


@dataclass(frozen=True)
class Run:
    """Output of one prompt and its cost.

    Attributes:
        tokens: new tokens.
        num_steps: steps, the prefill's included.
        num_fed: tokens that the busiest replica fed, over all steps except the prefill's.
        drafter: the request's drafter after its last step.
        propose_seconds: over all steps.
        advance_seconds: over all steps.
        step_seconds: simulated time of all steps except the prefill's, if step times are given, else 0.
    """

    tokens: list[int]
    num_steps: int
    num_fed: int
    drafter: Drafter
    propose_seconds: float
    advance_seconds: float
    step_seconds: float

    @property
    def repeated(self) -> float:
        """Fraction of the output's 4-grams that occurred earlier in it."""
        ngrams = [tuple(self.tokens[i : i + NGRAM]) for i in range(len(self.tokens) - NGRAM + 1)]
        return 1 - len(set(ngrams)) / max(1, len(ngrams))


class AnySize(Calibration):
    """Calibration for steps of fixed sizes: any size is fed, however long this machine takes for it."""

    def max_step_tokens(self) -> int:
        return STEP_TOKENS

    def ask_about(self, tokens: np.ndarray) -> int:
        """Ask for what the vocabulary prior lacks of some tokens, [m]; return of how many it lacked anything."""
        self.vocabulary()
        answers = self._known.vocabulary
        assert answers is not None
        missing = tokens[answers.is_missing[tokens]]
        if len(missing):
            ask(self._model, answers, missing, seconds=math.inf)
            self._files.store(self._vocabulary_name(), answers.arrays())
            self._vocabulary = None
        return len(missing)


class EqualReplicas(Calibration):
    """Calibration of one replica, used for all replicas.

    Args:
        model: model of the replica.
        num_replicas: number of replicas.
        known: measurements; their step times are assumed for each replica.
    """

    def __init__(self, model: ModelRunner, num_replicas: int, known: Measured):
        super().__init__(model, Group.alone(), None, known)
        self._num_replicas = num_replicas

    def times(self, num_tokens: int, num_committed: int = 0) -> np.ndarray:
        return np.tile(super().times(num_tokens, num_committed), (self._num_replicas, 1))


class ChainFed(ModelRunner):
    """Model decoded like one with recurrent state: each replica follows one path of the tree."""

    feeds_chains = True


class Bench:
    """A model and prompts.

    Args:
        args: arguments of the command: model, prompts, limit, each, max_new_tokens, eos, chat, record, prior_of_trees.

    Attributes:
        model: the model.
        calibration: its calibration.
        prompts: (kind, token ids) of every prompt.
        watch: is given each drafter before its first step, unless None.
    """

    def __init__(self, args: argparse.Namespace):
        config = ModelConfig(path=args.model)
        self.model = ModelRunner(load_model(config, CPU, "float32"), config.prefill_chunk)
        self._chain_fed = ChainFed(self.model.model, config.prefill_chunk)
        if args.record is not None:
            args.record.mkdir(parents=True, exist_ok=True)
        self._cache = None if args.record is None else str(args.record)
        self._measured = Measured()
        self.calibration = AnySize(self.model, Group.alone(), self._cache, self._measured)
        self._asks_about_trees: bool = args.prior_of_trees
        self._drafted: set[int] = set()  # tokens of the trees since the last question about them
        self._max_new_tokens: int = args.max_new_tokens
        self._eos = eos_token_ids(self.model.model) if args.eos else frozenset()
        tokenizer = load_tokenizer(config)
        if args.chat:
            check_chat_template(tokenizer, config.location)

        self.watch: Callable[[Drafter], None] | None = None
        self.prompts: list[tuple[str, list[int]]] = []
        self._recorded: list[RecordedModel] = []
        self._seeds: list[int] = []  # do not change if there are more prompts
        for task in load_tasks(args):
            answer = str(tokenizer.decode(self.plain_text(-1), skip_special_tokens=True)) if task.has_own_answer else ""
            said = task.said(answer)
            ids = encode_chat(tokenizer, said) if args.chat else encode(tokenizer, texts_of(said), False)
            self._seeds.append(sum(kind == task.kind for kind, _ in self.prompts))
            self.prompts.append((task.kind, list(ids)))
            self._recorded.append(RecordedModel(self.model, list(ids), config.location, args.record))

    @property
    def num_fed(self) -> int:
        """Number of nodes fed because no drafter had asked for them before; one token per step is excluded."""
        return sum(each.num_fed for each in self._recorded)

    def recording(self, index: int, sampling: Mapping[str, Any] = GREEDY) -> Recording:
        """Return the recording of a prompt that is sampled in this way."""
        asked = (self._sampling(index, sampling), self._max_new_tokens, *sorted(self._eos))
        return self._recorded[index].recording(repr(asked))

    def plain_text(self, index: int, sampling: Mapping[str, Any] = GREEDY) -> list[int]:
        """Return a prompt's new tokens, decoded one token per step."""
        recording = self.recording(index, sampling)
        if recording.text is None:
            alone = Engine(self.model, Group.alone(), self.calibration)
            recording.text = self._decode(alone, index, PLAIN, 1, sampling, None).tokens
            recording.save()
        return recording.text

    def decode_all(
        self,
        drafting: Drafting,
        degree: int = 1,
        sampling: Mapping[str, Any] = GREEDY,
        as_chains: bool = False,
        step_ms: Mapping[int, float] | None = None,
    ) -> list[Run]:
        """Decode all prompts in order, and compare each with `plain_text`, which is decoded if it is missing.

        With `--prior-of-trees`, they are decoded again until the vocabulary prior knows all tokens of their trees.

        Args:
            drafting: settings or factory of the drafter. Draft tables that outlive requests are empty before the first
                prompt.
            degree: number of replicas.
            sampling: settings of SamplingConfig; the seed is the prompt's index among those of its kind.
            as_chains: whether each replica is fed one path of the tree, like a model with recurrent state.
            step_ms: assumed milliseconds of one replica's steps, by number of tokens; None to use the calibration and
                leave the times of steps unknown.
        """
        group, times = Group(0, degree), None
        calibration: Calibration = self.calibration
        if step_ms is not None:
            tokens, nanoseconds = list(step_ms), [int(1e6 * each) for each in step_ms.values()]
            steps = StepMeasurement(
                np.array(tokens), np.array(nanoseconds), np.array(0), np.array(0), np.zeros(2, np.int64)
            )
            self.calibration.vocabulary()  # query the model once, not in each of these calibrations
            calibration = EqualReplicas(self.model, degree, replace(self._measured, steps=steps))
            times = interpolate(tokens, nanoseconds, 2 * tokens[-1])
        has_prior = isinstance(drafting, LookaheadConfig) and drafting.drafter == "full" and drafting.prior != "none"
        while True:
            self._drafted.clear()
            engine = Engine(self._chain_fed if as_chains else self.model, group, calibration)
            runs = []
            for index in range(len(self.prompts)):
                recording = self.recording(index, sampling)
                self.plain_text(index, sampling)
                run = self._decode(engine, index, drafting, degree, sampling, recording, times)
                if run.tokens != recording.text:
                    raise SystemExit(f"prompt {index}: the output is not that of one token a step")
                recording.save()
                runs.append(run)
            if not (self._asks_about_trees and has_prior and self.calibration.ask_about(np.array([*self._drafted]))):
                return runs

    def _decode(
        self,
        engine: Engine,
        index: int,
        drafting: Drafting,
        degree: int,
        sampling: Mapping[str, Any],
        recording: Recording | None,
        times: np.ndarray | None = None,
    ) -> Run:
        """Decode a prompt; without a recording the model is queried for every node."""
        settings = drafting if isinstance(drafting, LookaheadConfig) else LookaheadConfig()
        config = self._sampling(index, sampling)
        prompt = tuple(self.prompts[index][1])
        request = Request(prompt, settings, self._max_new_tokens, self._eos, config)
        sampler = make_sampler(self.model, request)
        scope = request.draft_scope
        if isinstance(drafting, LookaheadConfig):
            decoder = engine.open_decoder(
                request, sampler, tag=engine.draft_pool.find(0, scope, settings.draft_tables_bytes)
            )
        else:
            decoder = self._open_peer(drafting(), request, sampler, degree)
        try:
            return self._run(decoder, self._recorded[index], sampler, recording, times)
        finally:
            engine.close_decoder(decoder, 0 if scope is None else KEPT_TAG, scope)

    def _sampling(self, index: int, sampling: Mapping[str, Any]) -> SamplingConfig:
        """Return the sampling settings of a prompt."""
        return SamplingConfig(**sampling, seed=self._seeds[index] if sampling["temperature"] else None)

    def _run(
        self,
        decoder: Decoder,
        model: RecordedModel,
        sampler: Sampler,
        recording: Recording | None,
        times: np.ndarray | None,
    ) -> Run:
        """Decode a request to its end; `times` are nanoseconds by number of tokens, None if unknown."""
        sampler = replace(sampler, num_top_k=K)
        state, drafter, width = decoder.state, decoder.drafter, decoder.sampler.width
        if self.watch is not None and recording is not None:
            self.watch(drafter)
        step = decoder.propose_prefill()
        answers = model.prefill(decoder, step, sampler, recording)
        if isinstance(drafter, Peer):
            drafter.note_prompt(state.tokens, *model.shown_of_prompt())
        decoder.advance(step, decoder.unpack(step, answers.values(0, width)))
        num_fed, propose_seconds, advance_seconds, step_ns, host_ns = 0, 0.0, 0.0, 0, 0
        while state.finish_reason is None:
            started = time.perf_counter()
            step = decoder.propose()
            propose_seconds += time.perf_counter() - started
            self._drafted.update(step.tree.tokens)
            answers = model.answer(decoder, step, sampler, recording)
            started = time.perf_counter()
            if isinstance(drafter, Peer):
                drafter.note_nodes(step.tree, answers.ids, answers.logits)
            sizes = step.shares.sizes
            forward_ns = [0 if times is None else int(times[min(size, len(times) - 1)]) for size in sizes]
            values = answers.values(step.tree.root, width)
            decoder.advance(step, decoder.unpack(step, values, forward_ns, [host_ns] * len(sizes)))
            host_ns = 0 if times is None else HOST_NS
            step_ns += max(forward_ns) + host_ns
            advance_seconds += time.perf_counter() - started
            num_fed += max(sizes)
        seconds = propose_seconds, advance_seconds
        return Run(state.new_tokens, state.num_steps, num_fed, drafter, *seconds, 1e-9 * step_ns)

    def _open_peer(self, drafter: Drafter, request: Request, sampler: Sampler, degree: int) -> Decoder:
        """Return a decoder for a drafter that the runtime does not have."""
        rules = DecodingRules(request.max_new_tokens, request.eos_token_ids)
        num_nodes = drafter.max_nodes + drafter.max_committed
        budget = StepBudget(assumed_times(degree, num_nodes), False, num_nodes)
        return Decoder(DecodingState(request.prompt_ids, rules, drafter), DrafterSetup(drafter, budget, None), sampler)
