"""Tests of the messages on stderr during startup."""

import re

from lp_runtime.utils.startup import Progress


def test_stages_are_numbered_up_to_the_last(capsys):
    progress = Progress(is_shown=True, num_stages=2)
    for what in ("loading", "checking", "again"):
        progress.begin(what)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"starting, 1 of 2 \(\d+ s\): loading\nstarting, 2 of 2 \(\d+ s\): checking\n", err)
    Progress(is_shown=False).begin("loading")
    assert capsys.readouterr().err == ""
