"""Arguments with which each study of benchmarks/ takes about a second on a tiny model.

FILE is a JSON-lines file with one prompt, which has all fields that the docs name. CHECKOUT is a folder like a checkout
of transformers. A test checks the arguments of a command in docs/, and runs its study with these arguments instead.
"""

from __future__ import annotations

PROMPT = {name: "def fib(n):" for name in ("prompt", "question", "text")} | {"turns": ["def fib(n):"]}
PROMPTS = "--prompts FILE:prompt --limit 1 --max-new-tokens 6"
SETTINGS = "--settings 3,3,3"

STUDIES = {
    "micro.py": {
        "machine": "--copy-mib 1 --product 8",
        "exchange": "--gpus 2 --nodes 2 --backends shared --rounds 10 --regroup 2 --announce 1",
        "floor": "--tokens 1 4 --rounds 1 --context 8 --copy-mib 1 --sums",
        "profile": "--tokens 1 --context 8 --rows 2",
        "kernels": "--tokens 1 8 --prefixes 16 --dtypes float32 --heads 2 1 --head-size 8 --intermediate 16 "
        "--vocabulary 32 --profile",
        "experts": "--tokens 1 --context 8 --rounds 1 --compile auto",
        "partition": "--W 3 --N 3 --G 2 --gpus 1 2",
        "shards": "--shards 1 2 --tokens 1",
        "masks": "--nodes 4 --repeats 2",
        "host": f"{PROMPTS} --max-new-tokens 24 {SETTINGS} auto --gpus 1 2 --device-ms 0.1",
        "step": f"{PROMPTS} {SETTINGS} --gpus 1 --device cpu",
    },
    "correctness.py": {
        "equality": f"{PROMPTS} {SETTINGS} --gpus 1",
        "identity": "--cases 2",
        "constraints": "--draws 3",
        "schemas": "--schemas 1 --max-new-tokens 2",
        "forced": "--schemas 2 --max-new-tokens 16",
        "distribution": "--seeds 2",
        "half_precision": f"{PROMPTS} {SETTINGS} --gpus 1 --strict-tokens 16",
        "types": "--only llama --seeds 1",
        "random_configs": "--number 1",
        "chains": "--types mamba --draws 1 --gpus 1",
        "shared_model": "--calls 4 --threads 2 --interrupts 2",
        "wrapped_models": "--only use_cache --max-new-tokens 4",
        "transformers_tests": "--tests CHECKOUT --families llama --max-new-tokens 4",
        "prefix_cache": "--system-tokens 120 --conversations 1 --question-tokens 4 --new-tokens 4 --prompts 4",
        "text": "--sequences 2 --kinds byte_level llama2",
        "fuzz": "--requests 3 --fields 3 --overrides 3",
    },
    "resilience.py": {
        "nccl": "--backend gloo",
        "kills": f"{PROMPTS} --kills 1 --gpus 2 --backends shared",
        "load": f"{PROMPTS} --gpus 2 --clients 2 --policies fair --seconds 0.1",
        "faults": f"{PROMPTS} --rounds 1 --when 0 --faults kill memory disconnect",
    },
    "speed.py": {
        "requests": "--prefixes 32 --batch 2 --limit 1 --max-new-tokens 4 --dtype float32",
        "kinds": f"{PROMPTS} {SETTINGS} --temperatures 0 1",
        "tensor_parallel": PROMPTS,
        "prediction": PROMPTS,
        "first_answer": PROMPTS,
        "splits_on_paper": "--compression 1:2.4 2:2.7 4:3.0",
        "where_lp_pays": f"{PROMPTS} --prefixes 16 --degrees 1 2 --processes",
    },
}
# Smallest runs whose exit status is not 0: few samples cannot tell a wrong sampler from a right one.
STATUS = {("correctness.py", "distribution"): 1, ("correctness.py", "identity"): 1}
