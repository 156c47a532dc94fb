"""What the parts of a step take, each by itself. Nothing else should run on the machine.

python benchmarks/micro.py STUDY [ARGUMENT ...]

machine    versions, copy bandwidth, products, launches
exchange   one exchange between processes of this machine, by transport
floor      a forward pass beside the time to read the model's weights once
profile    the kernels of a step, by torch's profiler
kernels    one layer against float64, and the time of its kernels, by tokens and prefix
experts    a mixture of experts: captured or not, its steps, its text beside transformers'
host       what of a step's host work does not hide behind an accelerator
masks      host time of a constraint in a step
partition  tokens that the busiest replica feeds, beside the proven optimum
shards     slices of a model: memory and reading while they load; a sum between shards
step       forward pass, exchange and everything else of a step, by setting and number of replicas
"""

from common import run_command

STUDIES = {
    name: name
    for name in ("machine", "exchange", "floor", "profile", "kernels", "experts", "partition", "shards", "masks")
}
STUDIES |= {"host": "host_time", "step": "step_time"}

if __name__ == "__main__":
    run_command("micro.py", __doc__, STUDIES)
