"""Times whole requests with methods and prompts that lp-bench does not compare.

python benchmarks/speed.py STUDY [ARGUMENT ...]

requests         nucleus sampling, long prefixes and batches, compared with one token per step
kinds            tokens per second relative to one token per step, by kind of prompt and temperature
tensor_parallel  lookahead parallelism compared with transformers' tensor parallelism; under torchrun
prediction       code edits with and without the file as predicted output
first_answer     the first answers of a new process, with and without the vocabulary prior on disk
splits_on_paper  bytes, collectives and times of a large model's steps, for each split of a machine's GPUs
where_lp_pays    S and step time by LP degree: dense models, experts, quantized weights, long prefixes
"""

from common import run_command

STUDIES = {
    name: name
    for name in (
        "requests",
        "kinds",
        "tensor_parallel",
        "prediction",
        "first_answer",
        "splits_on_paper",
        "where_lp_pays",
    )
}

if __name__ == "__main__":
    run_command("speed.py", __doc__, STUDIES)
