"""Settings as typed dataclasses, each validated where it is made. Hydra fills the same classes (see cli.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from lp_runtime.checks import is_list, require_choice, require_int, require_number, require_seconds
from lp_runtime.errors import ConfigError

DEMO_MODEL = Path(__file__).parent / "demo_model"
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SWITCHES = ("auto", "off")
ATTENTIONS = ("auto", "sdpa", "eager")
MAX_SEED = 2**64 - 1
DEFAULT_MAX_NEW_TOKENS = 128
MIN_TEMPERATURE = 1e-4  # below it logits would overflow
WARPERS = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1}
"""Settings that matter to sampling alone, and the value at which each does nothing or means greedy decoding."""
PLACEMENTS = ("pack", "spread")
BACKENDS = ("auto", "nccl", "gloo")
COMPILES = ("auto", "full", "off")
EXACTNESSES = ("fast", "strict")
MAX_STRICT_RUN = 32  # tokens that a step may commit at most where exactness is strict (model/strict.py)
POLICIES = ("full", "paper", "prompt_lookup", "recycling")
ACCEPTANCES = ("tree", "guesses")
PRIORS = ("vocabulary", "none")
DEFAULT_WINDOW = (15, 5, 15)  # the paper's W, N, G for 7B models
MAX_DEPTH = 24  # of a tree of the policy full
NUM_COPIED = 10  # tokens that prompt lookup copies at most
RECYCLING_DEPTH = 6  # of token recycling's static tree
LAUNCHERS = ("auto", "local", "torchrun", "ray")


@dataclass
class LookaheadConfig:
    """What a step proposes and how much of it. None of it changes the output, only the number and the cost of steps.

    With none of W, N and G given, the policy `full` measures this machine and chooses at every step what pays.
    """

    W: Optional[int] = None  # noqa: UP045
    """Window size in columns, >= 0; 0 for no window at all. 15 if only others are given."""
    N: Optional[int] = None  # noqa: UP045
    """n-gram size, >= 2; 2 is Jacobi decoding. 5 if only others are given."""
    G: Optional[int] = None  # noqa: UP045
    """Largest number of guesses verified in a step, >= 0. 15 if only others are given."""
    policy: str = "full"
    """What is proposed: full (one tree, best first, from everything that is free; at most (W + G)(N - 1) tokens where
    they are given), paper (the window and the pool's guesses), prompt_lookup or recycling."""
    acceptance: str = "tree"
    """Policy paper: accept along any node of the tree, or, as the paper does, along guesses only."""
    budget: Optional[int] = None  # noqa: UP045
    """Tokens that a replica feeds in a step at most, >= 1, whatever they are for; the prefill is not meant. Of other
    policies than full it caps the whole tree."""
    prior: str = "vocabulary"
    """Policy full: what it knows before it has seen any text: vocabulary (what the model says follows each token alone,
    computed once and kept on disk) or none."""
    memory: str = "request"
    """Policy full: what it saw is forgotten after a request, or kept for the runtime, or in the file of this path."""
    memory_bytes: int = 16 * 2**20
    """Bytes of that memory, at least 65536; what is oldest goes first."""
    pool_from_prompt: bool = True
    """Policy paper: insert the prompt's n-grams into the pool."""
    window_seed: int = 0
    """Policy paper: seed of the prompt tokens that the window starts from."""

    def __post_init__(self) -> None:
        for name, least in (("W", 0), ("N", 2), ("G", 0), ("budget", 1)):
            if getattr(self, name) is not None:
                require_int(f"lookahead.{name}", getattr(self, name), least)
        require_choice("lookahead.policy", self.policy, POLICIES)
        require_choice("lookahead.acceptance", self.acceptance, ACCEPTANCES)
        require_choice("lookahead.prior", self.prior, PRIORS)
        if not isinstance(self.memory, str) or not self.memory:
            raise ConfigError(f"lookahead.memory={self.memory!r}: must be request, runtime or the path of a file")
        require_int("lookahead.memory_bytes", self.memory_bytes, 1 << 16)
        require_int("lookahead.window_seed", self.window_seed, 0)
        if self.acceptance != "tree" and self.policy != "paper":
            raise ConfigError(f"lookahead.acceptance={self.acceptance}: only with lookahead.policy=paper")

    @property
    def is_auto(self) -> bool:
        """Whether every step's size is chosen by what pays."""
        return self.policy == "full" and self.W is None and self.N is None and self.G is None

    @property
    def window(self) -> tuple[int, int, int]:
        """W, N and G, with the defaults filled in."""
        given = zip((self.W, self.N, self.G), DEFAULT_WINDOW, strict=True)
        return tuple(default if value is None else value for value, default in given)

    @property
    def max_run(self) -> int:
        """Tokens that one step commits at most: the deepest node's depth and the bonus token."""
        W, N, G = self.window
        depth = {
            "full": MAX_DEPTH if self.is_auto else min(MAX_DEPTH, max(0, (W + G) * (N - 1) - 1)),
            "paper": max(W + N - 3 if W else 0, N - 1 if G else 0),
            "prompt_lookup": NUM_COPIED,
            "recycling": RECYCLING_DEPTH,
        }[self.policy]
        return (depth if self.budget is None else min(depth, self.budget - 1)) + 1


PLAIN = LookaheadConfig(W=0, N=2, G=0, policy="paper", pool_from_prompt=False)
"""Plain autoregressive decoding: every step feeds the root alone."""


@dataclass
class ModelConfig:
    """Which model, and how it is loaded. Passed on to transformers' from_pretrained."""

    path: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)
    """A directory or a hub id; the demo model if not given."""
    revision: Optional[str] = None  # noqa: UP045
    """Branch, tag or commit of a hub id."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    attn_implementation: str = "auto"
    """auto, sdpa or eager."""
    device_map: Any = None
    """Where the replica's model goes within its machine: a name or a mapping of transformers' (needs accelerate). If
    not given, all of it goes to the replica's device."""
    quantization_config: Any = None
    """Quantize while loading: a transformers quantization config, or a mapping of its fields. A checkpoint that is
    quantized already needs none."""
    prefill_chunk: int = 2048
    """Tokens of the prompt fed at once."""
    fusing: str = "auto"
    """auto has known blocks (attention, MLPs and norms like Llama's) compute the same in fewer operations; off leaves
    them."""
    packing: str = "auto"
    """auto packs linear layers on a CPU, so that several tokens cost hardly more than one, but where a small model is
    faster without; off leaves them."""

    def __post_init__(self) -> None:
        if self.path == "":
            raise ConfigError("model.path: is empty; must be a directory or a hub id")
        require_choice("model.attn_implementation", self.attn_implementation, ATTENTIONS)
        require_int("model.prefill_chunk", self.prefill_chunk, 1)
        require_choice("model.fusing", self.fusing, SWITCHES)
        require_choice("model.packing", self.packing, SWITCHES)

    @property
    def location(self) -> str:
        return str(DEMO_MODEL) if self.path is None else self.path


