"""docs/api.md documents every public name."""

import re
from pathlib import Path

import lp_runtime


def test_every_public_name_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^::: lp_runtime\.(\w+)$", page, re.M)) == sorted(
        set(lp_runtime.__all__) - {"__version__"}
    )
