"""Settings of the commands: a runtime's, and the command's own. Those of lp-serve are in serving.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from lp_runtime.config.checks import require_choice, require_int, require_number
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.serving import MAX_BATCH, SCHEDULING_POLICIES
from lp_runtime.config.settings import RuntimeConfig, check_limits
from lp_runtime.errors import ConfigError

TURNS = ("first", "all")


def check_chat_settings(chat: bool, turns: str) -> None:
    """Refuse turns that are none, and all turns of prompts that are no conversations.

    Raises:
        ConfigError: names `turns`.
    """
    require_choice("turns", turns, TURNS)
    if turns == "all" and not chat:
        raise ConfigError("turns=all: only with chat=true")


@dataclass
class GenerateConfig(RuntimeConfig):
    """Settings of lp-generate: a runtime, prompts, and limits of the output."""

    prompt: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)
    """One prompt; its text is streamed to the terminal."""
    prompts: Optional[str] = None  # noqa: UP045
    """JSON-lines file of prompts; results go to `output`."""
    prompt_field: str = "prompt"
    """Field of each line of `prompts` that holds the prompt; if the field is a list of texts, they are the turns of a
    conversation, and the first one is the prompt."""
    chat: bool = False
    """Whether a prompt is a user's message, put through the model's chat template, and not a text to continue."""
    turns: str = "first"
    """Which turns of a conversation are played, with chat=true and `prompts`: first, or all: each answer goes into the
    next turn's prompt, and has a line of the output."""
    ids: bool = False
    """Whether prompts are token ids, not text: in the field of `prompts`, or in `prompt` as a JSON list."""
    limit: Optional[int] = None  # noqa: UP045
    """Number of prompts to take from the file, >= 1; all if not given."""
    output: Optional[str] = None  # noqa: UP045
    """File that gets one JSON object per prompt; another run resumes it."""
    max_new_tokens: Optional[int] = None  # noqa: UP045
    """Tokens to generate at most, >= 1; if not given, as in the model's generation_config.json, else 128."""
    stop: Optional[list[str]] = None  # noqa: UP045
    """Strings in the new text after which decoding stops; the output keeps the string. If not given, the model's
    stop_strings."""
    max_time: Optional[float] = None  # noqa: UP045
    """Seconds after which decoding stops, at the end of a step; no limit if not given."""
    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    num_samples: int = 1
    """Independent samples of each prompt, >= 1; more than one needs sampling."""
    policy: str = "latency"
    """How replicas are allocated to the prompts of a file: latency (all to one prompt after another), throughput (one
    to each prompt) or fair (divided among the prompts that are left)."""
    max_batch: int = MAX_BATCH
    """Prompts that a replica decodes in one forward pass at most, >= 1, with policy=throughput or fair."""
    logprobs: bool = False
    """Whether results have the model's log-probability of each new token (`prompts` only)."""
    eos: bool = True
    """Whether decoding stops at the end-of-sequence token; false goes on to max_new_tokens (for benchmarks)."""
    compare: bool = False
    """Whether `prompt` is decoded a second time, one token a step, and both are shown (single prompt only)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self.max_new_tokens, self.stop, self.max_time)
        require_int("num_samples", self.num_samples, 1)
        self._check_policy()
        if self.logprobs and self.prompts is None:
            raise ConfigError("logprobs=true: only with prompts")
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        self._check_prompts()
        self._check_chat()
        self._check_compare()

    def _check_chat(self) -> None:
        check_chat_settings(self.chat, self.turns)
        if self.chat and self.ids:
            raise ConfigError("chat=true: not with ids=true")
        if self.turns == "all" and self.prompts is None:
            raise ConfigError("turns=all: only with prompts")

    def _check_policy(self) -> None:
        require_choice("policy", self.policy, SCHEDULING_POLICIES)
        if self.policy != "latency" and self.prompts is None:
            raise ConfigError(f"policy={self.policy}: only with prompts")
        require_int("max_batch", self.max_batch, 1)
        self.launcher.own_process |= self.policy != "latency"  # only a process of its own decodes several at once

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
class ChatConfig(RuntimeConfig):
    """Settings of lp-chat: a runtime, or a server, and limits of an answer."""

    url: Optional[str] = None  # noqa: UP045
    """Server that speaks the OpenAI API, http://HOST:PORT: it answers, and no runtime is started."""
    served_name: Optional[str] = None  # noqa: UP045
    """Model to ask the server of `url` for; if not given, the first that it lists."""
    api_key: Optional[str] = None  # noqa: UP045
    """API key for the server of `url`; '${oc.env:NAME}' takes it from an environment variable."""
    api_key_file: Optional[str] = None  # noqa: UP045
    """File that holds the API key for the server of `url`."""

    system: Optional[str] = None  # noqa: UP045
    """System message that every conversation begins with; none if not given."""
    max_new_tokens: Optional[int] = None  # noqa: UP045
    """Tokens of an answer at most, >= 1; if not given, as in the model's generation_config.json, else 128."""
    stop: Optional[list[str]] = None  # noqa: UP045
    """Strings in an answer after which it stops; the answer keeps the string. If not given, the model's
    stop_strings."""
    max_time: Optional[float] = None  # noqa: UP045
    """Seconds after which an answer stops, at the end of a step; no limit if not given."""
    prefix_cache_bytes: Optional[int] = None  # noqa: UP045

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self.max_new_tokens, self.stop, self.max_time)
        _check_server(self.url, self.model.path, self.api_key, self.api_key_file, self.served_name)