@dataclass
class LauncherConfig:
    """How replicas are started and find one another."""

    name: str = "auto"
    """local (in this process, or spawned), torchrun (already started by it) or ray; auto is torchrun where torchrun
    started this process, else local."""
    port: int = 0
    """Port on which replicas meet (local and ray); 0 takes a free one."""
    timeout: float = 300.0
    """Seconds that a replica may take to join its peers."""
    start_timeout: float = 600.0
    """Seconds until every replica must have loaded its model."""
    apart: bool = False
    """With one local replica: in a process of its own, not in this one, so that it can be started again after a failure
    and decode several requests at once. lp-serve turns it on."""
    interface: Optional[str] = None  # noqa: UP045
    """Network interface that replicas meet and exchange over, by its name on every machine (eth0, ib0, lo); if not
    given, gloo and NCCL choose one."""
    backend: str = "auto"
    """auto (nccl on cuda, gloo on CPUs), nccl, or gloo, with which several replicas of a machine may share a GPU: for
    trying things out, not for speed (local and torchrun)."""
    placement: str = "pack"
    """Where Ray puts the replicas: pack (on few nodes) or spread (over many)."""
    address: Optional[str] = None  # noqa: UP045
    """Ray cluster to use; if not given, the one this machine or job belongs to, else a local one is started."""

    def __post_init__(self) -> None:
        require_choice("launcher", self.name, LAUNCHERS)
        require_choice("launcher.backend", self.backend, BACKENDS)
        require_choice("launcher.placement", self.placement, PLACEMENTS)
        require_int("launcher.port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"launcher.port={self.port}: must be 0 to 65535")
        if self.interface == "":
            raise ConfigError("launcher.interface: is empty; must be the name of a network interface")
        if self.address == "":
            raise ConfigError("launcher.address: is empty; must be HOST:PORT")
        require_seconds("launcher.timeout", self.timeout)
        require_seconds("launcher.start_timeout", self.start_timeout)


@dataclass
class FailureConfig:
    """What happens when a replica is lost."""

    timeout: float = 60.0
    """Seconds that a replica may leave its peers without an answer in a step before it counts as lost."""
    restarts: int = 3
    """Times that each replica is started again after it was lost (local and ray); under torchrun that is torchrun's."""

    def __post_init__(self) -> None:
        require_seconds("failure.timeout", self.timeout)
        require_int("failure.restarts", self.restarts, 0)


@dataclass
class SamplingConfig:
    """How a successor is drawn from a node's logits, in transformers' terms.

    What is None is as the model's generation_config.json says, else off.
    """

    temperature: Optional[float] = None  # noqa: UP045
    """0 is greedy decoding; if given and above 0 (at least 1e-4), successors are sampled."""
    top_k: Optional[int] = None  # noqa: UP045
    """Draw among the k most likely tokens, >= 0; 0 is off."""
    top_p: Optional[float] = None  # noqa: UP045
    """Draw among the most likely tokens that hold this much probability, in (0, 1]; 1 is off."""
    min_p: Optional[float] = None  # noqa: UP045
    """Draw among tokens at least this likely, relative to the most likely one, in [0, 1]; 0 is off."""
    typical_p: Optional[float] = None  # noqa: UP045
    """Locally typical sampling, in (0, 1]; 1 is off."""
    repetition_penalty: Optional[float] = None  # noqa: UP045
    """> 0; above 1 makes tokens that stand in the text already less likely."""
    no_repeat_ngram_size: Optional[int] = None  # noqa: UP045
    """No n-gram of this size occurs twice, >= 0; 0 is off."""
    bad_words_ids: Optional[list[list[int]]] = None  # noqa: UP045
    """Sequences of token ids that must not occur."""
    min_new_tokens: Optional[int] = None  # noqa: UP045
    """No end-of-sequence token before this many new tokens, >= 0."""
    logit_bias: Optional[dict[int, float]] = None  # noqa: UP045
    """Added to the logits, by token id."""
    seed: Optional[int] = None  # noqa: UP045
    """0 to 2**64 - 1; one is drawn, and reported, if not given. One seed, one output, whatever the parallelism."""

    def __post_init__(self) -> None:
        allowed = f"0 (greedy) or a number >= {MIN_TEMPERATURE}"
        require_number(
            "sampling.temperature", self.temperature, allowed, lambda value: value == 0 or value >= MIN_TEMPERATURE
        )
        for name in ("top_p", "typical_p"):
            require_number(f"sampling.{name}", getattr(self, name), "in (0, 1]", lambda value: 0 < value <= 1)
        require_number("sampling.min_p", self.min_p, "in [0, 1]", lambda value: 0 <= value <= 1)
        require_number("sampling.repetition_penalty", self.repetition_penalty, "a number > 0", lambda value: value > 0)
        for name in ("top_k", "no_repeat_ngram_size", "min_new_tokens", "seed"):
            if getattr(self, name) is not None:
                require_int(f"sampling.{name}", getattr(self, name), 0)
        if self.seed is not None and self.seed > MAX_SEED:
            raise ConfigError(f"sampling.seed={self.seed}: must be 0 to 2**64 - 1")
        if self.bad_words_ids is not None and not is_list(self.bad_words_ids):
            raise ConfigError(f"sampling.bad_words_ids={self.bad_words_ids}: must be lists of token ids")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"sampling.logit_bias={self.logit_bias}: must be {{TOKEN_ID: BIAS, ...}}")
        for words in self.bad_words_ids or ():
            if not is_list(words) or not words:
                raise ConfigError(f"sampling.bad_words_ids={self.bad_words_ids}: must be lists of token ids, not empty")
            for token in words:
                require_int("sampling.bad_words_ids", token, 0)
        for token, bias in (self.logit_bias or {}).items():
            require_int("sampling.logit_bias", token, 0)
            require_number(f"sampling.logit_bias of token {token}", bias, "a number", lambda value: True)
        if self.temperature == 0:
            self._refuse_warpers("sampling.temperature=0")

    def draws(self, defaults: Mapping[str, Any]) -> bool:
        """Whether successors are sampled, else picked greedily; `defaults` are the model's own."""
        if self.temperature is not None:
            return self.temperature > 0
        return bool(defaults.get("do_sample")) and defaults.get("temperature") != 0

    def check(self, defaults: Mapping[str, Any]) -> None:
        """Refuse what has no effect with a model's own defaults.

        Raises:
            ConfigError: if a setting is for sampling, and decoding is greedy.
        """
        if not self.draws(defaults):
            reason = "the model's default, greedy decoding; give sampling.temperature > 0"
            self._refuse_warpers(reason)
            if self.seed is not None and self.temperature is None:
                raise ConfigError(f"sampling.seed={self.seed}: has no effect with {reason}")

    def _refuse_warpers(self, reason: str) -> None:
        for name, off in WARPERS.items():
            if (value := getattr(self, name)) is not None and value != off:
                raise ConfigError(f"sampling.{name}={value}: has no effect with {reason}")


