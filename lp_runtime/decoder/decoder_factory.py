"""Factory of decoders: combines a request's state, drafter, step budget and sampler."""

from __future__ import annotations

from collections.abc import Hashable

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.lookahead import PLAIN, UNMEASURED_STEP_TOKENS, LookaheadConfig, max_depth
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.decoder.decoder import Decoder, DrafterSetup
from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.decoder.drafter_factory import check_chain_settings, make_drafter
from lp_runtime.decoder.harvest_size import num_to_harvest
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.state import DecodingRules, DecodingState, Stop
from lp_runtime.model.kv_cache.slots import STEP_TOKENS
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.chain_budget import MAX_REFED, ChainBudget
from lp_runtime.sizing.cost_model import assumed_times
from lp_runtime.sizing.learned_costs import LearnedCosts

MAX_EXPECTED_TOKENS = 1024  # of an answer: step times are looked up for a text of the prompt and half of these tokens


class DecoderFactory:
    """Factory of the decoders of an engine's requests; `times_are_late` is as in StepBudget."""

    def __init__(
        self,
        model: ModelRunner,
        group: Group,
        calibration: Calibration,
        draft_pool: DraftPool,
        grammars: Grammars | None,
        times_are_late: bool,
    ):
        self._model, self._group = model, group
        self._times_are_late = times_are_late
        self._calibration = calibration
        self._draft_pool, self._grammars = draft_pool, grammars
        self._learned: dict[Hashable, LearnedCosts] = {}  # by (automatic sizes, greedy, replicas)

    def make(self, request: Request, sampler: Sampler, stop: Stop | None, tag: int, lacks_drafter: bool) -> Decoder:
        """Return the decoder of a request, before its prefill. The caller must release its draft tables.

        Args:
            stop: a condition in addition to the request's own.
            tag: of kept draft tables to use; 0 for empty ones.
            lacks_drafter: whether to feed one token per step until `Decoder.use` is called.
        """
        group, model = self._group, self._model
        setup = self._set_up(request, sampler, tag, PLAIN if lacks_drafter else request.lookahead)
        drafter = setup.drafter
        try:
            guide = None
            if self._grammars and request.constraint:
                guide = self._grammars.guide(request.constraint, request.text_context)
            rules = DecodingRules(
                request.max_new_tokens,
                request.eos_token_ids,
                repr(request.lookahead),
                request.sampling_key,
                model.rotary_lengths.refed_at,
            )
            state = DecodingState(request.prompt_ids, rules, drafter, stop, request.committed, group.is_alone, guide)
            num_harvested = num_to_harvest(request, drafter, model, self._calibration, group.size)
            num_followers = group.size - self._num_owners(sampler)
            return Decoder(state, setup, sampler, num_followers, num_harvested, request.trace, lacks_drafter)
        except BaseException:
            self._release(setup.draft_tables, tag, request)
            raise

    def set_up_drafter(self, request: Request, sampler: Sampler, tag: int) -> DrafterSetup:
        """Return what a decoder made with `lacks_drafter` drafts with later; see `make`."""
        return self._set_up(request, sampler, tag, request.lookahead)

    def _num_owners(self, sampler: Sampler) -> int:
        """Return how many replicas own nodes. The others are followers: ordered processors are called on one only."""
        return 1 if sampler.is_ordered else self._group.size

    def _release(self, tables: DraftTables | None, tag: int, request: Request) -> None:
        if tables is not None:
            self._draft_pool.release(tables, tag, request.draft_scope)

    def _set_up(self, request: Request, sampler: Sampler, tag: int, settings: LookaheadConfig) -> DrafterSetup:
        calibration, model = self._calibration, self._model
        num_replicas = self._num_owners(sampler)
        if chains := model.feeds_chains:
            check_chain_settings(settings, num_replicas < self._group.size)
        limit = step_limit(settings, calibration)
        tables = self._draft_pool.acquire(settings.draft_tables_bytes, tag) if settings.drafter == "full" else None
        try:
            max_nodes = num_replicas * limit + MAX_REFED * chains
            vocabulary = calibration.vocabulary() if settings.has_vocabulary_prior else None
            corpus, depth = self._draft_pool.corpus, max_depth(model.strict_tokens is not None)
            drafter = make_drafter(settings, sampler.noise_key, max_nodes, tables, vocabulary, corpus, depth)
            if request.prediction:
                drafter.add_text(request.prediction)
            num_nodes = drafter.max_nodes + drafter.max_committed
            times = assumed_times(num_replicas, num_nodes)
            if settings.is_auto:
                num_committed = len(request.prompt_ids) + min(request.max_new_tokens, MAX_EXPECTED_TOKENS) // 2
                times = calibration.times(num_nodes, num_committed)[:num_replicas]
            kind = settings.is_auto, sampler.noise is None, num_replicas
            learned = self._learned.setdefault(kind, LearnedCosts(num_replicas))
            budget = (ChainBudget if chains else StepBudget)(
                times, settings.is_auto, limit, learned, self._times_are_late
            )
            return DrafterSetup(drafter, budget, tables)
        except BaseException:
            self._release(tables, tag, request)
            raise


def step_limit(settings: LookaheadConfig, calibration: Calibration) -> int:
    """Return how many tokens a replica may feed in a step: no settings may make one that is too slow.

    It is the minimum of the request's budget, the tokens for which memory is reserved, and the largest measured step;
    the last counts for automatic sizes and for trees of more than UNMEASURED_STEP_TOKENS nodes. Measuring stops at a
    fixed multiple of the time of a one-token step. The calibration may measure and gather here, so all replicas must
    call this for the same request.
    """
    limit = min(settings.step_limit or STEP_TOKENS, STEP_TOKENS)
    if settings.is_auto:
        return min(limit, calibration.max_step_tokens())
    if settings.max_fixed_nodes > UNMEASURED_STEP_TOKENS:
        return min(limit, max(UNMEASURED_STEP_TOKENS, calibration.max_step_tokens()))
    return limit
