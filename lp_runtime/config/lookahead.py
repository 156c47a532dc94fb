"""Drafting settings: the kind and number of tokens that a step proposes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

from lp_runtime.config.checks import keep_plain_values, path_text, require_choice, require_int
from lp_runtime.errors import ConfigError

UNMEASURED_STEP_TOKENS = 128  # tokens of a step at most before steps are measured; the paper's largest tree has 120
MAX_STRICT_COMMITTED = 32  # tokens that a step may commit with exactness=strict (model/attention/strict.py)
DRAFTERS = ("full", "paper", "prompt_lookup", "recycling")
ACCEPTANCES = ("tree", "guesses")
PRIORS = ("vocabulary", "none")
DEFAULT_WINDOW = (15, 5, 15)  # the paper's W, N, G for 7B models
MAX_DEPTH = 63  # levels of the drafter full's tree: a long copy may take a whole step of 64 tokens
NUM_COPIED = 10  # tokens that the drafter prompt_lookup copies at most
MAX_TREE_NODES = 1 << 14  # nodes of a step's tree that settings may ask for
MIN_DRAFT_TABLES_BYTES = 1 << 16


@dataclass
class LookaheadConfig:
    """Drafting settings. They never change the output, only the number and the cost of steps.

    If none of W, N and G is given, the drafter `full` measures this machine and chooses the fastest size of each step.
    """

    W: Optional[int] = None  # noqa: UP045 (OmegaConf reads this annotation)
    """Window size in columns, >= 0; 0 is no window. 15 if only N or G is given."""
    N: Optional[int] = None  # noqa: UP045
    """n-gram size, >= 2; 2 is Jacobi decoding. 5 if only W or G is given."""
    G: Optional[int] = None  # noqa: UP045
    """Largest number of guesses verified in a step, >= 0. 15 if only W or N is given."""
    drafter: str = "full"
    """Method that proposes the token tree: full (one tree, best first, from all sources that need no further model; at
    most (W + G)(N - 1) tokens if W, N or G is given), paper (the window and the n-gram pool's guesses), prompt_lookup
    or recycling."""
    acceptance: str = "tree"
    """Drafter paper: accept along any node of the tree (tree) or, as in the paper, along guesses only (guesses)."""
    budget: Optional[int] = None  # noqa: UP045
    """Step budget: tokens that a replica feeds in a step at most, >= 1; the prefill is exempt. Automatic sizes may stay
    below it; `tokens` fixes the number. With drafters other than full it limits the whole tree. In any case a replica
    feeds at most 1,024 tokens in a step, and more than 128 only up to the largest step that was measured; measuring
    ends at a step that takes 12 times as long as one token."""
    tokens: Optional[int] = None  # noqa: UP045
    """Drafter full: tokens that each replica feeds in every step, >= 1, in place of automatic sizes or W, N and G."""
    prior: str = "vocabulary"
    """Drafter full: knowledge before any token is seen: vocabulary (the model's predictions after each token of the
    vocabulary, and after frequent ones with their likely successors; found over several starts and kept on disk) or
    none."""
    prompt_top_k: bool = False
    """Drafter full: whether the prefill also computes top-k candidates after the prompt's tokens; if step sizes are
    chosen automatically, only for as many of the last tokens as is worth the time."""
    draft_tables: str = "auto"
    """Drafter full: requests that draft tables serve: request (one), runtime (all that have the same cache_salt and, in
    lp-serve, the same API key), auto (request in lp-serve without API keys, else runtime), or the path of a file, which
    also keeps those without a cache_salt across runs."""
    draft_tables_bytes: int = 16 * 2**20
    """Size of the draft tables in bytes, >= 65536; the oldest entries are dropped first. A longer text of the
    running request takes more: it is kept whole."""
    corpus: Optional[str] = None  # noqa: UP045
    """Drafter full: files and folders, separated by ":", of text that answers may repeat, such as a repository. It is
    indexed at the start, in cache_dir; of files that have changed since an earlier start, those alone."""
    pool_from_prompt: bool = True
    """Drafter paper: insert the prompt's n-grams into the n-gram pool."""
    window_seed: int = 0
    """Drafter paper: seed, >= 0, for choosing the prompt tokens that fill the first window."""

    def __post_init__(self) -> None:
        keep_plain_values(self)
        self._check_sizes()
        self.draft_tables = path_text(self.draft_tables)
        self.corpus = path_text(self.corpus)
        require_choice("lookahead.drafter", self.drafter, DRAFTERS)
        require_choice("lookahead.acceptance", self.acceptance, ACCEPTANCES)
        require_choice("lookahead.prior", self.prior, PRIORS)
        if not isinstance(self.draft_tables, str) or not self.draft_tables:
            raise ConfigError(
                f"lookahead.draft_tables={self.draft_tables!r}: must be auto, request, runtime or the path of a file"
            )
        if self.corpus is not None and (self.drafter != "full" or not isinstance(self.corpus, str) or not self.corpus):
            raise ConfigError(f"lookahead.corpus={self.corpus!r}: must be paths, with lookahead.drafter=full")
        require_int("lookahead.draft_tables_bytes", self.draft_tables_bytes, MIN_DRAFT_TABLES_BYTES)
        require_int("lookahead.window_seed", self.window_seed, 0)
        if self.acceptance != "tree" and self.drafter != "paper":
            raise ConfigError(f"lookahead.acceptance={self.acceptance}: only with lookahead.drafter=paper")

    def _check_sizes(self) -> None:
        for name, low in (("W", 0), ("N", 2), ("G", 0), ("budget", 1), ("tokens", 1)):
            require_int(f"lookahead.{name}", getattr(self, name), low, or_none=True)
        num_nodes = ((self.W or 0) + (self.G or 0)) * ((self.N or 2) - 1)
        if max(num_nodes, self.budget or 0) > MAX_TREE_NODES:
            raise ConfigError(
                f"lookahead.W={self.W} N={self.N} G={self.G} budget={self.budget}: (W + G) (N - 1), and budget, must be"
                f" at most {MAX_TREE_NODES}"
            )
        if self.tokens is not None:
            self._check_tokens(self.tokens)

    def _check_tokens(self, tokens: int) -> None:
        if tokens > MAX_TREE_NODES:
            raise ConfigError(f"lookahead.tokens={tokens}: must be at most {MAX_TREE_NODES}")
        if self.drafter != "full":
            raise ConfigError(f"lookahead.tokens={tokens}: only with lookahead.drafter=full")
        for name in ("W", "N", "G", "budget"):
            if getattr(self, name) is not None:
                raise ConfigError(f"lookahead.tokens={tokens}: not with lookahead.{name}={getattr(self, name)}")

    @property
    def has_window(self) -> bool:
        """Whether W, N and G limit the drafter full's tree: one of them is given."""
        return (self.W, self.N, self.G) != (None, None, None)

    @property
    def is_auto(self) -> bool:
        """Whether step sizes are chosen from measurements: drafter full, and none of W, N, G and tokens given."""
        return self.drafter == "full" and not self.has_window and self.tokens is None

    @property
    def step_limit(self) -> int | None:
        """Tokens that a replica may feed in a step: tokens or budget; None without either."""
        return self.budget if self.tokens is None else self.tokens

    @property
    def shares_drafts(self) -> bool:
        """Whether draft tables serve several requests; `auto` means none until a runtime replaces it."""
        return self.drafter == "full" and self.draft_tables not in ("auto", "request")

    def with_drafts_of_one_request(self) -> LookaheadConfig:
        """Return these settings, in which `auto` draft tables serve one request."""
        return replace(self, draft_tables="request") if self.draft_tables == "auto" else self

    @property
    def has_vocabulary_prior(self) -> bool:
        """Whether the drafter uses the model's predictions after each token of the vocabulary, and after pairs."""
        return self.drafter == "full" and self.prior == "vocabulary"

    @property
    def window(self) -> tuple[int, int, int]:
        """W, N and G, with defaults filled in."""
        given = zip((self.W, self.N, self.G), DEFAULT_WINDOW, strict=True)
        W, N, G = (default if value is None else value for value, default in given)
        return W, N, G

    @property
    def max_fixed_nodes(self) -> int:
        """Largest number of nodes that fixed sizes allow in a step; 0 for drafters without such settings."""
        if self.tokens is not None:
            return self.tokens
        W, N, G = self.window
        nodes = (W + G) * (N - 1) if self.drafter in ("full", "paper") else 0
        return nodes if self.budget is None else min(nodes, self.budget)


PLAIN = LookaheadConfig(W=0, N=2, G=0, drafter="paper", pool_from_prompt=False)
"""Plain autoregressive decoding: every step feeds only the root."""


def max_depth(is_strict: bool) -> int:
    """Return how many levels a tree of the drafter full may have."""
    return min(MAX_DEPTH, MAX_STRICT_COMMITTED - 1) if is_strict else MAX_DEPTH


def paper_depth(W: int, N: int, G: int) -> int:
    """Return how many levels below the root a tree of the drafter paper may have."""
    return max(W + N - 3 if W else 0, N - 1 if G else 0)


def check_exactness(exactness: str, lookahead: LookaheadConfig) -> None:
    """Raise ConfigError if the tree is too deep for exactness=strict: a step may commit too many tokens.

    Trees of the drafter full are cut at `max_depth`; those of prompt_lookup and recycling are never too deep.
    """
    W, N, G = lookahead.window
    num_committed = min(paper_depth(W, N, G) + 1, lookahead.budget or MAX_TREE_NODES)  # with the bonus token
    if exactness == "strict" and lookahead.drafter == "paper" and num_committed > MAX_STRICT_COMMITTED:
        raise ConfigError(
            f"lookahead.W={W} lookahead.N={N}: a step may commit {num_committed} tokens;"
            f" with exactness=strict it must be at most {MAX_STRICT_COMMITTED} (W + N - 2, or N without a window)"
        )
