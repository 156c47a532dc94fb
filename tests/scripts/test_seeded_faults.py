"""Tests of the list of seeded faults: each applies to the current sources and names existing tests."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "seeded_faults.py"
spec = importlib.util.spec_from_file_location("seeded_faults", SCRIPT)
seeded_faults = importlib.util.module_from_spec(spec)
sys.modules["seeded_faults"] = seeded_faults
spec.loader.exec_module(seeded_faults)

FAULTS = seeded_faults.read_faults()


def test_every_fault_can_be_applied_and_has_tests():
    assert len(FAULTS) >= 25
    assert [line for fault in FAULTS for line in seeded_faults.problems(fault)] == []
    assert all(fault.tests and fault.old != fault.new for fault in FAULTS)


def test_outdated_fault_is_named():
    fault = FAULTS[0]
    for stale in (
        replace(fault, old="no such text"),
        replace(fault, old="\n", new="\n\n"),
        replace(fault, new="return ("),
        replace(fault, file="lp_runtime/nowhere.py"),
        replace(fault, tests=("tests/test_nowhere.py",)),
        replace(fault, tests=("tests/lookahead/test_tree.py::test_of_nothing[1]",)),
    ):
        (line,) = seeded_faults.problems(stale)
        assert fault.name in line
