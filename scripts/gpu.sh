#!/usr/bin/env bash
# Run all measurements of a machine with a GPU: in four calls of at most nine minutes each, or all at once.
#
#   scripts/gpu.sh OUT A     versions and bandwidth; the floor at SHAPE; the kernels of a step; every kernel; tests/gpu
#   scripts/gpu.sh OUT B     lp-bench at SHAPE; nucleus sampling, prefixes, batches; the exchange; NCCL of one rank
#   scripts/gpu.sh OUT C     the floor at LARGE; a real model and its text at SHAPE's cost, if there is one; transformers
#                            compiled; replicas that share a GPU, and shards; sums inside captured passes
#   scripts/gpu.sh OUT D     V = 131,072; WINDOWS and EXPERTS: the floor, fused or not; a prefix of 32k
#   scripts/gpu.sh OUT all   A to D without their limits; with several GPUs also NCCL, shared memory, kills and LP
#   scripts/gpu.sh OUT B exchange nccl      these parts of a call only
#
# Each part runs under `timeout`; the next part runs even if it fails. Rows are shown as they come. OUT gets two files
# per call: CALL.txt, the whole output, and CALL.jsonl, a line of results for each part.
#
# Models are inflated demo models in GPU memory, except for lp-bench's, which is written to MODELS. Environment:
#   SHAPE=7b LARGE=34b WINDOWS=windows EXPERTS="experts qwen3_experts gpt_oss"   the models to measure
#   MODELS=/tmp/lp_models                folder for the inflated model; MODELS/real is the real model, if it exists.
#                                        A folder in /dev/shm is faster, if it has room for 27 GB
#   PROMPTS=FILE:FIELD[,FILE:FIELD]      prompts of lp-bench; built-in ones by default
#   PYTHON=python3                       has torch, triton, transformers, numba, psutil, pytest and pytest-xdist
#   SITE=FILE.tar.xz                     all other needed packages: scripts/carry.sh makes it
#   SIZE=tiny                            a rehearsal, with the demo model and few tokens
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -lt 2 ]; then
    sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | grep '^#' >&2
    exit 2
fi
out="$(realpath -m "$1")"
call=$2
shift 2
wanted=("$@")
python=${PYTHON:-python3}
models=${MODELS:-/tmp/lp_models}
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# cuDNN plans its attention again for each new number of keys, tenths of a second each: for transformers, every token.
export TORCH_CUDNN_SDPA_DEPRIORITIZED=1
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${SITE:-}" ] && [ "$call" != part ]; then # a part inherits it in its PYTHONPATH
    mkdir "$work/site"
    tar xf "$SITE" -C "$work/site"
    PYTHONPATH="$PYTHONPATH:$work/site"
fi
mkdir -p "$out" "$models"

if [ "${SIZE:-}" = tiny ]; then
    shape=${SHAPE:-demo} large=${LARGE:-demo} windows=${WINDOWS:-small_windows} vocabulary=5000 wide=6000
    experts=(${EXPERTS:-small_experts})
    machine=(--copy-mib 16 --product 128) floor=(--rounds 2 --context 40) copy=(--copy-mib 16) few=(1 8) many=(1 8 16) new=8
    kernels=(--tokens 1 8 --prefixes 40 --heads 4 2 --head-size 64 --intermediate 256 --vocabulary 512)
    requests=(--limit 1 --prefixes 64 --batch 2) exchange=(--gpus 2 --nodes 16 --rounds 20) degrees='[1,2]'
    gpu_tests=("tests/gpu -k slow_reader") share=(--gpus 1 2 --settings 5,3,5 --limit 1 --max-new-tokens 8)
    real=(device=cpu limit=1 lookahead.prior=none "methods=[hf,default]") # real models are too large for a simulated GPU
else
    shape=${SHAPE:-7b} large=${LARGE:-34b} windows=${WINDOWS:-windows} vocabulary=32000 wide=131072
    experts=(${EXPERTS:-experts qwen3_experts gpt_oss})
    machine=() floor=(--rounds 20) copy=() few=(1 64 128) many=(1 8 16 32 64 128 256) new=128
    kernels=(--profile) requests=(--limit 2 --prefixes 4096 32768 --batch 8)
    exchange=(--gpus 2 4 --nodes 16 64 256) degrees='[1,2,4,8]'
    # With the slow cases, which are slow only in Triton's interpreter, but for one that needs no GPU.
    gpu_tests=("tests/gpu"
        "tests/kernels -o addopts= --deselect tests/kernels/test_triton_gpu.py::test_kernels_compile_for_absent_gpus")
    share=(--gpus 1 2 4 --limit 3 --max-new-tokens 128)
    real=(limit=2 "methods=[hf,hf_prompt_lookup,plain,default]")
fi
half=(--dtype bfloat16)
device=cuda nccl=nccl kills=20 sums=(--sums) workers=(-n 6)
if [ "${SIZE:-}" = tiny ]; then
    device=cpu gpus=2 nccl=gloo kills=2 sums=() workers=(-n 0) # NCCL is not simulated
