#!/usr/bin/env bash
# Make .venv in the repository's root and install lp_runtime into it, unless that has been done.
#
#   scripts/setup.sh              what lp-generate needs
#   scripts/setup.sh ray,test     and these extras of pyproject.toml
#
# Runs from any folder, again and again. What is installed is noted in .venv/.lp_runtime-*; the note holds as long as
# pyproject.toml, constraints.txt and the place of the repository are the same.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
extras="${1:-}"
venv="$root/.venv"
python="$venv/bin/python"

say() { printf '%s\n' "$*" >&2; }

# Whether this command is a Python that can make the environment.
suits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

fingerprint="$(cat "$root/pyproject.toml" "$root/constraints.txt" <(printf '%s' "$root") | cksum)"
stamp() { printf '%s/.lp_runtime-%s' "$venv" "${1:-base}"; }
is_done() { [[ -x "$python" && -f "$(stamp "$1")" && "$(<"$(stamp "$1")")" == "$fingerprint" ]]; }

# Installing an extra leaves the others in place, so a larger set serves for a smaller one.
case "$extras" in
    "") enough=("" ray ray,test ray,test,dev) ;;
    ray) enough=(ray ray,test ray,test,dev) ;;
    ray,test) enough=(ray,test ray,test,dev) ;;
    *) enough=("$extras") ;;
esac
for set in "${enough[@]}"; do
    if is_done "$set"; then exit 0; fi
done

if ! suits "$python"; then
    base=""
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if suits "$candidate"; then
            base="$candidate"
            break
        fi
    done
    if [[ -z "$base" ]]; then
        say "error: no Python 3.11 or newer with venv and pip found (tried python3, python3.14 ... python3.11, python)"
        exit 1
    fi
    say "making $venv with $("$base" --version)"
    "$base" -m venv --clear "$venv"
fi

pip=("$python" -m pip --disable-pip-version-check install -qq --constraint "$root/constraints.txt")
say "installing torch and lp_runtime${extras:+ with $extras} into $venv (the first time this takes some minutes)"
"${pip[@]}" torch
"${pip[@]}" --editable "$root${extras:+[$extras]}"
printf '%s\n' "$fingerprint" >"$(stamp "$extras")"
