"""SECURITY.md names every module that unpickles."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNPICKLES = re.compile(r"pickle\.loads\(|\.recv\(\)|torch\.load\(|allow_pickle=True")  # recv() of a pipe unpickles


def test_every_module_that_unpickles_is_named():
    section = (ROOT / "SECURITY.md").read_text().partition("## Pickles")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", section))
    package = ROOT / "lp_runtime"
    unpickling = {
        str(path.relative_to(package)) for path in package.rglob("*.py") if UNPICKLES.search(path.read_text())
    }
    assert named == unpickling
