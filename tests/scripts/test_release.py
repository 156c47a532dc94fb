"""Tests of a release: its notes, the versions that CI tests, and the pinned versions agree."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import lp_runtime
from lp_runtime.constraints.library import TESTED_VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
CHANGELOG = "# Changelog\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- One.\n\n## [0.1.0] - unreleased\n\n- None.\n"
SOURCE = '__version__ = "{}"\n'


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        import release_notes

        yield release_notes
    sys.modules.pop("release_notes")


def test_release_notes_are_the_changelog_section(script):
    assert script.notes_of("0.2.0", CHANGELOG, SOURCE.format("0.2.0")) == "### Added\n\n- One."


@pytest.mark.parametrize(
    ("version", "of_package", "message"),
    [
        ("0.2.0", "0.3.0", "lp_runtime.__version__ is 0.3.0; the tag must be v0.3.0"),
        ("0.1.0", "0.1.0", "needs a line '## [0.1.0] - YYYY-MM-DD'"),  # unreleased
        ("0.3.0", "0.3.0", "needs a line '## [0.3.0] - YYYY-MM-DD'"),
    ],
)
def test_wrong_or_undated_version_is_refused(script, version, of_package, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        script.notes_of(version, CHANGELOG, SOURCE.format(of_package))


def test_changelog_begins_with_the_package_version():
    first = re.search(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first[1] == lp_runtime.__version__


def test_ci_tests_every_python_and_the_oldest_versions():
    pythons = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python ::" in each]
    assert CI["tests"]["strategy"]["matrix"]["python"] == pythons
    oldest = dict(re.findall(r"(\w+)==([\d.]+)", CI["versions"]["strategy"]["matrix"]["include"][0]["versions"]))
    bounds = dict(re.findall(r"^(torch|transformers)>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.M))
    assert oldest == {name: f"{bound}.0" for name, bound in bounds.items()}


def test_scripts_named_in_workflows_exist():
    text = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    named = set(re.findall(r"\b(?:scripts|examples|tests)/[\w/.-]+", text))
    assert len(named) > 5 and all((ROOT / name).exists() for name in named)


def test_lock_file_has_the_tested_versions():
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.lock").read_text(), re.M))
    tested = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert len(pinned) > 50
    assert all(pinned.get(name, version) == version for name, version in tested.items())
    assert PROJECT["optional-dependencies"]["constraints"] == [f"xgrammar=={tested['xgrammar']}"]
    assert tested["xgrammar"] == TESTED_VERSION
