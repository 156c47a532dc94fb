"""Settings of the commands: those of a runtime, plus the command's own. For lp-serve, see serving.py."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Optional

from lp_runtime.config.checks import home_path, path_text, require_choice, require_filled, require_int, require_number
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.serving import MAX_BATCH, SCHEDULING_POLICIES
from lp_runtime.config.settings import RuntimeConfig, check_limits
from lp_runtime.errors import ConfigError

TURNS = ("first", "all")


def check_chat_settings(chat: bool, turns: str) -> None:
    require_choice("turns", turns, TURNS)
    if turns == "all" and not chat:
        raise ConfigError("turns=all: only with chat=true")


@dataclass
class GenerateConfig(RuntimeConfig):
    """Settings of lp-generate: those of a runtime, prompts, and limits of the output."""

    prompt: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)
    """One prompt; its text is streamed to the terminal."""
    prompts: Optional[str] = None  # noqa: UP045
    """JSON-lines file of prompts; results go to `output`."""
    prompt_field: str = "prompt"
    """Field that holds the prompt in each line of `prompts`. If it is a list of texts, they are the turns of a
    conversation, and the first one is the prompt."""
    chat: bool = False
    """Whether prompts are user messages, formatted with the model's chat template, instead of texts to continue."""
    turns: str = "first"
    """Turns of a conversation to decode, with chat=true and `prompts`: first, or all: each answer becomes part of the
    next turn's prompt, and has its own line in the output."""
    ids: bool = False
    """Whether prompts are token ids, not text: in the field of `prompts`, or in `prompt` as a JSON list."""
    limit: Optional[int] = None  # noqa: UP045
    """Number of prompts to read from the file, >= 1; all if not given."""
    output: Optional[str] = None  # noqa: UP045
    """File for the results, one JSON object per prompt; a later run with the same file resumes it."""
    max_new_tokens: Optional[int] = None  # noqa: UP045
    """Tokens to generate at most, >= 1; if not given, the value of the model's generation_config.json, else 128."""
    stop: Optional[list[str]] = None  # noqa: UP045
    """Strings in the new text after which decoding stops; the output includes the string. If not given, the model's
    stop_strings."""
    max_time: Optional[float] = None  # noqa: UP045
    """Seconds after which decoding stops, at the end of a step; no limit if not given."""
    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    num_samples: int = 1
    """Independent samples of each prompt, >= 1; more than one needs sampling."""
    policy: str = "latency"
    """How replicas are allocated to the prompts of a file: latency (all to one prompt after another), throughput (one
    to each prompt) or fair (divided among the remaining prompts)."""
    max_batch: int = MAX_BATCH
    """Largest number of prompts in a forward pass of one replica, >= 1, with policy=throughput or fair."""
    logprobs: bool = False
    """Whether results include the model's log-probability of each new token (`prompts` only)."""
    eos: bool = True
    """Whether decoding stops at the end-of-sequence token; false continues to max_new_tokens (for benchmarks)."""
    compare: bool = False
    """Whether `prompt` is also decoded with one token per step, and both outputs are shown (single prompt only)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompts, self.output = home_path("prompts", self.prompts), home_path("output", self.output)
        check_limits(self.max_new_tokens, self.stop, self.max_time)
        require_int("num_samples", self.num_samples, 1)
        self._check_policy()
        if self.logprobs and self.prompts is None:
            raise ConfigError("logprobs=true: only with prompts")
        require_int("limit", self.limit, 1, or_none=True)
        self._check_prompts()
        self._check_chat()
        self._check_compare()

    def _check_chat(self) -> None:
        check_chat_settings(self.chat, self.turns)
        if self.chat and self.ids:
            raise ConfigError("chat=true: not with ids=true")
        if self.turns == "all" and self.prompts is None:
            raise ConfigError("turns=all: only with prompts")

    @property
    def may_batch(self) -> bool:
        return self.policy != "latency" and self.max_batch > 1

    def _check_policy(self) -> None:
        require_choice("policy", self.policy, SCHEDULING_POLICIES)
        if self.policy != "latency" and self.prompts is None:
            raise ConfigError(f"policy={self.policy}: only with prompts")
        require_int("max_batch", self.max_batch, 1)
        self.launcher.own_process |= self.policy != "latency"  # only a separate process decodes several at once

    def _check_prompts(self) -> None:
        if (self.prompt is None) == (self.prompts is None):
            given = "both" if self.prompt is not None else "neither"
            raise ConfigError(f"prompt and prompts: give one of them ({given} given)")
        if self.prompts is not None and self.output is None:
            raise ConfigError("output: must be given with prompts")
        if self.prompts is None and self.output is not None:
            raise ConfigError(f"output={self.output}: only with prompts")
        if self.prompts is None and self.limit is not None:
            raise ConfigError(f"limit={self.limit}: only with prompts")
        if self.prompt == "":
            raise ConfigError("prompt: is empty; it must have at least one character")

    def _check_compare(self) -> None:
        if self.compare and (self.prompts is not None or self.num_samples > 1):
            raise ConfigError("compare=true: only with a single prompt and sample")
        if self.compare and self.max_time is not None:
            raise ConfigError("compare=true: not with max_time, which ends the two at different lengths")


@dataclass
class ClientConfig(RuntimeConfig):
    """Settings of commands that use a runtime or a server."""

    url: Optional[str] = None  # noqa: UP045
    """Server with an OpenAI-compatible API, http://HOST:PORT, which answers instead of a runtime in this process."""
    served_name: Optional[str] = None  # noqa: UP045
    """Model to request from the server at `url`; if not given, the first that it lists."""
    api_key: Optional[str] = None  # noqa: UP045
    """API key for the server at `url`; '${oc.env:NAME}' reads it from an environment variable."""
    api_key_file: Optional[str] = None  # noqa: UP045
    """File that holds the API key for the server at `url`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.api_key_file = home_path("api_key_file", self.api_key_file)

    @property
    def has_runtime(self) -> bool:
        return self.url is None

    def _check_server(self) -> None:
        """Raise ConfigError if a server setting lacks `url`, or a setting would have no effect with `url`."""
        if self.url is None:
            for name in ("api_key", "api_key_file", "served_name"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name}: only with url")
            return
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError(f"api_key_file={self.api_key_file}: not with api_key")
        if self.model.path is not None:
            path = self.model.path
            raise ConfigError(f"model.path={path}: not with url; the server has its own model (see served_name)")
        defaults = type(self)()
        for each in fields(RuntimeConfig):
            if each.name != "sampling":  # sent with each request
                _check_default(each.name, getattr(self, each.name), getattr(defaults, each.name))


def _check_default(name: str, value: object, default: object) -> None:
    """Raise ConfigError if a setting of a runtime, or a setting of a group of them, is not the default."""
    if is_dataclass(value):
        for each in fields(value):
            _check_default(f"{name}.{each.name}", getattr(value, each.name), getattr(default, each.name))
    elif value != default:
        raise ConfigError(f"{name}={value}: not with url; it is a setting of the server")


@dataclass
class ChatConfig(ClientConfig):
    """Settings of lp-chat: those of a runtime or the URL of a server, and limits of an answer."""

    system: Optional[str] = None  # noqa: UP045
    """System message at the beginning of every conversation; none if not given."""
    max_new_tokens: Optional[int] = None  # noqa: UP045
    """Tokens of an answer at most, >= 1; if not given, the value of the model's generation_config.json, else 128."""
    stop: Optional[list[str]] = None  # noqa: UP045
    """Strings in an answer after which it stops; the answer includes the string. If not given, the model's
    stop_strings."""
    max_time: Optional[float] = None  # noqa: UP045
    """Seconds after which an answer stops, at the end of a step; no limit if not given."""
    prefix_cache_bytes: Optional[int] = None  # noqa: UP045

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self.max_new_tokens, self.stop, self.max_time)
        self._check_server()


