"""Settings of lp-serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from lp_runtime.config.checks import home_path, require_choice, require_int, require_port, require_seconds
from lp_runtime.config.settings import RuntimeConfig, check_limits
from lp_runtime.errors import ConfigError

SCHEDULING_POLICIES = ("fair", "latency", "throughput")
MAX_BATCH = 8  # default of the largest number of requests in a forward pass of one replica
TIMEOUTS = ("header_timeout", "body_timeout", "keep_alive_timeout", "shutdown_timeout", "health_timeout")
TOOL_FORMATS = (
    *("auto", "none", "response_template", "hermes", "qwen3_coder", "seed_oss", "glm", "deepseek_v3", "deepseek_v31"),
    *("deepseek_v32", "deepseek_v4", "kimi_k2", "minimax_m2", "mistral", "mistral_args", "mistral_id", "harmony"),
    *("granite", "phi4_mini", "nemotron", "gemma", "functiongemma", "lfm2", "llama3", "pythonic"),
)
REASONINGS = ("auto", "none", "think", "mistral", "gemma", "cohere", "seed", "granite", "apriel")
SERVERS = ("uvicorn", "ray_serve")


@dataclass
class ServeConfig(RuntimeConfig):
    """Settings of lp-serve: those of a runtime, the scheduler, and the HTTP server."""

    prefix_cache_bytes: Optional[int] = None  # noqa: UP045
    server: str = "uvicorn"
    """HTTP server: uvicorn (in this process) or ray_serve (an application of Ray Serve, with launcher=ray)."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all interfaces."""
    port: int = 8000
    """Port to listen on, 0 to 65535; 0 picks a free one (uvicorn only)."""
    api_key: Optional[str] = None  # noqa: UP045
    """API key that clients must send, printable ASCII; if not given, none is required."""
    api_keys: Optional[str] = None  # noqa: UP045
    """File of API keys, one client per line as NAME KEY; # begins a comment. The access log shows the names."""
    served_name: Optional[str] = None  # noqa: UP045
    """Model name that clients see; if not given, the last part of model.path."""
    policy: str = "fair"
    """How replicas are allocated to requests: fair (divided among the running requests), latency (all to one request
    after another) or throughput (one to each request)."""
    max_batch: int = MAX_BATCH
    """Largest number of requests in a forward pass of one replica, >= 1, if there are more requests than replicas."""
    max_waiting: int = 64
    """Requests that may wait in the queue, >= 0; more are refused with status 429."""
    queue_timeout: Optional[float] = None  # noqa: UP045
    """Seconds that a request may wait in the queue; no limit if not given."""
    max_new_tokens: Optional[int] = None  # noqa: UP045
    """Tokens that a request may generate at most, >= 1; if not given, as many as the model's context allows."""
    max_body_bytes: int = 1 << 20
    """Largest body of an HTTP request, in bytes, >= 1."""
    strict_fields: bool = False
    """Whether a request with an unknown field is refused; if not, the field is ignored, and logged once."""
    tool_format: str = "auto"
    """How the model writes tool calls: a format of docs/serving.md, response_template (the model's own description),
    none, or auto: the format in which the chat template writes a call."""
    reasoning: str = "auto"
    """Marks of the reasoning part that answers may begin with: think (<think> and </think>), another of
    docs/serving.md, none, or auto: those that the chat template has."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template for all chats, such as {enable_thinking: false}; those of a request come first."""
    allowed_hosts: Optional[list[str]] = None  # noqa: UP045
    """Accepted Host headers, without port; *.NAME allows subdomains. If not given: the names of the loopback interface
    if `host` is one of its addresses, else any."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins of web pages, in addition to this server's own, whose scripts may send requests, as https://NAME; *
    allows any."""
    header_timeout: float = 10.0
    """Seconds for the headers of a request to arrive (uvicorn only)."""
    body_timeout: float = 30.0
    """Seconds for the body of a request to arrive."""
    keep_alive_timeout: float = 15.0
    """Seconds that a connection stays open between two requests (uvicorn only)."""
    max_connections: int = 1024
    """Largest number of open connections, >= 1, and less than half of the limit of open files. Beyond it, a connection
    that idles after an answer is closed; if there is none, one that waits gets status 503 (uvicorn only)."""
    shutdown_timeout: float = 5.0
    """Seconds for answers to finish after SIGINT or SIGTERM; the rest are then ended with an error that clients
    receive."""
    health_interval: Optional[float] = None  # noqa: UP045
    """Turns on GET /health_generate, which generates a token: seconds between two such checks, > 0. A call that
    comes sooner gets the previous answer."""
    health_timeout: float = 10.0
    """Seconds within which the check of /health_generate must get a token."""
    otlp_endpoint: Optional[str] = None  # noqa: UP045
    """OpenTelemetry collector that receives a span for every request, by OTLP over HTTP, such as
    http://HOST:4318/v1/traces; none if not given. Needs the extra otel."""
    access_log: bool = False
    """Whether every request is logged to stderr, as one line of JSON."""
    ssl_certfile: Optional[str] = None  # noqa: UP045
    """Certificate in PEM, for HTTPS; plain HTTP if not given (uvicorn only)."""
    ssl_keyfile: Optional[str] = None  # noqa: UP045
    """Private key of the certificate, in PEM; if not given, it is read from ssl_certfile."""
    show_progress: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("api_keys", "ssl_certfile", "ssl_keyfile"):
            setattr(self, name, home_path(name, getattr(self, name)))
        require_choice("policy", self.policy, SCHEDULING_POLICIES)
        require_choice("tool_format", self.tool_format, TOOL_FORMATS)
        require_choice("reasoning", self.reasoning, REASONINGS)
        require_port("port", self.port)
        require_int("max_batch", self.max_batch, 1)
        self._check_server()
        require_int("max_waiting", self.max_waiting, 0)
        require_int("max_body_bytes", self.max_body_bytes, 1)
        check_limits(self.max_new_tokens, None, None)
        for name in ("queue_timeout", "health_interval", *TIMEOUTS):
            require_seconds(name, getattr(self, name), or_none=True)
        require_int("max_connections", self.max_connections, 1)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError(f"ssl_keyfile={self.ssl_keyfile}: only with ssl_certfile")
        self.launcher.own_process = True  # only a separate process can restart and decode several requests at once
        for name in ("host", "api_key", "api_keys", "served_name", "ssl_certfile", "ssl_keyfile", "otlp_endpoint"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name}: is empty")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key: must be printable ASCII")
        if self.api_key is None and self.api_keys is None:  # nothing distinguishes clients
            self.lookahead = self.lookahead.with_drafts_of_one_request()

    @property
    def has_runtime(self) -> bool:
        return self.server == "uvicorn"

    @property
    def may_batch(self) -> bool:
        return self.policy != "latency" and self.max_batch > 1

    def _check_server(self) -> None:
        require_choice("server", self.server, SERVERS)
        if self.server == "ray_serve":
            if self.port == 0:
                raise ConfigError("port=0: must be 1 to 65535 with server=ray_serve")
            if self.launcher.name not in ("auto", "ray"):
                raise ConfigError(f"launcher={self.launcher.name}: must be ray with server=ray_serve")
