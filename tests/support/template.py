"""Imports of the process that tests fork replicas from: what a replica imports, and compiled kernels.

A first replica decodes in this process. Forked replicas inherit what torch and transformers set up at first use, which
takes seconds: kernels of oneDNN, and the mapping of checkpoints.
"""

from support import interpreted  # noqa: F401

# isort: split
import torch.distributed.tensor  # noqa: F401
import transformers.distributed.tensor_parallel  # noqa: F401

import lp_runtime.constraints.compile_process  # noqa: F401
import lp_runtime.launchers.worker.replica_process  # noqa: F401
import lp_runtime.launchers.worker.replica_server  # noqa: F401
import support.simulated_gpu  # noqa: F401
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.constraints.library import library
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.exchange import compile_exchange
from lp_runtime.distributed.partition.partition import compile_partition
from lp_runtime.lookahead.drafters.best_first.drafter import compile_drafter
from lp_runtime.model.attention.mask_rows import compile_masks
from lp_runtime.model.forward.inputs import compile_layout
from lp_runtime.replica.replica import start_replica
from lp_runtime.request.request import Request
from lp_runtime.sampling.packing import compile_sampler
from lp_runtime.sizing.budget import compile_budget, compile_capacity
from support import calibration

calibration.shorten()
library()
compile_drafter()
compile_budget()
compile_capacity()
compile_sampler()
compile_layout()
compile_masks()
compile_exchange()
compile_partition()

torch.set_num_threads(1)  # a forked process does not inherit threads
settings = LookaheadConfig(W=5, N=4, G=5, prior="none")
config = RuntimeConfig(device="cpu", dtype="float32", cache_dir=None, lookahead=settings)
with start_replica(config, ReplicaContext(owns_process=False)) as replica:
    list(replica.decode(Request(tuple(range(300, 312)), settings, 8)))
