"""Checks that decoding survives lost replicas and many clients. Exits with 1 if an output is wrong.

python benchmarks/resilience.py STUDY [ARGUMENT ...]

nccl   a communicator of one rank together with a captured graph: used, aborted by another thread, formed again
kills  replicas are killed at random steps
load   many clients query lp-serve at once
faults what a client sees of each fault: processes, memory, disks, network, Ray
"""

from common import run_command

STUDIES = {name: name for name in ("nccl", "kills", "load", "faults")}

if __name__ == "__main__":
    run_command("resilience.py", __doc__, STUDIES)
