#!/usr/bin/env bash
# Make .venv in the repository's root and install lp_runtime into it, unless that is already done.
#
#   scripts/setup.sh              the packages that lp-generate needs
#   scripts/setup.sh ray,test     also these extras of pyproject.toml
#
# Runs from any folder, and may be repeated. Installed extras are noted in .venv/.lp_runtime-*; a note is valid while
# pyproject.toml, constraints.txt and the path of the repository do not change.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
extras="${1:-}"
venv="$root/.venv"
python="$venv/bin/python"

say() { printf '%s\n' "$*" >&2; }

# Return whether a command is a Python that can make the environment.
suits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Warn if this machine lacks anything that its GPU needs; without nvidia-smi nothing is checked.
check_gpu_machine() {
    local driver needed=580 headers package compiler="${CC:-cc}" # CUDA 13, as the torch of constraints.txt needs
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    [[ "$("$python" -c 'from importlib.metadata import version; print(version("torch"))')" == *+cu12* ]] && needed=525
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null)" || driver=""
    driver="${driver%%$'\n'*}" # one line per GPU; piped to `head`, nvidia-smi would sometimes fail to write the second
    if [[ "${driver%%.*}" =~ ^[0-9]+$ ]] && ((${driver%%.*} < needed)); then
        say "warning: the NVIDIA driver is $driver, and torch needs $needed or newer: update the driver, or install a" \
            "torch built for an older CUDA from https://download.pytorch.org/whl"
    fi
    if ! command -v "${compiler%% *}" cc gcc clang >/dev/null 2>&1; then
        say "warning: no C compiler (cc, gcc, clang or \$CC), so Triton's kernels cannot be used and a GPU is several" \
            "times slower: install gcc (Debian, Ubuntu: sudo apt-get install gcc)"
    fi
    headers="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    if [[ ! -f "$headers/Python.h" ]]; then
        package="$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"
        say "warning: $headers has no Python.h, so Triton's kernels cannot be used and a GPU is several times slower:" \
            "install $package (Debian, Ubuntu: sudo apt-get install $package)"
    fi
}

# Compile the drafter for the first command. It needs numba only, so it runs while pip installs the rest.
compile_drafter() (
    cd "$root"
    exec "$python" -c 'from lp_runtime.replica.compile_ahead import compile_steps; compile_steps(is_shared=True)'
) >/dev/null 2>&1

# Import what commands or tests import, so that the first one finds byte code.
import_once() (
    cd "$root"
    unset PYTHONDONTWRITEBYTECODE
    if [[ ",$extras," == *,test,* ]]; then
        "$python" -m pytest --collect-only -q
    else
        "$python" -c 'import lp_runtime.entrypoints.cli, lp_runtime.replica.replica, transformers.models.llama.modeling_llama'
    fi
) >/dev/null 2>&1

fingerprint="$(cat "$root/pyproject.toml" "$root/constraints.txt" <(printf '%s' "$root") | cksum)"
stamp() { printf '%s/.lp_runtime-%s' "$venv" "${1:-base}"; }
is_done() { [[ -x "$python" && -f "$(stamp "$1")" && "$(<"$(stamp "$1")")" == "$fingerprint" ]]; }

# Installing an extra keeps the others, so a larger set also satisfies a smaller one.
case "$extras" in
    "") enough=("" ray ray,test ray,test,dev) ;;
    ray) enough=(ray ray,test ray,test,dev) ;;
    ray,test) enough=(ray,test ray,test,dev) ;;
    *) enough=("$extras") ;;
esac

has_extras() {
    local set
    for set in "${enough[@]}"; do
        if is_done "$set"; then return 0; fi
    done
    return 1
}
if has_extras; then exit 0; fi
# Jobs of several machines may share one checkout. A file system without locks goes on without one.
exec 9<"$root"
flock --nonblock 9 2>/dev/null || [[ $? != 1 ]] || {
    say "waiting until another scripts/setup.sh has made $venv"
    flock 9
}
if has_extras; then exit 0; fi

if ! suits "$python"; then
    base=""
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if suits "$candidate"; then
            base="$candidate"
            break
        fi
    done
    if [[ -n "$base" ]]; then
        say "making $venv with $("$base" --version)"
        "$base" -m venv --clear "$venv"
    elif command -v uv >/dev/null 2>&1; then
        say "making $venv with uv and Python 3.12, as no Python 3.11 or newer with venv and pip was found"
        rm -rf "$venv"
        uv venv --quiet --seed --python 3.12 "$venv"
    else
        say "error: no Python 3.11 or newer with venv and pip found (tried python3, python3.14 ... python3.11, python):" \
            "run 'sudo apt-get install python3.11-venv python3.11-dev'," \
            "or 'curl -LsSf https://astral.sh/uv/install.sh | sh', and then this again"
        exit 1
    fi
fi

pip=("$python" -m pip --disable-pip-version-check install -qq --no-compile --constraint "$root/constraints.txt")
say "installing torch and lp_runtime${extras:+ with $extras} into $venv (the first time this takes some minutes)"
# The pip of Python 3.11 takes a minute more to choose the versions. If no newer one can be had, go on with it.
"${pip[@]}" --upgrade pip 2>/dev/null || true
"${pip[@]}" numba pyyaml
compile_drafter &
compiler=$!
trap 'kill "$compiler" 2>/dev/null || true' EXIT # background jobs do not get an interrupt
"${pip[@]}" torch
"${pip[@]}" --editable "$root${extras:+[$extras]}"
import_once || true
wait "$compiler" || true
check_gpu_machine
printf '%s\n' "$fingerprint" >"$(stamp "$extras")"
