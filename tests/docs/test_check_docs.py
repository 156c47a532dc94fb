"""Tests that scripts/check_docs.py finds broken references, and that the documentation has none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import check_docs

        yield check_docs
    sys.modules.pop("check_docs")


@pytest.fixture
def complaints(script, tmp_path):
    """Return a function that checks a page's text and returns the complaints without the file's name."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "lp_runtime").mkdir()
    (tmp_path / "lp_runtime" / "errors.py").touch()
    (tmp_path / "docs" / "other.md").write_text("# Other `page`: a title\n\n## Twice\n\n## Twice\n\n    # no heading\n")

    def check(text: str, name: str = "docs/page.md") -> list[str]:
        page = tmp_path / name
        page.write_text(text)
        return [line.removeprefix(f"{name}:") for line in script.check_page(page, tmp_path)]

    return check


def test_documentation_has_no_broken_references(script):
    pages = script.pages()
    assert len(pages) > 10
    assert [complaint for page in pages for complaint in script.check_page(page)] == []


def test_documentation_has_no_misspelled_words(script):
    pytest.importorskip("codespell_lib")
    assert script.check_spelling(script.pages()) == []


def test_misspelled_words_are_reported(script, tmp_path):
    pytest.importorskip("codespell_lib")
    page = tmp_path / "page.md"
    word = "t" + "eh"  # this file is checked, too
    page.write_text(f"This is {word} text.\n")
    assert script.check_spelling([page], tmp_path) == [f"page.md:1: {word} ==> the"]


@pytest.mark.parametrize(
    "text",
    [
        "[other](other.md), [title](other.md#other-page-a-title), [second](other.md#twice-1)",
        "[site](https://example.com/none.md), `[code](none.md)`",
        "# Here\n\n[up](#here)",
        "    [indented](none.md)",
        "```text\n[fenced](none.md)\n```",
    ],
)
def test_good_links_are_accepted(complaints, text):
    assert complaints(text) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[x](none.md)", "1: link to none.md: there is no such file"),
        ("\n![x](plots/none.svg)", "2: link to plots/none.svg: there is no such file"),
        ('<img src="none.svg">', "1: link to none.svg: there is no such file"),
        ("[x](#none)", "1: link to #none: page.md has no such heading"),
        ("[x](other.md#no-heading)", "1: link to other.md#no-heading: other.md has no such heading"),
    ],
)
def test_bad_links_are_reported(complaints, text, complaint):
    assert complaints(text) == [complaint]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`lp_runtime/errors.py`, `lp_runtime/`, `lp_runtime/*.py`, lp_runtime/none.py, `other/none.py`", None),
        ("`lp_runtime/none.py`", "lp_runtime/none.py"),
        ("`scripts/none.sh OUT`", "scripts/none.sh"),
        ("`lp_runtime/*.txt`", "lp_runtime/*.txt"),
        ("```bash\npython benchmarks/none.py --limit 2\n```", "benchmarks/none.py"),
    ],
)
def test_missing_paths_are_reported(complaints, text, missing):
    actual = [complaint.partition(": ")[2] for complaint in complaints(text)]
    assert actual == ([] if missing is None else [f"{missing}: is not there"])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`lookahead.W=15`, `gpus=2`, `launcher=ray`, `sampling.seed`, `model.generate(x)`, `RAY_X=1`", None),
        ("`lookahead.policy=paper`", "lookahead.policy: is no setting of any command"),
        ("`lookahead.memory`", "lookahead.memory: is no setting of any command"),
        ("`gpu=2`", "gpu: is no setting of any command"),
        ("```bash\nlp-serve gpus=2 port=8000 | grep x=y  # z=1\n```", None),
        ('    lp-generate prompt="a b=c" \\\n        limit=2\n', None),
        ("```bash\nlp-generate port=8000\n```", "port: is no setting of lp-generate"),
        ("```bash\nlp-bench gpus=1 \\\n    degree=[2]\n```", "degree: is no setting of lp-bench"),
        ("```bash\nX=1 torchrun -m lp_runtime prmpt=x\n```", "prmpt: is no setting of lp-generate"),
        ("```bash\nother x=1\n```", None),
    ],
)
def test_unknown_settings_are_reported(complaints, text, wrong):
    actual = [complaint.partition(": ")[2] for complaint in complaints(text)]
    assert actual == ([] if wrong is None else [wrong])


def test_long_tables_of_results_are_reported(complaints):
    table = "| a |\n| --- |\n" + "| 1 |\n" * 11
    assert complaints(table) == []
    assert len(complaints(table, "docs/results/page.md")) == 1
    assert complaints(table.replace("| 1 |\n", "", 1), "docs/results/page.md") == []


def test_too_long_readme_is_reported(complaints, script):
    most = script.MAX_README_LINES
    assert complaints("line\n" * most, "README.md") == []
    assert complaints("line\n" * (most + 1), "README.md") == [
        f"{most + 1}: {most + 1} lines; at most {most}: the rest belongs in docs/"
    ]
    assert complaints("line\n" * (most + 1), "CONTRIBUTING.md") == []
