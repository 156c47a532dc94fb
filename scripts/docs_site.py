"""Hook of mkdocs: turns pages of the repository's root into pages of the site, and adapts their links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=for_site((ROOT / source).read_text())))
    return files


def for_site(text: str) -> str:
    """Return a page of the root as a page of docs/, with links to docs/ and to the other pages adapted."""
    text = re.sub(r"(?<=\]\()docs/", "", text)
    return re.sub(rf"(?<=\]\()({'|'.join(map(re.escape, PAGES))})", lambda match: PAGES[match[1]], text)
