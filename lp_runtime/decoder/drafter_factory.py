"""Factory of drafters, by the name in the settings."""

from __future__ import annotations

from lp_runtime.config.lookahead import NUM_COPIED, LookaheadConfig
from lp_runtime.errors import ConfigError
from lp_runtime.lookahead.drafter import Drafter, NoiseKey
from lp_runtime.lookahead.drafters.best_first.corpus import CorpusIndex
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.drafters.best_first.drafter import BestFirstDrafter, compile_drafter
from lp_runtime.lookahead.drafters.paper.drafter import PaperDrafter
from lp_runtime.lookahead.drafters.prompt_lookup import PromptLookupDrafter
from lp_runtime.lookahead.drafters.token_recycling import TokenRecyclingDrafter
from lp_runtime.lookahead.top_k import VocabularyPrior


def make_drafter(
    settings: LookaheadConfig,
    noise_key: NoiseKey | None,
    max_nodes: int,
    draft_tables: DraftTables | None,
    vocabulary: VocabularyPrior | None,
    corpus: CorpusIndex,
    max_depth: int,
) -> Drafter:
    """Return the drafter that a request asks for.

    `noise_key` is None for greedy decoding. `max_nodes` is the largest tree that all replicas together can feed. The
    tables, the vocabulary prior, the corpus and the tree's depth are for drafter=full only.
    """
    W, N, G = settings.window
    if settings.drafter == "full":
        assert draft_tables is not None
        compile_drafter()
        limit = min(max_nodes, max(1, (W + G) * (N - 1))) if settings.has_window else max_nodes
        return BestFirstDrafter(limit, draft_tables, vocabulary, noise_key, max_depth, corpus)
    if settings.drafter == "prompt_lookup":
        return PromptLookupDrafter(NUM_COPIED, settings.budget)
    if settings.drafter == "recycling":
        return TokenRecyclingDrafter(settings.budget)
    return PaperDrafter(
        (W, N, G),
        settings.pool_from_prompt,
        settings.window_seed,
        only_guesses=settings.acceptance == "guesses",
        samples=noise_key is not None,
        budget=min(settings.budget or max_nodes, max_nodes),
    )


def check_chain_settings(settings: LookaheadConfig, has_followers: bool) -> None:
    """Refuse settings that a model fed chains of guesses does not support.

    `has_followers`: whether some replicas feed only the pending tokens.
    """
    W, _, G = settings.window
    if settings.drafter == "paper" and (W or G):
        raise ConfigError(
            "lookahead.drafter=paper: must be full, prompt_lookup or recycling with this model: it is fed one path of"
            " the tree at a time, and the lookahead window is not a path"
        )
    if has_followers:
        raise ConfigError(
            "logits processors that must be called in order need a single replica with this model, which is fed one"
            " path of the tree at a time; set gpus=1"
        )