MAX_THREADS = 1024  # torch ends the process if it cannot start its threads
METHODS = ("hf", "hf_compiled", "hf_prompt_lookup", "plain", "paper", "default")


@dataclass
class BenchConfig(ClientConfig):
    """Settings of lp-bench: those of a runtime, and methods to compare; or a server and the load on it."""

    url: Optional[str] = None  # noqa: UP045
    """Server with an OpenAI-compatible API, http://HOST:PORT, to measure under load instead of a runtime in this
    process."""
    rate: Optional[float] = None  # noqa: UP045
    """With url: mean number of requests per second, > 0; they arrive at random (Poisson), regardless of how many are
    running."""
    concurrency: Optional[int] = None  # noqa: UP045
    """With url: number of clients, >= 1; each sends a request when its previous one is answered. 8 if neither this nor
    rate is given."""
    num_requests: int = 64
    """With url: total number of requests, >= 1; they use the prompts in turn."""
    load_seed: int = 0
    """With url: seed, >= 0, of the arrival times of requests."""
    prompts: Optional[str] = None  # noqa: UP045
    """JSON-lines files of prompts as FILE:FIELD, separated by commas; if not given, three built-in prompts."""
    limit: int = 4
    """Number of lines to read from each file, >= 1."""
    each: Optional[int] = None  # noqa: UP045
    """Number of prompts to use per category, >= 1; all if not given. Categories are the lines' field `category`
    (conversations of several turns are one category); without it, each file is one."""
    chat: bool = False
    """Whether prompts are user messages, formatted with the model's chat template or, with url, sent to
    /v1/chat/completions, instead of texts to continue."""
    turns: str = "first"
    """Turns of a conversation to decode, with chat=true: first, or all: each turn is a separate prompt, with the
    runtime's greedy answers to the turns before it."""
    max_new_tokens: int = 128
    """Tokens to generate at most, >= 1."""
    eos: Optional[bool] = None  # noqa: UP045
    """Whether decoding stops at the end-of-sequence token, for every method; if not given, only with chat=true.
    With url the server decides, unless false is given."""
    rounds: int = 1
    """Number of times that every method decodes every prompt, >= 1."""
    methods: list[str] = field(default_factory=list)
    """Methods to compare: hf (transformers' greedy decoding), hf_compiled (hf with a static cache, compiled),
    hf_prompt_lookup, plain (this runtime, one token per step), paper (the paper's drafter) and default (the lookahead
    settings). If not given: all that can run this model, except hf_compiled on CPUs."""
    splits: Optional[str] = None  # noqa: UP045
    """auto: instead of comparing methods, decode the prompts with every split of `gpus` into replicas (gpus_per_replica
    1, 2 ... gpus), print S, step time and tokens/s of each, and save the fastest for gpus_per_replica=fastest."""
    degrees: list[int] = field(default_factory=list)
    """LP degrees whose critical path is measured on one device: the shares of a step run one after another, and the
    slowest counts."""
    exchange_us: list[float] = field(default_factory=lambda: [30.0, 100.0, 300.0])
    """Assumed durations of a step's exchange on critical paths, in microseconds; each gives a row."""
    threads: Optional[int] = None  # noqa: UP045
    """CPU threads of this process, 1 to 1024; if not given, torch's choice."""
    output: Optional[str] = None  # noqa: UP045
    """Directory for bench.md, bench.json and, if matplotlib is installed, bench.svg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompts, self.output = path_text(self.prompts), home_path("output", self.output)
        for name in ("limit", "max_new_tokens", "rounds", "num_requests"):
            require_int(name, getattr(self, name), 1)
        self.lookahead = self.lookahead.with_drafts_of_one_request()  # prompts are decoded several times
        if self.url is None and self.prefix_cache_bytes != 0:
            raise ConfigError(
                f"prefix_cache_bytes={self.prefix_cache_bytes}: must be 0, because prompts are decoded several times"
            )
        self._check_prompts()
        for method in self.methods:
            require_choice("methods", method, METHODS)
        for degree in self.degrees:
            require_int("degrees", degree, 1)
        self._check_splits()
        for microseconds in self.exchange_us:
            require_number("exchange_us", microseconds, "a number >= 0", lambda value: value >= 0)
        if not self.exchange_us:
            raise ConfigError("exchange_us=[]: must have at least one number")
        require_int("threads", self.threads, 1, or_none=True)
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ConfigError(f"threads={self.threads}: must be at most {MAX_THREADS}")
        self._check_load()
        for name, value in vars(self.sampling).items():
            if value is not None and (name, value) != ("temperature", 0):
                raise ConfigError(f"sampling.{name}={value}: lp-bench compares greedy decoding, without processors")

    def _check_splits(self) -> None:
        if self.splits is None:
            return
        require_choice("splits", self.splits, ("auto",))
        if self.gpus is None:
            raise ConfigError("splits=auto: give the number of GPUs to divide (gpus=8)")
        for name, unset in (("url", None), ("methods", []), ("degrees", []), ("gpus_per_replica", "auto")):
            if getattr(self, name) != unset:
                raise ConfigError(f"splits=auto: not with {name}")

    def _check_load(self) -> None:
        self._check_server()
        require_int("load_seed", self.load_seed, 0)
        require_number("rate", self.rate, "a number > 0", lambda value: value > 0)
        if self.concurrency is not None:
            require_int("concurrency", self.concurrency, 1)
            if self.rate is not None:
                raise ConfigError(
                    f"concurrency={self.concurrency}: not with rate, which sends requests regardless of running ones"
                )
        if self.url is None and (self.rate is not None or self.concurrency is not None):
            raise ConfigError(f"{'concurrency' if self.rate is None else 'rate'}: only with url")

    def _check_prompts(self) -> None:
        require_filled("prompts", self.prompts, "FILE:FIELD")
        require_int("each", self.each, 1, or_none=True)
        check_chat_settings(self.chat, self.turns)
        if self.chat and self.prompts is None and self.url is None:
            raise ConfigError("chat=true: only with prompts or url")
        if self.url is not None and self.turns != "first":
            raise ConfigError(f"turns={self.turns}: not with url")

    @property
    def has_runtime(self) -> bool:
        return self.url is None and self.splits is None

    @property
    def stops_at_eos(self) -> bool:
        """Whether decoding stops at the end-of-sequence token: `eos`, or else `chat`."""
        return self.chat if self.eos is None else self.eos


@dataclass
class DoctorConfig(RuntimeConfig):
    """Settings of lp-doctor: those of the runtime to check on this machine."""

    @property
    def has_runtime(self) -> bool:
        return False