else
    gpus=${LP_GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
fi
export LP_GPUS=$gpus # for the parts: querying torch takes seconds
replicas=(2) # numbers of replicas of the parts for several GPUs
[ "$gpus" -le 2 ] || replicas+=("$gpus")

# Parts of a call, in order, with their limits in seconds: 540 together.
parts_of() {
    case $1 in
    A) echo machine:30 floor:70 profile:50 kernels:100 off:50 tests:240 ;;
    B) echo inflate:70 bench:120 requests:120 exchange:80 nccl:40 ;;
    C) echo large:60 cost:110 real:60 inflate:40 compiled:70 share:120 shards:80 ;;
    D) echo wide:150 windows:210 experts:180 ;;
    many) echo equality:1800 ranks:1800 kills:1800 parallel:3600 splits:3600 tensor_parallel:3600 ;;
    esac
}

lp_bench() { "$python" -c "from lp_runtime.entrypoints.cli import bench_main; bench_main()" output="$results" max_new_tokens="$new" "$@"; }

model_path() { if [ "$shape" = demo ]; then echo "$PWD/lp_runtime/demo_model"; else echo "$models/$shape"; fi; }

# FILE:FIELD of the built-in prompts.
own_prompts() {
    "$python" -c "
import json, sys
from lp_runtime.bench.prompts import OWN_PROMPTS
print('\n'.join(json.dumps({'text': prompt}) for prompt in OWN_PROMPTS), file=open(sys.argv[1], 'w'))" "$work/prompts.jsonl"
    echo "$work/prompts.jsonl:text"
}

run() {
    local micro=("$python" benchmarks/micro.py)
    case $1 in
    machine) "${micro[@]}" machine --output "$results" "${machine[@]}" ;;
    floor) "${micro[@]}" floor --output "$results" --models "$shape" "${half[@]}" "${floor[@]}" "${copy[@]}" --tokens "${many[@]}" --compile auto ;;
    profile) "${micro[@]}" profile --output "$results" --model "$shape" "${half[@]}" --tokens 1 "${few[-1]}" ;;
    kernels) "${micro[@]}" kernels --output "$results" "${kernels[@]}" ;;
    off) "${micro[@]}" floor --output "$results" --models "$shape" "${half[@]}" "${floor[@]}" "${copy[@]}" --tokens "${few[@]}" --compile off ;;
    tests)
        status=0
        for tests in "${gpu_tests[@]}"; do # run the next even if one fails
            "$python" -m pytest -q -p no:cacheprovider "${workers[@]}" $tests || status=$?
        done
        return $status
        ;;
    inflate)
        [ "$shape" = demo ] || [ -f "$models/$shape/config.json" ] ||
            "$python" experiments/inflate_model.py --shape "$shape" --dtype bfloat16 --out "$models/$shape"
        ;;
    bench)
        lp_bench model.path="$(model_path)" dtype=bfloat16 limit=2 degrees="$degrees" \
            "methods=[hf,hf_prompt_lookup,plain,paper,default]" ${PROMPTS:+prompts="$PROMPTS"}
        ;;
    requests) "$python" benchmarks/speed.py requests --output "$results" --model "$shape" "${half[@]}" --vocabulary "$vocabulary" \
        --max-new-tokens "$new" "${requests[@]}" ;;
    wide) "$python" benchmarks/speed.py requests --output "$results" --model "$shape" "${half[@]}" --vocabulary "$wide" \
        --max-new-tokens "$new" "${requests[@]}" --conditions greedy nucleus ;;
    exchange) "${micro[@]}" exchange --output "$results" "${exchange[@]}" --backends shared gloo ;;
    nccl) "$python" benchmarks/resilience.py nccl --output "$results" --backend "${NCCL:-nccl}" ;;
    large) "${micro[@]}" floor --output "$results" --models "$large" "${half[@]}" "${floor[@]}" "${copy[@]}" --tokens "${few[@]}" ;;
    windows)
        "${micro[@]}" floor --output "$results" --models "$windows" --fusing auto off "${half[@]}" "${floor[@]}" "${copy[@]}" --tokens "${few[@]}"
        "$python" benchmarks/speed.py requests --output "$results" --model "$windows" "${half[@]}" --max-new-tokens "$new" \
            "${requests[@]}" --conditions prefix
        ;;
    compiled) lp_bench model.path="$(model_path)" dtype=bfloat16 limit=1 "methods=[hf,hf_compiled]" ;;
    share) "$python" benchmarks/correctness.py equality --output "$results" --device cuda --backend gloo "${share[@]}" --prompts "$(own_prompts)" ;;
    shards)
        "$python" benchmarks/correctness.py equality --output "$results" --device "$device" --backend gloo --gpus 2 --gpus-per-replica 2 \
            --settings 5,3,5 --limit 3 --max-new-tokens "$new" --prompts "$(own_prompts)"
        "${micro[@]}" floor --output "$results" --models "$shape" "${half[@]}" "${floor[@]}" "${copy[@]}" --tokens "${few[@]}" "${sums[@]}"
        ;;
    experts)
        "${micro[@]}" experts --output "$results" --compile auto "${floor[@]}" --tokens "${few[@]}"
        "${micro[@]}" floor --output "$results" --models "${experts[@]}" --fusing auto off "${half[@]}" "${floor[@]}" "${copy[@]}" --tokens "${few[@]}"
        ;;
    real)
        if [ ! -f "$models/real/config.json" ]; then
            echo "no model in $models/real: scripts/get_real_model.sh makes one"
        else
            lp_bench model.path="$models/real" "${real[@]}" ${PROMPTS:+prompts="$PROMPTS"}
        fi
        ;;
    cost) # the real model's text at SHAPE's cost
        if [ ! -f "$models/real/config.json" ]; then
            echo "no model in $models/real: scripts/get_real_model.sh makes one"
        elif [ "$shape" = demo ]; then
            echo "SHAPE=demo is smaller than the real model"
        else
            [ -f "$models/real_$shape/config.json" ] ||
                "$python" experiments/inflate_model.py --from "$models/real" --shape "$shape" --dtype bfloat16 --out "$models/real_$shape"
            lp_bench model.path="$models/real_$shape" dtype=bfloat16 "${real[@]}" ${PROMPTS:+chat=true prompts="$PROMPTS"}
        fi
        ;;
    equality) "$python" benchmarks/correctness.py equality --output "$results" --device "$device" --backend "$nccl" --gpus 1 "${replicas[@]}" \
        --limit 3 --max-new-tokens "$new" --prompts "$(own_prompts)" ;;
    ranks) "${micro[@]}" step --output "$results" --device "$device" --gpus 1 "${replicas[@]}" --max-new-tokens "$new" --limit 3 --prompts "$(own_prompts)" ;;
    kills) "$python" benchmarks/resilience.py kills --output "$results" --device "$device" --kills "$kills" --gpus "${replicas[@]}" --backends shared "$nccl" \
        --limit 3 --max-new-tokens "$new" --prompts "$(own_prompts)" ;;
    parallel) lp_bench model.path="$(model_path)" dtype=bfloat16 device="$device" gpus="$gpus" limit=2 "methods=[hf,plain,default]" ${PROMPTS:+prompts="$PROMPTS"} ;;
    splits) lp_bench model.path="$(model_path)" dtype=bfloat16 device="$device" gpus="$gpus" limit=2 splits=auto ${PROMPTS:+prompts="$PROMPTS"} ;;
    tensor_parallel) "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" benchmarks/speed.py tensor_parallel \
        --output "$results" --model "$(model_path)" --dtype bfloat16 --limit 2 --max-new-tokens "$new" --prompts "$(own_prompts)" ;;
    esac
}

