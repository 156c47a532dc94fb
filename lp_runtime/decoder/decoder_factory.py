"""Factory of decoders: combines a request's state, drafter, step budget and sampler."""

from __future__ import annotations

from collections.abc import Hashable

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.decoder.decoder import Decoder
from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.decoder.drafter_factory import check_chain_settings, make_drafter
from lp_runtime.decoder.prompt_harvest import num_to_harvest
from lp_runtime.decoder.sampler_factory import SamplerSpec
from lp_runtime.decoder.step_limit import step_limit
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.state import DecodingRules, DecodingState, Stop
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.chain_budget import MAX_REFED, ChainBudget
from lp_runtime.sizing.cost_model import assumed_times
from lp_runtime.sizing.learned_costs import LearnedCosts

MAX_EXPECTED_TOKENS = 1024  # of an answer: step times are looked up for a text of the prompt and half of these tokens


class DecoderFactory:
    """Factory of the decoders of an engine's requests."""

    def __init__(
        self,
        model: ModelRunner,
        group: Group,
        calibration: Calibration,
        draft_pool: DraftPool,
        grammars: Grammars | None,
    ):
        self._model = model
        self._group = group
        self._calibration = calibration
        self._draft_pool, self._grammars = draft_pool, grammars
        self._learned: dict[Hashable, LearnedCosts] = {}  # by (automatic sizes, greedy, replicas)

    def make(self, request: Request, spec: SamplerSpec, stop: Stop | None, tag: int) -> Decoder:
        """Return the decoder of a request, before its prefill. The caller must release its draft tables.

        `stop` is a condition in addition to the request's own. `tag` names kept draft tables to use; 0 for empty ones.
        """
        # Ordered processors are called on one replica only. The others own no node: they are followers.
        settings, num_replicas = request.lookahead, 1 if spec.processors.are_ordered else self._group.size
        if chains := self._model.feeds_chains:
            check_chain_settings(settings, num_replicas < self._group.size)
        limit = step_limit(settings, self._calibration)
        vocabulary, pool, tables = self._calibration.vocabulary, self._draft_pool, None
        if settings.drafter == "full":
            tables = pool.acquire(settings.draft_tables_bytes, tag)
        try:
            max_nodes = num_replicas * limit + MAX_REFED * chains
            drafter = make_drafter(settings, spec.noise_key, max_nodes, tables, vocabulary, pool.corpus)
            if request.prediction:
                drafter.begin(request.prediction)  # an earlier text of the drafter's: it copies from those, too
            num_nodes = drafter.max_nodes + drafter.max_committed
            is_auto, calibration = settings.is_auto, self._calibration
            times = assumed_times(num_replicas, num_nodes)
            if is_auto:
                num_committed = len(request.prompt_ids) + min(request.max_new_tokens, MAX_EXPECTED_TOKENS) // 2
                times = calibration.times(num_nodes, num_committed)[:num_replicas]
            drafting, refed_at = repr(settings), self._model.rotary_lengths.refed_at
            rules = DecodingRules(
                request.max_new_tokens, request.eos_token_ids, drafting, request.sampling_key, refed_at
            )
            kind = (settings.is_auto, spec.noise is None, num_replicas)
            learned = self._learned.setdefault(kind, LearnedCosts.initial(num_replicas))
            budget = (ChainBudget if chains else StepBudget)(times, is_auto, limit, learned)
            guide = None
            if self._grammars and request.constraint:
                guide = self._grammars.guide(request.constraint, request.text_context)
            is_alone = self._group.is_alone
            state = DecodingState(request.prompt_ids, rules, drafter, stop, request.committed, is_alone, guide)
            num_followers = self._group.size - num_replicas
            harvested = num_to_harvest(request, drafter, self._model, calibration, self._group.size)
            sampler = spec.build(drafter.num_top_k)
            return Decoder(state, budget, sampler, tables, num_followers, harvested, is_traced=request.trace)
        except BaseException:
            if tables is not None:
                pool.release(tables)
            raise
