#!/usr/bin/env python3
"""Check that the test suite catches the faults of tests/seeded_faults.toml, each applied to a copy.

    python scripts/seeded_faults.py                      # every fault against the tests that must catch it
    python scripts/seeded_faults.py lost_bonus_token     # some of them
    python scripts/seeded_faults.py --all-tests NAME     # against the whole suite
    python scripts/seeded_faults.py --check              # only check that each fault can still be applied

The exit status is 0 if every fault is caught, 1 if one is not, and 2 if the list is out of date.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = "tests/seeded_faults.toml"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".*_cache", "*.egg-info")
TIMEOUT_SECONDS = 1800  # a fault may make a test hang; a slow machine needs a few minutes for the slowest one
FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+?::\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """Mistake that could be made in one place.

    Attributes:
        name: identifies the fault.
        wrong: one line that describes the mistake.
        file: the file with the mistake, relative to the repository.
        old: text that the file contains exactly once.
        new: the text with the mistake.
        tests: files or test ids that must catch it, as arguments of pytest, the fastest first.
    """

    name: str
    wrong: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Make the mistake in a copy of the repository."""
        file = root / self.file
        file.write_text(file.read_text().replace(self.old, self.new))


def read_faults(root: Path = ROOT) -> list[Fault]:
    """Return the faults of the list, in its order."""
    entries = tomllib.loads((root / LIST).read_text())
    return [Fault(name=name, **{**entry, "tests": tuple(entry["tests"])}) for name, entry in entries.items()]


def problems(fault: Fault, root: Path = ROOT) -> list[str]:
    """Return a line for each reason why a fault is out of date; none if it applies and its tests exist."""
    complaints = []
    file = root / fault.file
    text = file.read_text() if file.is_file() else ""
    if (count := text.count(fault.old)) != 1:
        complaints.append(f"{fault.name}: {fault.file} has the old text {count} times; give a text that it has once")
    else:
        try:
            ast.parse(text.replace(fault.old, fault.new))
        except SyntaxError as error:
            complaints.append(f"{fault.name}: the new text is not Python: {error}")
    for test in fault.tests:
        path, *names = test.partition("[")[0].split("::")
        is_there = (root / path).is_file()
        if not is_there or not all(f"def {name}(" in (root / path).read_text() for name in names):
            complaints.append(f"{fault.name}: there is no test {test}; name one that catches the fault")
    return complaints


def copy_repository(source: Path, target: Path) -> None:
    """Copy the files that tests need."""
    shutil.copytree(source, target, ignore=NOT_COPIED)


def run_tests(root: Path, tests: Sequence[str], is_parallel: bool = False) -> tuple[int | None, str]:
    """Run tests of a copy of the repository until the first failure.

    Args:
        root: the copy.
        tests: files or test ids; empty for all.
        is_parallel: whether to use all cores.

    Returns:
        (pytest's exit status, its output); None for the status after a timeout.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    command += ["-n", "auto" if is_parallel else "0"]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def catcher(fault: Fault, clean: Path, all_tests: bool) -> str | None:
    """Return the first test that fails with a fault; None if none does.

    Args:
        fault: the fault.
        clean: a copy of the repository, whose tests pass.
        all_tests: whether to run the whole suite instead of the fault's tests.
    """
    with tempfile.TemporaryDirectory(prefix="seeded-fault-") as folder:
        copy = Path(folder) / "copy"
        copy_repository(clean, copy)
        fault.apply(copy)
        tests = [] if all_tests else [*dict.fromkeys(fault.tests)]
        status, output = run_tests(copy, tests, is_parallel=all_tests)
    failed = FAILED_TEST.search(output)
    if failed is None:
        print(f"{fault.name}: pytest ended with status {status}", output[-2000:], sep="\n", file=sys.stderr)
    return failed and failed[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults to try; all by default")
    parser.add_argument("--check", action="store_true", help="only check that each fault can be applied")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite against each fault")
    parser.add_argument("--jobs", type=int, default=1, help="number of faults to try in parallel")
    options = parser.parse_args(arguments)
    known = {fault.name: fault for fault in read_faults()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{LIST} has no fault {unknown[0]!r}; it has {', '.join(known)}")
    faults = [known[name] for name in options.names or known]
    if outdated := [line for fault in faults for line in problems(fault)]:
        print("\n".join(outdated), file=sys.stderr)
        return 2
    if options.check:
        print(f"{len(faults)} faults can be applied")
        return 0
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as folder:
        clean = Path(folder) / "clean"
        copy_repository(ROOT, clean)
        if not options.all_tests:  # also compiles code for the faults' copies
            tests = [*dict.fromkeys(test for fault in faults for test in fault.tests)]
            status, output = run_tests(clean, tests)
            if status != 0:
                print(output, "the tests must pass without a fault", sep="\n", file=sys.stderr)
                return 2
        num_missed = 0
        with ThreadPoolExecutor(options.jobs) as pool:
            catchers = pool.map(lambda fault: catcher(fault, clean, options.all_tests), faults)
            for fault, test in zip(faults, catchers, strict=True):
                print(f"| {fault.name} | {fault.file} | {test or 'NOT CAUGHT'} |", flush=True)
                num_missed += test is None
    print(f"{len(faults) - num_missed} of {len(faults)} faults are caught")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
