"""What the parts of a step take, each by itself. Nothing else should run on the machine.

python benchmarks/micro.py STUDY [ARGUMENT ...]

exchange   one exchange between processes of this machine
floor      a forward pass beside the time to read the model's weights once
host       what of a step's host work does not hide behind an accelerator
partition  tokens that the busiest replica feeds, beside the proven optimum
step       forward pass, exchange and everything else of a step, by setting and number of replicas
"""

from common import run_command

STUDIES = {"exchange": "exchange", "floor": "floor", "host": "host_time", "partition": "partition", "step": "step_time"}

if __name__ == "__main__":
    run_command(__doc__, STUDIES)
