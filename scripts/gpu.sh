#!/usr/bin/env bash
# Everything that a machine with one GPU can tell, stage by stage; each prints a table, and writes results under OUT.
#
#   scripts/gpu.sh OUT check   the tests of what only a GPU has, and Triton's kernels on it
#   scripts/gpu.sh OUT floor   step times over the time to read the weights, SHAPE, kernels launched, captured, compiled
#   scripts/gpu.sh OUT bench   lp-bench at SHAPE's cost: transformers, plain, default, critical paths of 1 to 8 replicas
#   scripts/gpu.sh OUT shared  several ranks share the GPU over gloo: the outputs must be those of one
#   scripts/gpu.sh OUT large   floor, 13B and 34B shapes
#
# SHAPE is 7b by default. Models are the demo model inflated, in memory, but for bench's, which is in MODELS (default
# /tmp/lp_models); DATA has humaneval.jsonl and gsm8k.jsonl. PYTHON must have the package's dependencies: see carry.sh.
# Every stage should fit into 10 minutes on an H200; one that fails does not keep the others from running.
set -euo pipefail
out=$1
shift
python=${PYTHON:-python3}
shape=${SHAPE:-7b}
models=${MODELS:-/tmp/lp_models}
data=${DATA:-data}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
prompts=("$data/humaneval.jsonl:prompt" "$data/gsm8k.jsonl:question")

run() {
    case $1 in
    check)
        "$python" -m pytest -q -p no:cacheprovider tests/gpu tests/kernels/test_triton_gpu.py
        ;;
    floor)
        "$python" benchmarks/micro.py floor --output "$out/floor" --shapes "$shape" --tokens 1 8 64 128 256 --compile off auto full --dtype bfloat16
        ;;
    large)
        "$python" benchmarks/micro.py floor --output "$out/large" --shapes 13b 34b --tokens 1 64 128 --dtype bfloat16
        ;;
    bench)
        [ -f "$models/$shape/config.json" ] ||
            "$python" scripts/inflate_model.py --shape "$shape" --dtype bfloat16 --out "$models/$shape" || return
        "$python" -c "from lp_runtime.entrypoints.cli import bench_main; bench_main()" model.path="$models/$shape" dtype=bfloat16 limit=2 \
            degrees='[1,2,4,8]' prompts="${prompts[0]},${prompts[1]}" output="$out"
        ;;
    shared)
        "$python" benchmarks/correctness.py equality --output "$out" --gpus 1 2 4 --device cuda --backend gloo --limit 4 --prompts "${prompts[@]}"
        ;;
    esac
}

for stage in "$@"; do
    case $stage in
    check | floor | large) ;;
    bench | shared)
        for file in "${prompts[@]%:*}"; do
            [ -r "$file" ] || { echo "DATA=$data: $file cannot be read; stage $stage needs it" >&2; exit 2; }
        done
        ;;
    *)
        echo "stage=$stage: must be check, floor, bench, shared or large" >&2
        exit 2
        ;;
    esac
done
mkdir -p "$out" "$models"
failed=()
for stage in "$@"; do
    echo "== $stage"
    SECONDS=0
    run "$stage" 2>&1 | tee "$out/$stage.txt" || failed+=("$stage")
    echo "== $stage took $SECONDS s"
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
