"""Settings of a runtime as typed dataclasses, each checked at construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from lp_runtime.config.checks import (
    home_path,
    is_list,
    is_unicode,
    keep_plain_values,
    path_text,
    require_choice,
    require_filled,
    require_int,
    require_port,
    require_seconds,
)
from lp_runtime.config.lookahead import LookaheadConfig, check_exactness
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.errors import ConfigError

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SWITCHES = ("auto", "off")
ATTENTIONS = ("auto", "sdpa", "eager")
PARALLELISMS = ("auto", "tensor", "pipeline")
DEFAULT_MAX_NEW_TOKENS = 128
PLACEMENTS = ("pack", "spread")
BACKENDS = ("auto", "shared", "nccl", "gloo")
COMPILES = ("auto", "off")
EXACTNESSES = ("fast", "strict")
LAUNCHERS = ("auto", "local", "torchrun", "ray")
SPLITS = ("auto", "fastest")  # values of gpus_per_replica that are not numbers
DEFAULT_CONTEXT_TOKENS = 8192  # default limit of the context that gpus_per_replica=auto leaves memory for


@dataclass
class ModelConfig:
    """The model, how it is loaded (arguments of transformers' from_pretrained), and how it is optimized."""

    path: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)
    """Directory or hub id; the demo model if not given."""
    revision: Optional[str] = None  # noqa: UP045
    """Branch, tag or commit of a hub id."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    use_safetensors: bool = True
    """Read weights from safetensors files only. false: read pickled weights too, from a model that has nothing else."""
    attn_implementation: str = "auto"
    """Attention implementation that the model is loaded with: auto (transformers' choice), sdpa or eager."""
    device_map: Any = None
    """transformers' device_map for one replica's layers: a name or a mapping (needs accelerate). If not given, the
    whole model goes to the replica's device."""
    quantization_config: Any = None
    """Quantization while loading: a transformers quantization config, or a mapping of its fields. A quantized
    checkpoint needs none."""
    parallelism: str = "auto"
    """How a model is divided among several GPUs of a replica: tensor (each holds a slice of every layer), pipeline
    (each holds some of the layers, and they compute in turns; works for any model that loads; needs accelerate; not
    under torchrun) or auto: tensor if the model can be sliced, else pipeline on GPUs."""
    prefill_chunk: int = 2048
    """Prompt tokens in one forward pass of the prefill, >= 1."""
    fusing: str = "auto"
    """auto: attention, MLPs and norms like Llama's run in fewer operations, with equal results; off: use the model's
    own modules."""
    packing: str = "auto"
    """auto: pack linear layers on a CPU, so that several tokens cost hardly more than one, unless a small model is
    faster unpacked; off: pack none."""

    def __post_init__(self) -> None:
        keep_plain_values(self)
        self.path = path_text(self.path)
        require_filled("model.path", self.path, "a directory or a hub id")
        require_choice("model.attn_implementation", self.attn_implementation, ATTENTIONS)
        require_choice("model.parallelism", self.parallelism, PARALLELISMS)
        require_int("model.prefill_chunk", self.prefill_chunk, 1)
        require_choice("model.fusing", self.fusing, SWITCHES)
        require_choice("model.packing", self.packing, SWITCHES)

    @property
    def location(self) -> str:
        """The directory or hub id to load; the demo model's directory if no path is given."""
        if self.path is None:
            return str(DEMO_MODEL)
        location: str = home_path("model.path", self.path)  # by the process that reads it, like all files of replicas
        return location


@dataclass
class LauncherConfig:
    """Settings of how replicas start and connect to each other."""

    name: str = "auto"
    """How replicas start: local (in this process, or spawned), torchrun (which started this process) or ray; auto is
    torchrun if torchrun started this process, else local."""
    port: int = 0
    """Port for the replicas' rendezvous (local and ray) unless they share memory, 0 to 65535; 0 picks a free one."""
    timeout: float = 300.0
    """Seconds for a replica to join its first group; failure.timeout limits later ones (local and ray)."""
    start_timeout: float = 600.0
    """Seconds for every replica to load its model."""
    own_process: bool = False
    """Run a single local replica in a separate process, so that it can restart after a failure and decode several
    requests at once. lp-serve turns it on."""
    interface: Optional[str] = None  # noqa: UP045
    """Network interface for rendezvous and exchange between replicas that share no memory, by its name on every machine
    (eth0, ib0, lo); if not given, gloo and NCCL choose one."""
    backend: str = "auto"
    """Transport between replicas: auto (shared inside a machine, gloo between machines; if each replica has a machine
    to itself, nccl on cuda and gloo on CPUs), shared (memory of one machine), nccl, or gloo. If shared or gloo is given
    explicitly, several replicas may share a GPU, for trying things out."""
    placement: str = "pack"
    """Placement of replicas on Ray nodes: pack (on few) or spread (over many)."""
    address: Optional[str] = None  # noqa: UP045
    """Ray cluster to use; if not given, the one this machine or job belongs to, else a local one is started."""

    def __post_init__(self) -> None:
        keep_plain_values(self)
        require_choice("launcher", self.name, LAUNCHERS)
        require_choice("launcher.backend", self.backend, BACKENDS)
        require_choice("launcher.placement", self.placement, PLACEMENTS)
        require_port("launcher.port", self.port)
        require_filled("launcher.interface", self.interface, "the name of a network interface")
        require_filled("launcher.address", self.address, "HOST:PORT")
        require_seconds("launcher.timeout", self.timeout)
        require_seconds("launcher.start_timeout", self.start_timeout)


@dataclass
class FailureConfig:
    """Settings of when a replica counts as lost, and of how often it is restarted."""

    timeout: float = 60.0
    """Seconds without an answer in a step, or while a group forms again, after which a replica counts as lost."""
    heartbeat: float = 5.0
    """Seconds without an answer to a ping after which a decoding replica counts as lost, whatever it is computing
    (local and ray)."""
    restarts: int = 3
    """Number of times that each lost replica is restarted within an hour, >= 0 (local and ray); torchrun has its own
    setting."""

    def __post_init__(self) -> None:
        keep_plain_values(self)
        require_seconds("failure.timeout", self.timeout)
        require_seconds("failure.heartbeat", self.heartbeat)
        require_int("failure.restarts", self.restarts, 0)


@dataclass
class RuntimeConfig:
    """Settings of a runtime: model, replicas, drafting, sampling."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    gpus: Optional[int] = None  # noqa: UP045
    """Number of GPUs (on CPUs: of processes), >= 1, a multiple of gpus_per_replica; gpus / gpus_per_replica replicas
    share them. If not given: WORLD_SIZE under torchrun, else gpus_per_replica."""
    gpus_per_replica: Any = "auto"
    """GPUs (on CPUs: processes) that one replica spans, divided by model.parallelism: auto, fastest or a number >= 1.
    auto: the fewest whose free memory holds the model and the keys and values of context_tokens; on CPUs 1. fastest:
    the fastest split that `lp-bench splits=auto` measured for this model and number of GPUs on this machine."""
    context_tokens: Optional[int] = None  # noqa: UP045
    """Tokens of prompt and output together, >= 1, that gpus_per_replica=auto leaves memory for; if not given, the
    model's context length, at most 8192."""
    device: str = "auto"
    """Device of the replicas: auto (cuda if there is a GPU), cpu or cuda."""
    dtype: str = "auto"
    """Type of weights and activations: auto (the checkpoint's on cuda, float32 on cpu), float32, bfloat16 or
    float16."""
    exactness: str = "fast"
    """fast or strict. strict: the output equals that of one token per step, bit for bit, in half precision too. float32
    is exact with either, up to ties of logits."""
    compile: str = "auto"
    """How steps run on CUDA: auto (replayed as CUDA graphs of a few fixed sizes, if the model allows it) or off
    (kernels launched one by one). CPUs ignore it."""
    strict_tokens: int = 128
    """Tokens of every forward pass with exactness=strict, >= 2; a step with more needs several passes. Rounding depends
    on the value, so outputs are comparable only at equal values."""

    prefix_cache_bytes: Optional[int] = 0  # noqa: UP045
    """Size limit of the prefix cache in a replica's memory, in bytes, >= 0: keys and values of finished sequences, for
    prompts with the same beginning. 0 keeps none; null uses all free memory, on a CPU a quarter of it. No request waits
    for that memory: the least recently used entries are dropped. The draft tables of the last 8 sequences are kept too.
    Default of lp-serve and lp-chat: null."""
    cache_dir: Optional[str] = "~/.cache/lp_runtime"  # noqa: UP045
    """Directory that keeps the measurements of a model on a device, the index of a corpus and, for commands, compiled
    code; null measures at every start."""
    show_progress: bool = False
    """Whether replicas report the progress of their start on stderr; lp-serve turns it on."""
    profile: bool = False
    """Trace the first steps of every request with torch's profiler, and print a breakdown of a step's time."""
    profile_dir: str = "lp_profile"
    """Directory for the traces, one file per replica."""

    def __post_init__(self) -> None:
        keep_plain_values(self)
        self.cache_dir = path_text(self.cache_dir)
        self.profile_dir = path_text(self.profile_dir)
        require_int("gpus", self.gpus, 1, or_none=True)
        require_int("context_tokens", self.context_tokens, 1, or_none=True)
        self._check_shards()
        require_choice("device", self.device, DEVICES)
        require_choice("dtype", self.dtype, DTYPES)
        if self.model.device_map is not None and self.num_gpus > 1:
            raise ConfigError(f"model.device_map={self.model.device_map}: only with gpus=1")
        if self.launcher.backend == "nccl" and self.device == "cpu":
            raise ConfigError("launcher.backend=nccl: not with device=cpu")
        require_filled("profile_dir", self.profile_dir, "a directory")
        require_int("prefix_cache_bytes", self.prefix_cache_bytes, 0, or_none=True)
        require_filled("cache_dir", self.cache_dir, "a directory or null")
        if self.cache_dir != RuntimeConfig.cache_dir:  # a user without a home folder measures at every start
            home_path("cache_dir", self.cache_dir)
        require_choice("compile", self.compile, COMPILES)
        require_choice("exactness", self.exactness, EXACTNESSES)
        require_int("strict_tokens", self.strict_tokens, 2)
        check_exactness(self.exactness, self.lookahead)

    def _check_shards(self) -> None:
        value = self.gpus_per_replica
        if value not in SPLITS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"gpus_per_replica={value}: must be {', '.join(SPLITS)} or an integer >= 1")
        if self.num_gpus % self.replica_gpus:
            raise ConfigError(f"gpus={self.gpus}: must be a multiple of gpus_per_replica={self.gpus_per_replica}")
        if self.replica_gpus == 1:
            return
        if self.model.device_map is not None:
            raise ConfigError(f"model.device_map={self.model.device_map}: only with gpus_per_replica=1")
        if self.model.quantization_config is not None and self.model.parallelism == "tensor":
            raise ConfigError(
                f"model.quantization_config={self.model.quantization_config}: only with gpus_per_replica=1,"
                " or model.parallelism=pipeline"
            )

    @property
    def is_split_chosen(self) -> bool:
        """Whether gpus_per_replica is a number: given, or chosen at the runtime's start (launchers/split.py)."""
        return self.gpus_per_replica not in SPLITS

    @property
    def replica_gpus(self) -> int:
        """Number of GPUs, or processes on CPUs, that one replica spans; 1 until it is chosen."""
        return int(self.gpus_per_replica) if self.is_split_chosen else 1

    @property
    def num_stages(self) -> int:
        """Number of GPUs that one process spreads a model's layers over; 1 with tensor parallelism."""
        return self.replica_gpus if self.model.parallelism == "pipeline" else 1

    @property
    def num_shards(self) -> int:
        """Number of processes of one replica, each with a slice of every layer; 1 with pipeline parallelism."""
        return self.replica_gpus // self.num_stages

    @property
    def may_batch(self) -> bool:
        """Whether a replica may decode several requests in one forward pass."""
        return False

    @property
    def has_runtime(self) -> bool:
        """Whether the command with these settings has a runtime in its process."""
        return True

    @property
    def num_gpus(self) -> int:
        """Number of GPUs, or processes on CPUs, by the settings; under torchrun, WORLD_SIZE decides instead."""
        return self.gpus or self.replica_gpus

    @property
    def num_replicas(self) -> int:
        """Number of replicas by the settings; under torchrun, WORLD_SIZE / gpus_per_replica decides instead."""
        return self.num_gpus // self.replica_gpus


def check_limits(max_new_tokens: int | None, stop: object, max_time: float | None) -> None:
    """Raise ConfigError if a request's limit is out of range; None is no limit."""
    require_int("max_new_tokens", max_new_tokens, 1, or_none=True)
    if stop is not None and not is_list(stop):
        raise ConfigError(f"stop={stop!r}: must be a list of strings")
    for string in stop or ():
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop={string!r}: must be strings of at least one character")
        if not is_unicode(string):
            raise ConfigError(f"stop={string!r}: is not valid Unicode")
    require_seconds("max_time", max_time, or_none=True)
