"""Tests of atomic file writes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lp_runtime.utils import files
from lp_runtime.utils.files import is_locked, locked, write_whole

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from lp_runtime.utils.files import locked, write_whole
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
with locked(Path(sys.argv[1] + ".lock")):
    write_whole(Path(sys.argv[1]), b"second")
"""


def test_symbolic_link_to_a_file_stays_a_link(tmp_path):
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(target)
    for data in (b"first", b"second"):  # the folder does not exist at first
        write_whole(link, data)
        assert link.is_symlink() and target.read_bytes() == data
    assert [file.name for file in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_mode_of_a_file_is_that_of_the_umask_unless_it_is_private(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        for is_private, expected in ((False, mode), (True, 0o600)):
            write_whole(tmp_path / "file", b"data", is_private)
            assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == expected
    finally:
        os.umask(before)


def test_writer_that_was_killed_leaves_the_file_and_no_lock(tmp_path, monkeypatch):
    file = tmp_path / "fi[l]e"
    write_whole(file, b"first")
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(file)])
    assert killed.returncode == -signal.SIGKILL and file.read_bytes() == b"first"
    lock = Path(f"{file}.lock")
    assert not is_locked(lock)
    (left,) = set(tmp_path.iterdir()) - {file, lock}
    with locked(lock):
        write_whole(file, b"third")
        assert file.read_bytes() == b"third" and left.exists(), "another process may still be writing it"
        os.utime(left, (0, 0))
        write_whole(file, b"fourth")
    assert set(tmp_path.iterdir()) == {file, lock}


def test_lock_file_that_may_only_be_read_is_locked(tmp_path, monkeypatch):
    """Root may write any file, so the refusal of another user's is simulated."""
    lock = tmp_path / "lock"
    lock.touch()

    def opened(path, mode="r"):
        if mode != "r":
            raise PermissionError(13, "Permission denied")
        return open(path, mode)

    monkeypatch.setattr(files, "open", opened, raising=False)
    with locked(lock):
        assert is_locked(lock)
    assert not is_locked(lock)
