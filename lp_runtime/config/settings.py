"""Settings as typed dataclasses, each validated where it is made. Hydra fills the same classes (see cli.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from lp_runtime.config.checks import is_list, require_choice, require_int, require_seconds
from lp_runtime.config.lookahead import LookaheadConfig, check_exactness
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.errors import ConfigError

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SWITCHES = ("auto", "off")
ATTENTIONS = ("auto", "sdpa", "eager")
DEFAULT_MAX_NEW_TOKENS = 128
PLACEMENTS = ("pack", "spread")
BACKENDS = ("auto", "nccl", "gloo")
COMPILES = ("auto", "full", "off")
EXACTNESSES = ("fast", "strict")
LAUNCHERS = ("auto", "local", "torchrun", "ray")


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
    own_process: bool = False
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
