#!/usr/bin/env bash
# Complete the setup, then run the gates that are not tests: style, types, settings page, docs.
#
#   scripts/check.sh          all of them; .ci/run and the pre-commit file call it
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" ray,test,dev
cd "$root"
bin="$root/.venv/bin"
"$bin/ruff" check .
"$bin/ruff" format --check --quiet .
"$bin/mypy"
"$bin/python" scripts/write_settings_doc.py --check
"$bin/python" scripts/check_docs.py
"$bin/python" scripts/check_prose.py
