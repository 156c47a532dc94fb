"""Imported by the process that replicas of the tests are forked from: all that a replica imports, and its kernels."""

import torch.distributed.tensor  # noqa: F401
import transformers.distributed.tensor_parallel  # noqa: F401

import lp_runtime.launchers.worker.follower_server  # noqa: F401
import lp_runtime.launchers.worker.replica_process  # noqa: F401
import lp_runtime.launchers.worker.replica_server  # noqa: F401
from lp_runtime.distributed.exchange import compile_exchange
from lp_runtime.distributed.partition.partition import compile_partition
from lp_runtime.lookahead.drafters.best_first.drafter import compile_drafter
from lp_runtime.model.attention.mask import compile_masks
from lp_runtime.model.forward.inputs import compile_layout
from lp_runtime.sampling.packing import compile_sampler
from lp_runtime.sizing.budget import compile_budget, compile_capacity

compile_drafter()
compile_budget()
compile_capacity()
compile_sampler()
compile_layout()
compile_masks()
compile_exchange()
compile_partition()
