"""Imported by the process that replicas of the tests are forked from: all that a replica imports, and its kernels."""

import lp_runtime.launchers.worker_process  # noqa: F401
from lp_runtime.lookahead.best_first import compile_kernels
from lp_runtime.model.drawing import compile_drawing
from lp_runtime.model.layout import compile_layout
from lp_runtime.model.mask import compile_masks
from lp_runtime.parallel.budget import compile_budget
from lp_runtime.parallel.exchange import compile_exchange
from lp_runtime.parallel.partition import compile_partition

compile_kernels()
compile_budget()
compile_drawing()
compile_layout()
compile_masks()
compile_exchange()
compile_partition()