if [ "$call" = part ]; then # a part of a call is a separate process, which `timeout` ends with all that it has started
    results=$out
    run "${wanted[0]}"
    exit
fi
calls=("$call")
budget=540 # seconds of a call
factor=1   # of the parts' limits
if [ "${SIZE:-}" = tiny ]; then budget=2160 factor=4; fi # simulated GPUs are slow
if [ "$call" = all ]; then
    calls=(A B C D)
    budget=36000 factor=4
    if [ "$gpus" -gt 1 ] || [ "${SIZE:-}" = tiny ]; then calls+=(many); fi
fi
for name in "${calls[@]}"; do
    parts="$(parts_of "$name")"
    [ -n "$parts" ] || { echo "call=$name: must be A, B, C, D or all" >&2; exit 2; }
    for part in "${wanted[@]}"; do
        [[ "$call" = all || " $parts" == *" $part:"* ]] || { echo "part=$part: must be one of $parts" >&2; exit 2; }
    done
done

failed=()
for name in "${calls[@]}"; do
    SECONDS=0
    for each in $(parts_of "$name"); do
        part=${each%:*}
        if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $part "* ]]; then continue; fi
        limit=$((${each#*:} * factor))
        if [ $limit -gt $((budget - SECONDS)) ]; then limit=$((budget - SECONDS)); fi
        if [ $limit -lt 1 ]; then
            echo "== $name $part: no time is left" | tee -a "$out/$name.txt"
            failed+=("$part")
            continue
        fi
        echo "== $name $part, at $SECONDS s, for at most $limit s" | tee -a "$out/$name.txt"
        mkdir "$work/$name-$part"
        status=0
        timeout --kill-after=5 "$limit" scripts/gpu.sh "$work/$name-$part" part "$part" 2>&1 |
            tee -a "$out/$name.txt" || status=${PIPESTATUS[0]}
        for file in "$work/$name-$part"/*.json; do
            if [ -f "$file" ]; then tr -d '\n' <"$file" >>"$out/$name.jsonl" && echo >>"$out/$name.jsonl"; fi
        done
        if [ "$status" -ne 0 ]; then
            failed+=("$part")
            echo "== $name $part failed with status $status" | tee -a "$out/$name.txt"
        fi
    done
    echo "== $name took $SECONDS s" | tee -a "$out/$name.txt"
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
