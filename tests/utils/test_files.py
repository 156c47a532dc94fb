"""Tests of atomic file writes."""

from __future__ import annotations

from lp_runtime.utils.files import write_whole


def test_symbolic_link_to_a_file_stays_a_link(tmp_path):
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(target)
    for data in (b"first", b"second"):  # the folder does not exist at first
        write_whole(link, data)
        assert link.is_symlink() and target.read_bytes() == data
    assert [file.name for file in target.parent.iterdir()] == ["file"]
