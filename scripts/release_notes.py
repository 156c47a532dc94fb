#!/usr/bin/env python3
"""Check a version that is about to be released, and print its section of CHANGELOG.md.

    python scripts/release_notes.py 0.2.0

The exit status is 1 if lp_runtime.__version__ is a different version, or if the section is missing or has no date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes_of(version: str, changelog: str, source: str) -> str:
    """Return a version's section of the changelog; exit with one line if it cannot be released.

    Args:
        source: text of lp_runtime/__init__.py, which is not imported because torch may not be installed.
    """
    match = re.search(r'^__version__ = "(.*)"$', source, re.M)
    is_now = match[1] if match else None
    if is_now != version:
        sys.exit(f"error: version {version}: lp_runtime.__version__ is {is_now}; the tag must be v{is_now}")
    section = re.search(rf"^## \[{re.escape(version)}\] - (.*)\n((?:(?!## ).*\n?)*)", changelog, re.M)
    if section is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", section[1]):
        sys.exit(f"error: version {version}: CHANGELOG.md needs a line '## [{version}] - YYYY-MM-DD'")
    return section[2].strip()


if __name__ == "__main__":
    print(notes_of(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(), (ROOT / "lp_runtime" / "__init__.py").read_text()))
