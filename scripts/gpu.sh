#!/usr/bin/env bash
# Everything that a machine with one GPU can tell, stage by stage; each prints a table, and writes it under OUT.
#
#   scripts/gpu.sh OUT check   the tests of what only a GPU has, and Triton's kernels on it
#   scripts/gpu.sh OUT floor   step times over the time to read the weights, 7B shape, kernels launched, captured, compiled
#   scripts/gpu.sh OUT bench   lp-bench at a 7B model's cost: transformers, plain, default, critical paths of 1 to 8 replicas
#   scripts/gpu.sh OUT shared  several ranks share the GPU over gloo: the outputs must be those of one
#   scripts/gpu.sh OUT large   floor, 13B and 34B shapes
#
# Models are the demo model inflated, in memory, but bench's, in MODELS (default /tmp/lp_models); DATA has humaneval.jsonl and gsm8k.jsonl. PYTHON
# must have the package's dependencies. Every stage should fit into 10 minutes on an H200.
set -euo pipefail
out=$1
shift
python=${PYTHON:-python3}
models=${MODELS:-/tmp/lp_models}
data=${DATA:-data}
export PYTHONPATH=.:benchmarks${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out" "$models"

prompts=("$data/humaneval.jsonl:prompt" "$data/gsm8k.jsonl:question")
for stage in "$@"; do
    echo "== $stage"
    case $stage in
    check)
        "$python" -m pytest -q -p no:cacheprovider tests/gpu tests/model/test_triton_kernels.py 2>&1 | tee "$out/check.txt"
        ;;
    floor)
        "$python" benchmarks/floor.py --shapes 7b --tokens 1 8 64 128 256 --compile off auto full --dtype bfloat16 |
            tee "$out/floor.txt"
        ;;
    large)
        "$python" benchmarks/floor.py --shapes 13b 34b --tokens 1 64 128 --dtype bfloat16 | tee "$out/large.txt"
        ;;
    bench)
        [ -f "$models/7b/config.json" ] || "$python" scripts/inflate_model.py --shape 7b --dtype bfloat16 --out "$models/7b"
        "$python" -c "from lp_runtime.cli import bench_main; bench_main()" model.path="$models/7b" dtype=bfloat16 limit=2 degrees='[1,2,4,8]' \
            prompts="${prompts[0]},${prompts[1]}" output="$out" 2>&1 | tee "$out/bench.txt"
        ;;
    shared)
        "$python" benchmarks/equality.py --gpus 1 2 4 --device cuda --backend gloo --limit 4 --prompts "${prompts[@]}" | tee "$out/shared.txt"
        ;;
    *)
        echo "stage=$stage: must be check, floor, bench, shared or large" >&2
        exit 2
        ;;
    esac
done
