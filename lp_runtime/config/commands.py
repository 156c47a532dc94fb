"""Settings of the commands: those of a runtime, and what to do with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from lp_runtime.config.checks import require_choice, require_int, require_number, require_seconds
from lp_runtime.config.settings import RuntimeConfig, check_limits
from lp_runtime.errors import ConfigError

SCHEDULING_POLICIES = ("fair", "latency", "throughput")
MAX_BATCH = 8  # requests that a replica decodes in one forward pass at most, by default
SERVERS = ("uvicorn", "ray_serve")


@dataclass
class GenerateConfig(RuntimeConfig):
    """What lp-generate takes: a runtime and what to do with it."""

    prompt: Optional[str] = None  # noqa: UP045
    """One prompt; its text is streamed to the terminal."""
    prompts: Optional[str] = None  # noqa: UP045
    """A JSON-lines file of prompts; results go to `output`."""
    prompt_field: str = "prompt"
    """Field of `prompts` that holds the prompt; of a list, the first element."""
    ids: bool = False
    """The field (or `prompt`, as a JSON list) holds token ids, not text."""
    limit: Optional[int] = None  # noqa: UP045
    """Take only this many prompts of the file."""
    output: Optional[str] = None  # noqa: UP045
    """File that gets one JSON object a prompt; a second run resumes it."""
    max_new_tokens: Optional[int] = None  # noqa: UP045
    """Tokens to generate at most; if not given, as the model's generation_config.json says, else 128."""
    stop: Optional[list[str]] = None  # noqa: UP045
    """Strings of new text after which to stop; they are kept. If not given, the model's stop_strings."""
    max_time: Optional[float] = None  # noqa: UP045
    """Seconds after which to stop, at the end of a step."""
    num_samples: int = 1
    """Independent samples of each prompt; needs sampling."""
    policy: str = "latency"
    """How replicas are divided among the prompts of a file: latency (all to one prompt after another), throughput (one
    to each) or fair (all among those that are left)."""
    max_batch: int = MAX_BATCH
    """Prompts that a replica decodes in one forward pass at most, with policy=throughput or fair."""
    logprobs: bool = False
    """Report the model's log-probability of each new token (`prompts` only)."""
    eos: bool = True
    """Stop at the end-of-sequence token; false goes on to max_new_tokens (for benchmarks)."""
    compare: bool = False
    """Decode `prompt` once more one token a step, and show both (single prompt only)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self.max_new_tokens, self.stop, self.max_time)
        require_int("num_samples", self.num_samples, 1)
        require_choice("policy", self.policy, SCHEDULING_POLICIES)
        if self.policy != "latency" and self.prompts is None:
            raise ConfigError(f"policy={self.policy}: only with prompts")
        require_int("max_batch", self.max_batch, 1)
        self.launcher.own_process |= self.policy != "latency"
        if self.logprobs and self.prompts is None:
            raise ConfigError("logprobs=true: only with prompts")
        if self.limit is not None:
            require_int("limit", self.limit, 1)
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
        if self.compare and (self.prompts is not None or self.num_samples > 1):
            raise ConfigError("compare=true: only with a single prompt and sample")
        if self.compare and self.max_time is not None:
            raise ConfigError("compare=true: not with max_time, which ends the two at different lengths")


@dataclass
class ChatConfig(RuntimeConfig):
    """What lp-chat takes: a runtime and how to answer."""

    system: Optional[str] = None  # noqa: UP045
    """A system message that every conversation begins with."""
    max_new_tokens: Optional[int] = None  # noqa: UP045
    """Tokens of an answer at most; if not given, as the model's generation_config.json says, else 128."""
    stop: Optional[list[str]] = None  # noqa: UP045
    """See GenerateConfig."""
    max_time: Optional[float] = None  # noqa: UP045
    """See GenerateConfig."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self.max_new_tokens, self.stop, self.max_time)


@dataclass
class ServeConfig(RuntimeConfig):
    """What lp-serve takes: a runtime, and how it is served."""

    server: str = "uvicorn"
    """What speaks HTTP: uvicorn, in this process, or ray_serve: an application of Ray Serve, with launcher=ray."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one."""
    port: int = 8000
    """Port to listen on; 0 takes a free one (uvicorn only)."""
    api_key: Optional[str] = None  # noqa: UP045
    """What clients must send as their API key; none is asked for if not given."""
    served_name: Optional[str] = None  # noqa: UP045
    """Name of the model for clients; the last part of model.path if not given."""
    policy: str = "fair"
    """How replicas are divided among requests: fair (all among those that are there), latency (all to one request
    after another) or throughput (one to each)."""
    max_batch: int = MAX_BATCH
    """Requests that a replica decodes in one forward pass at most, where there are more of them than replicas."""
    max_waiting: int = 64
    """Requests that may wait for others to end; more are refused with status 429."""
    queue_timeout: Optional[float] = None  # noqa: UP045
    """Seconds that a request may wait before it begins; no limit if not given."""
    max_new_tokens: Optional[int] = None  # noqa: UP045
    """Tokens that a request may generate at most; what the model's context allows if not given."""
    max_body_bytes: int = 1 << 20
    """Size of an HTTP request at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("policy", self.policy, SCHEDULING_POLICIES)
        require_int("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"port={self.port}: must be 0 to 65535")
        require_int("max_batch", self.max_batch, 1)
        require_choice("server", self.server, SERVERS)
        if self.server == "ray_serve":
            if self.port == 0:
                raise ConfigError("port=0: must be 1 to 65535 with server=ray_serve")
            if self.launcher.name not in ("auto", "ray"):
                raise ConfigError(f"launcher={self.launcher.name}: must be ray with server=ray_serve")
        require_int("max_waiting", self.max_waiting, 0)
        require_int("max_body_bytes", self.max_body_bytes, 1)
        check_limits(self.max_new_tokens, None, None)
        if self.queue_timeout is not None:
            require_seconds("queue_timeout", self.queue_timeout)
        self.launcher.own_process = True
        for name in ("host", "api_key", "served_name"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name}: is empty")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key: must be printable ASCII")


METHODS = ("hf", "hf_compiled", "hf_prompt_lookup", "plain", "paper", "default")


@dataclass
class BenchConfig(RuntimeConfig):
    """What lp-bench takes: a runtime, and what to compare."""

    prompts: Optional[str] = None  # noqa: UP045
    """JSON-lines files of prompts, FILE:FIELD, several with commas between; a few of its own if not given."""
    limit: int = 4
    """Prompts of each file."""
    max_new_tokens: int = 128
    """Tokens to generate, past any end of text."""
    rounds: int = 1
    """Times that every prompt is decoded by every method."""
    methods: list[str] = field(default_factory=list)
    """hf (transformers' greedy decoding), hf_compiled (with a static cache, compiled), hf_prompt_lookup, plain (one
    token a step, here), paper, default (as lookahead says); all of them if not given, hf_compiled on CUDA only."""
    degrees: list[int] = field(default_factory=list)
    """Numbers of replicas whose critical path is measured: each one's share of a step runs alone, in turn, and the
    slowest counts."""
    exchange_us: list[float] = field(default_factory=lambda: [30.0, 100.0, 300.0])
    """Microseconds of a step's exchange that are taken for critical paths; a column each."""
    threads: Optional[int] = None  # noqa: UP045
    """CPU threads of this process; as torch chooses if not given."""
    output: Optional[str] = None  # noqa: UP045
    """Folder that gets bench.md, bench.json and, where matplotlib is installed, bench.svg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("limit", "max_new_tokens", "rounds"):
            require_int(name, getattr(self, name), 1)
        for method in self.methods:
            require_choice("methods", method, METHODS)
        for degree in self.degrees:
            require_int("degrees", degree, 1)
        for microseconds in self.exchange_us:
            require_number("exchange_us", microseconds, "a number >= 0", lambda value: value >= 0)
        if not self.exchange_us:
            raise ConfigError("exchange_us=[]: must have at least one number")
        if self.threads is not None:
            require_int("threads", self.threads, 1)
        if self.prompts == "":
            raise ConfigError("prompts: is empty; must be FILE:FIELD")
        for name, value in vars(self.sampling).items():
            if value is not None and (name, value) != ("temperature", 0):
                raise ConfigError(f"sampling.{name}={value}: lp-bench compares greedy decoding, without processors")
