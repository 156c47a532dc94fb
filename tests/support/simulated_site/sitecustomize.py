"""Give processes with this folder in PYTHONPATH, and their children, a simulated GPU from their start:

PYTHONPATH=tests/support/simulated_site OMP_NUM_THREADS=1 python -m pytest tests/gpu
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from support.simulated_gpu import simulated_gpu  # noqa: E402

gpu = simulated_gpu()
gpu.__enter__()  # never left
