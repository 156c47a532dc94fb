#!/usr/bin/env python3
"""Write tests/data/VERSION: the files of this version on disk, which later versions must read.

    python scripts/write_upgrade_set.py      for lp_runtime.__version__; run it before each release

tests/test_upgrading.py reads the sets of all versions.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

import lp_runtime
from lp_runtime.calibration import vocabulary_prior
from lp_runtime.entrypoints.cli import main

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
PROMPTS = ("def f(", "class A", "import ")
# Settings of the runs that write the output and the draft store, and of those that read them.
OUTPUT = ("max_new_tokens=8", "eos=false", "device=cpu", "dtype=float32", "lookahead=7b")
TABLES = ("lookahead.tokens=16", "lookahead.draft_tables_bytes=65536")
STORE = ("prompt=def f(", "max_new_tokens=32", "device=cpu", *TABLES)


def write_set(folder: Path) -> None:
    """Write a prompts file, an unfinished output with its settings, a draft store and measurements."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary_prior.NUM_PAIRED = 16  # a small file
    prompts, output, store = folder / "prompts.jsonl", folder / "out.jsonl", folder / "drafts.npz"
    for path in (output, store):
        path.unlink(missing_ok=True)
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    main([f"prompts={prompts}", f"output={output}", "limit=2", "cache_dir=null", *OUTPUT])
    settings = output.with_name("out.jsonl.settings")
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model": "DEMO_MODEL"}, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as cache:
        main([f"cache_dir={cache}", f"lookahead.draft_tables={store}", *STORE])
        main([f"cache_dir={cache}", "prompt=def f(", "device=cpu"])  # measures steps; a fixed number of tokens does not
        for name in ("steps", "vocabulary"):
            (path,) = Path(cache).glob(f"{name}-*.npz")
            with np.load(path) as saved:  # its name contains the versions of torch and transformers
                np.savez_compressed(folder / f"{name}.npz", **saved)


if __name__ == "__main__":
    write_set(DATA / lp_runtime.__version__)