@dataclass
class RuntimeConfig:
    """What a runtime is made of."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    gpus: Optional[int] = None  # noqa: UP045
    """Number of replicas, on CPUs too. Under torchrun it is WORLD_SIZE; elsewhere 1 if not given."""
    gpus_per_replica: int = 1
    """GPUs that one replica spans; only 1 so far."""
    device: str = "auto"
    """auto (cuda where there is one), cpu or cuda."""
    dtype: str = "auto"
    """auto (the checkpoint's on cuda, float32 on cpu), float32, bfloat16 or float16."""
    exactness: str = "fast"
    """fast, or strict: in half precision, too, the output is that of one token a step, bit for bit. float32 is exact
    either way, up to ties that no text of ours has shown."""
    compile: str = "auto"
    """auto: on CUDA, where the model allows it, steps are replayed as CUDA graphs of a few fixed sizes; full: what is
    captured is compiled by torch.compile before (minutes at the first start); off: kernels are launched one by one.
    CPUs go without."""
    strict_tokens: int = 128
    """Tokens of every forward pass where exactness is strict; a step with more takes several. Another value is another
    rounding, so outputs are comparable at equal values only."""

    cache_dir: Optional[str] = "~/.cache/lp_runtime"  # noqa: UP045
    """Where what was measured of a model on a device is kept; null measures it at every start."""
    profile: bool = False
    """Trace the first steps of every request with torch's profiler, and print where a step's time goes."""
    profile_dir: str = "lp_profile"
    """Folder that gets the traces, one file a replica."""

    def __post_init__(self) -> None:
        if self.gpus is not None:
            require_int("gpus", self.gpus, 1)
        if self.gpus_per_replica != 1:
            raise ConfigError(
                f"gpus_per_replica={self.gpus_per_replica}: must be 1 (larger replicas are not supported)"
            )
        require_choice("device", self.device, DEVICES)
        require_choice("dtype", self.dtype, DTYPES)
        if self.model.device_map is not None and (self.gpus or 1) > 1:
            raise ConfigError(f"model.device_map={self.model.device_map}: only with gpus=1")
        if self.launcher.backend == "nccl" and self.device == "cpu":
            raise ConfigError("launcher.backend=nccl: not with device=cpu")
        if self.profile_dir == "":
            raise ConfigError("profile_dir: is empty; must be a directory")
        if self.cache_dir == "":
            raise ConfigError("cache_dir: is empty; must be a directory or null")
        require_choice("compile", self.compile, COMPILES)
        require_choice("exactness", self.exactness, EXACTNESSES)
        require_int("strict_tokens", self.strict_tokens, 2)
        check_exactness(self.exactness, self.lookahead)


def check_exactness(exactness: str, lookahead: LookaheadConfig) -> None:
    """Refuse a window that is too deep for exactness=strict.

    Raises:
        ConfigError: names W and N.
    """
    if exactness == "strict" and lookahead.max_run > MAX_STRICT_RUN:
        W, N, _ = lookahead.window
        raise ConfigError(
            f"lookahead.W={W} lookahead.N={N}: a step may commit {lookahead.max_run} tokens;"
            f" with exactness=strict it must be at most {MAX_STRICT_RUN} (W + N - 2, or N without a window)"
        )


def check_limits(max_new_tokens: int | None, stop: Any, max_time: float | None) -> None:
    """Check where a request is to stop.

    Raises:
        ConfigError: names the value and what is allowed.
    """
    if max_new_tokens is not None:
        require_int("max_new_tokens", max_new_tokens, 1)
    if stop is not None and not is_list(stop):
        raise ConfigError(f"stop={stop!r}: must be a list of strings")
    for string in stop or ():
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop={string!r}: must be strings of at least one character")
    if max_time is not None:
        require_seconds("max_time", max_time)
