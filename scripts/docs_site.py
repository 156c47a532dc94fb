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
NAMES = "|".join(map(re.escape, PAGES))


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=for_site((ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Adapt the links of a page in docs/ to pages of the root: ../SECURITY.md is security.md."""
    return re.sub(rf"(?<=\]\()((?:\.\./)*)\.\./({NAMES})", lambda match: match[1] + PAGES[match[2]], markdown)


def for_site(text: str) -> str:
    """Return a page of the root as a page of docs/, with links to docs/ and to the other pages adapted."""
    text = re.sub(r"(?<=\]\()docs/", "", text)
    return re.sub(rf"(?<=\]\()({NAMES})", lambda match: PAGES[match[1]], text)
