"""Files that earlier versions wrote (tests/data) are read as docs/upgrading.md says."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import lp_runtime
from lp_runtime.calibration import vocabulary_prior
from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.config.settings import DEMO_MODEL, ModelConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.entrypoints.cli import main
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner

DATA = Path(__file__).parent / "data"
VERSIONS = sorted(path.name for path in DATA.iterdir())


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "scripts")
        import write_upgrade_set

        yield write_upgrade_set
    sys.modules.pop("write_upgrade_set")


@pytest.fixture(params=VERSIONS)
def files(request, tmp_path) -> Path:
    """A copy of the files that one version wrote."""
    return shutil.copytree(DATA / request.param, tmp_path / "files")


def test_upgrade_set_of_current_version_exists():
    assert lp_runtime.__version__ in VERSIONS


def test_unfinished_output_file_is_continued(script, files):
    settings, output = files / "out.jsonl.settings", files / "out.jsonl"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model": str(DEMO_MODEL.resolve())}))
    before = output.read_bytes()
    main([f"prompts={files / 'prompts.jsonl'}", f"output={output}", "cache_dir=null", *script.OUTPUT])
    assert output.read_bytes().startswith(before)
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0, 1, 2]


def test_measurement_files_are_read(files, tmp_path, monkeypatch):
    model = ModelRunner(load_model(ModelConfig(), torch.device("cpu"), "float32"), 2048)

    def calibration() -> tuple[Calibration, Measured]:
        known = Measured()
        return Calibration(model, Group.alone(), str(tmp_path / "cache"), known), known

    first, _ = calibration()
    first.max_step_tokens()
    first.vocabulary()
    for name in ("steps", "vocabulary"):
        (path,) = (tmp_path / "cache").glob(f"{name}-*.npz")
        shutil.copy(files / f"{name}.npz", path)
    monkeypatch.setattr(vocabulary_prior, "ask", lambda *args: None)
    second, known = calibration()
    second.max_step_tokens()
    second.vocabulary()
    steps, vocabulary = (np.load(files / f"{name}.npz") for name in ("steps", "vocabulary"))
    assert known.steps.nanoseconds.tolist() == steps["nanoseconds"].tolist()
    alone, paired = (np.flatnonzero(vocabulary["known"] >= least) for least in (1, 2))
    assert len(alone) and (known.vocabulary.after_token[alone] == vocabulary["after_token"]).all()
    assert len(paired) and (known.vocabulary.after_pair[paired] == vocabulary["after_pair"]).all()


def test_draft_store_is_read_and_saves_steps(script, files, capsys):
    """The draft store of each version saves steps; a file of another format would be refused."""
    main(["cache_dir=null", f"lookahead.draft_tables={files / 'drafts.npz'}", "lookahead.prior=none", *script.STORE])
    new = capsys.readouterr().err
    main(["cache_dir=null", f"lookahead.draft_tables={files / 'none.npz'}", "lookahead.prior=none", *script.STORE])
    assert steps_of(new) < steps_of(capsys.readouterr().err)


def steps_of(summary: str) -> int:
    """Return the number of steps in lp-generate's table."""
    (row,) = [line.split() for line in summary.splitlines() if line.startswith("lookahead ")]
    return int(row[2])
