"""Drafting studies that compare with published draft-free methods."""

from __future__ import annotations

from collections.abc import Callable

from goose import GooseDrafter
from peers import SamDrafter
from racer import RacerDrafter
from suffix_decoding import SuffixDrafter

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.lookahead.drafter import Drafter
from lp_runtime.lookahead.drafters.token_recycling import TokenRecyclingDrafter
from studies.drafting_bench import Drafting
from studies.drafting_table import PROMPT_LOOKUP, Study, full, paper

SAM = "SAM decoding with a recycling tree"
SUFFIX = "SuffixDecoding"


def kept(drafter: Drafter) -> Callable[[], Drafter]:
    """Return a factory that uses one drafter for all prompts and never resets its tables."""
    return lambda: drafter


def reset_peers(budget: int) -> list[tuple[str, Drafting]]:
    """Return the methods to compare at a budget; their tables are reset for each prompt."""
    at: dict[int, list[tuple[str, Drafting]]] = {
        16: [("prompt lookup", PROMPT_LOOKUP), ("RACER, 16", lambda: RacerDrafter(16))],
        64: [
            ("RACER, 64", lambda: RacerDrafter(64)),
            ("Goose, 64", lambda: GooseDrafter(64)),
            ("token recycling, 64", LookaheadConfig(drafter="recycling", budget=64)),
            (SAM, SamDrafter),
            (SUFFIX, SuffixDrafter),
        ],
        83: [("paper (15, 5, 15)", paper(15, 5, 15))],
    }
    return [(f"full, {budget}", full(budget)), *at[budget]]


def kept_peers() -> list[tuple[str, Drafting]]:
    """Return the methods whose tables can outlive prompts, at 64 nodes, with tables that do."""
    return [
        ("full, 64, kept", full(64, draft_tables="runtime")),
        ("RACER, 64, kept", kept(RacerDrafter(64))),
        ("Goose, 64, kept", kept(GooseDrafter(64))),
        ("token recycling, 64, kept", kept(TokenRecyclingDrafter(64))),
        (f"{SAM}, kept", kept(SamDrafter())),
        (f"{SUFFIX}, kept", kept(SuffixDrafter())),
    ]


def peers(study: Study) -> None:
    """S compared with published draft-free methods at 64, 16 and 83 nodes, by kind, greedy; tables reset."""
    for budget in (64, 16, 83):
        for label, drafting in reset_peers(budget):
            study.add(label, drafting)


def peers_sampled(study: Study) -> None:
    """S of the methods of `peers` at temperature 1.0 and 0.7."""
    for budget in (83, 64, 16):
        for temperature in (1.0, 0.7):
            for label, drafting in reset_peers(budget):
                study.add(label, drafting, sampling={"temperature": temperature})


def peers_kept(study: Study) -> None:
    """S of the methods of `peers` at 64 nodes, greedy, with tables that are kept from prompt to prompt."""
    for label, drafting in kept_peers():
        study.add(label, drafting)
