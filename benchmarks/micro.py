"""Times the parts of a step separately. Nothing else should run on the machine.

python benchmarks/micro.py STUDY [ARGUMENT ...]

machine    versions, copy bandwidth, matrix products, kernel launches
exchange   one exchange between processes of this machine, by transport
floor      a forward pass, compared with the time to read the model's weights once
profile    the kernels of a step, by torch's profiler
kernels    one layer against float64, and the time of its kernels, by tokens and prefix
experts    a mixture of experts: captured or not, time per step, text compared with transformers'
host       host time of a step that an accelerator cannot hide
masks      host time of a constraint in a step
partition  tokens that the busiest replica feeds, compared with the proven optimum
shards     slices of a model: memory and disk reads while loading; a sum between shards
step       forward pass, exchange and the rest of a step, by setting and number of replicas
"""

from common import run_command

STUDIES = {
    name: name
    for name in ("machine", "exchange", "floor", "profile", "kernels", "experts", "partition", "shards", "masks")
}
STUDIES |= {"host": "host_time", "step": "step_time"}

if __name__ == "__main__":
    run_command("micro.py", __doc__, STUDIES)