def _check_server(
    url: str | None, path: str | None, api_key: str | None, api_key_file: str | None, served_name: str | None
) -> None:
    """Refuse settings that contradict whether a server is asked.

    Raises:
        ConfigError: names the setting.
    """
    if url is None:
        for name, value in (("api_key", api_key), ("api_key_file", api_key_file), ("served_name", served_name)):
            if value is not None:
                raise ConfigError(f"{name}: only with url")
    elif path is not None:
        raise ConfigError(f"model.path={path}: not with url, whose server has its model (see served_name)")
    elif api_key is not None and api_key_file is not None:
        raise ConfigError(f"api_key_file={api_key_file}: not with api_key")


METHODS = ("hf", "hf_compiled", "hf_prompt_lookup", "plain", "paper", "default")


@dataclass
class BenchConfig(RuntimeConfig):
    """Settings of lp-bench: a runtime, prompts, and the methods to compare; or a server and the load to put on it."""

    url: Optional[str] = None  # noqa: UP045
    """Server that speaks the OpenAI API, http://HOST:PORT: it is put under load, and no runtime is started."""
    served_name: Optional[str] = None  # noqa: UP045
    """Model to ask the server of `url` for; if not given, the first that it lists."""
    api_key: Optional[str] = None  # noqa: UP045
    """API key for the server of `url`; '${oc.env:NAME}' takes it from an environment variable."""
    api_key_file: Optional[str] = None  # noqa: UP045
    """File that holds the API key for the server of `url`."""
    rate: Optional[float] = None  # noqa: UP045
    """With url: requests a second, > 0, which arrive at random (Poisson), however many are being answered."""
    concurrency: Optional[int] = None  # noqa: UP045
    """With url: clients, >= 1, each of which asks again when it has its answer; 8 if neither this nor rate is given."""
    num_requests: int = 64
    """With url: requests in all, >= 1; the prompts are asked in turn."""
    load_seed: int = 0
    """With url: seed, >= 0, of the moments at which requests arrive."""
    prompts: Optional[str] = None  # noqa: UP045
    """JSON-lines files of prompts as FILE:FIELD, separated by commas; if not given, three built-in prompts."""
    limit: int = 4
    """Number of lines to read of each file, >= 1."""
    each: Optional[int] = None  # noqa: UP045
    """Number of prompts to take of each category, >= 1: of the lines' field `category` (conversations of several turns
    are one), else of each file; all if not given."""
    chat: bool = False
    """Whether prompts are users' messages, put through the model's chat template, or with url sent as messages
    (/v1/chat/completions), and not texts to continue."""
    turns: str = "first"
    """Which turns of a conversation are decoded, with chat=true: first, or all, each a prompt of its own, with the
    runtime's own greedy answers to the turns before it."""
    max_new_tokens: int = 128
    """Tokens to generate at most, >= 1."""
    eos: Optional[bool] = None  # noqa: UP045
    """Whether decoding stops at the end-of-sequence token, for every method; if not given, with chat=true alone."""
    rounds: int = 1
    """Times that every method decodes every prompt, >= 1."""
    methods: list[str] = field(default_factory=list)
    """Methods to compare: hf (transformers' greedy decoding), hf_compiled (hf with a static cache, compiled),
    hf_prompt_lookup, plain (this runtime, one token a step), paper (the paper's drafter) and default (the settings of
    lookahead); if not given, all, but hf_compiled on CUDA only."""
    splits: Optional[str] = None  # noqa: UP045
    """auto: instead of comparing methods, decode the prompts with every split of `gpus` into replicas (gpus_per_replica
    1, 2 ... gpus), print S, step time and tokens/s of each, and keep which was fastest for gpus_per_replica=fastest."""
    degrees: list[int] = field(default_factory=list)
    """LP degrees whose critical path is measured on one device: the shares of a step run one after another, and the
    slowest counts."""
    exchange_us: list[float] = field(default_factory=lambda: [30.0, 100.0, 300.0])
    """Durations of a step's exchange, in microseconds, assumed for critical paths; each gives a row."""
    threads: Optional[int] = None  # noqa: UP045
    """CPU threads of this process, >= 1; if not given, torch's choice."""
    output: Optional[str] = None  # noqa: UP045
    """Directory that gets bench.md, bench.json and, where matplotlib is installed, bench.svg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("limit", "max_new_tokens", "rounds", "num_requests"):
            require_int(name, getattr(self, name), 1)
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
        if self.threads is not None:
            require_int("threads", self.threads, 1)
        self._check_load()
        for name, value in vars(self.sampling).items():
            if value is not None and (name, value) != ("temperature", 0):
                raise ConfigError(f"sampling.{name}={value}: lp-bench compares greedy decoding, without processors")

    def _check_splits(self) -> None:
        """Refuse what is not measured of splits."""
        if self.splits is None:
            return
        require_choice("splits", self.splits, ("auto",))
        if self.gpus is None:
            raise ConfigError("splits=auto: give the number of GPUs to divide (gpus=8)")
        for name, unset in (("url", None), ("methods", []), ("degrees", []), ("gpus_per_replica", "auto")):
            if getattr(self, name) != unset:
                raise ConfigError(f"splits=auto: not with {name}")

    def _check_load(self) -> None:
        """Refuse settings of a load that are out of range or have no server."""
        _check_server(self.url, self.model.path, self.api_key, self.api_key_file, self.served_name)
        require_int("load_seed", self.load_seed, 0)
        require_number("rate", self.rate, "a number > 0", lambda value: value > 0)
        if self.concurrency is not None:
            require_int("concurrency", self.concurrency, 1)
            if self.rate is not None:
                raise ConfigError(
                    f"concurrency={self.concurrency}: not with rate, which asks however many are answered"
                )
        if self.url is None and (self.rate is not None or self.concurrency is not None):
            raise ConfigError(f"{'concurrency' if self.rate is None else 'rate'}: only with url")

    def _check_prompts(self) -> None:
        if self.prompts == "":
            raise ConfigError("prompts: is empty; must be FILE:FIELD")
        if self.each is not None:
            require_int("each", self.each, 1)
        check_chat_settings(self.chat, self.turns)
        if self.chat and self.prompts is None and self.url is None:
            raise ConfigError("chat=true: only with prompts or url")
        if self.url is not None and self.turns != "first":
            raise ConfigError(f"turns={self.turns}: not with url")

    @property
    def stops_at_eos(self) -> bool:
        """Whether decoding stops at the end-of-sequence token."""
        return self.chat if self.eos is None else self.eos


@dataclass
class DoctorConfig(RuntimeConfig):
    """Settings of lp-doctor: the runtime that is to work on this machine."""
