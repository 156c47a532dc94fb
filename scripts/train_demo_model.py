#!/usr/bin/env python3
"""Train the demo model that lp_runtime ships: a small Llama-architecture model of Python source.

The training text is already on this machine: the Python standard library and the installed packages named in
`PACKAGES`, each under a permissive license. Nothing is downloaded. A repeated run resumes from the last checkpoint;
delete the work folder to start from scratch.

    python scripts/train_demo_model.py --work work/demo --out lp_runtime/demo_model

Stages, each skipped if its file exists: corpus (train/held-out split by file) -> tokenizer (byte-level BPE)
-> token ids -> training (warm-up, constant, linear decay; the last part at full context) -> export in bfloat16
with a model card. `--steps` may be changed between runs: the decay starts when DECAY_FRACTION of it is left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# package -> license, as its metadata states it
PACKAGES = {
    "torch": "BSD-3-Clause", "transformers": "Apache-2.0", "ray": "Apache-2.0", "numpy": "BSD-3-Clause",
    "sympy": "BSD", "networkx": "BSD-3-Clause", "pygments": "BSD-2-Clause", "rich": "MIT", "setuptools": "MIT",
    "pip": "MIT", "jinja2": "BSD-3-Clause", "pydantic": "MIT", "pytest": "MIT", "requests": "Apache-2.0",
    "urllib3": "MIT", "hydra": "MIT", "omegaconf": "BSD-3-Clause", "huggingface_hub": "Apache-2.0",
    "fsspec": "BSD-3-Clause", "click": "BSD-3-Clause", "anyio": "MIT", "attr": "MIT", "jsonschema": "MIT",
    "markdown_it": "MIT", "typer": "MIT", "yaml": "MIT", "idna": "BSD-3-Clause", "packaging": "Apache-2.0",
    "safetensors": "Apache-2.0", "mpmath": "BSD",
}  # fmt: skip
PACKAGE_CAP = 5_000_000  # characters kept of one package, so that no package's habits dominate
STDLIB_SKIP = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
PACKAGE_SKIP = {"test", "tests", "testing", "_vendor", "vendored_packages", "__pycache__", "thirdparty_files"}
HELD_OUT_PERCENT = 2
END_OF_TEXT = "<|endoftext|>"
CONTEXT = 4096
VOCABULARY = 4096
DECAY_FRACTION = 0.35
LONG_FRACTION = 0.06  # of the steps: the last ones, at full context


def source_files() -> list[tuple[str, Path]]:
    """Return (package name, file) of every source file of the corpus, in a stable order."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    site = Path(sysconfig.get_paths()["purelib"])
    files = [("python", f) for f in sorted(stdlib.rglob("*.py")) if not STDLIB_SKIP & set(f.relative_to(stdlib).parts)]
    for package in PACKAGES:
        for f in sorted((site / package).rglob("*.py")):
            if not PACKAGE_SKIP & set(f.relative_to(site).parts):
                files.append((package, f))
    return files


def strip_header(text: str) -> str:
    """Drop the leading comment block (license headers repeat in every file and teach nothing)."""
    lines = text.splitlines(keepends=True)
    start = 0
    while start < len(lines) and (lines[start].startswith("#") or not lines[start].strip()):
        start += 1
    return "".join(lines[start:])


def build_corpus(work: Path) -> None:
    """Write train.jsonl and held_out.jsonl: one document (a source file) per line."""
    by_package: dict[str, list[tuple[str, str]]] = {}
    seen: set[str] = set()
    for package, path in source_files():
        try:
            text = strip_header(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        too_long_lines = max((len(line) for line in text.splitlines()), default=0) > 400
        if len(text) < 400 or too_long_lines or digest in seen:
            continue
        seen.add(digest)
        by_package.setdefault(package, []).append((digest, text))
    sizes = {}
    with open(work / "train.jsonl", "w") as train, open(work / "held_out.jsonl", "w") as held_out:
        for package, documents in by_package.items():
            documents.sort()  # by digest: a fixed shuffle
            total = 0
            for digest, text in documents:
                if package != "python" and total > PACKAGE_CAP:
                    break
                total += len(text)
                target = held_out if int(digest[:8], 16) % 100 < HELD_OUT_PERCENT else train
                target.write(json.dumps({"package": package, "text": text}) + "\n")
            sizes[package] = total
    (work / "corpus.json").write_text(json.dumps(sizes, indent=1))


def documents(path: Path):
    with open(path) as file:
        for line in file:
            yield json.loads(line)["text"]


def build_tokenizer(work: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(work / "train.jsonl"), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(work / "tokenizer")


def build_ids(work: Path) -> None:
    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    for split in ("train", "held_out"):
        texts = list(documents(work / f"{split}.jsonl"))
        encoded = tokenizer.encode_batch_fast(texts)
        flat = np.concatenate([np.array([end, *e.ids], dtype=np.uint16) for e in encoded])
        np.save(work / f"{split}.npy", flat)


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, attention_dropout=0.0, initializer_range=0.02,
    )  # fmt: skip


def learning_rate(step: int, steps: int) -> float:
    """Return the relative rate: 40 steps of warm-up, constant, then a linear decay to zero (WSD)."""
    decay_start = int(steps * (1 - DECAY_FRACTION))
    return min(1.0, (step + 1) / 40) * min(1.0, (steps - step) / max(1, steps - decay_start))


def batch_of(ids: np.ndarray, step: int, rows: int, length: int) -> torch.Tensor:
    """Return [rows, length + 1] token ids at random offsets.

    The offsets depend on the step number alone, so a resumed run sees the same text.
    """
    generator = np.random.default_rng([17, step])
    starts = generator.integers(0, len(ids) - length - 1, size=rows)
    return torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts]).astype(np.int64))


def loss_of(model, batch: torch.Tensor, autocast) -> torch.Tensor:
    with autocast:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, ids: np.ndarray, device: str, autocast, rows: int = 64, length: int = 1024) -> float:
    model.eval()
    starts = np.linspace(0, len(ids) - length - 2, rows).astype(int)
    total = 0.0
    for chunk in np.array_split(starts, max(1, rows // 8)):
        batch = torch.from_numpy(np.stack([ids[s : s + length + 1] for s in chunk]).astype(np.int64)).to(device)
        total += loss_of(model, batch, autocast).item() * len(chunk)
    model.train()
    return total / rows


def train(work: Path, args: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = args.steps or (20_000 if device == "cuda" else 1_600)
    ids, held = np.load(work / "train.npy"), np.load(work / "held_out.npy")
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(model_config())  # transformers hides that `to` is a method
    model.to(device).train()
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    hidden_ids = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in hidden_ids]
    optimizers = [
        torch.optim.Muon(hidden, lr=args.muon_lr, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    base_rates = [args.muon_lr, args.adam_lr]
    autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=args.bfloat16 or device == "cuda")
    num_parameters = sum(p.numel() for p in model.parameters())
    checkpoint = work / "checkpoint.pt"
    first, seconds, history = 0, 0.0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, seconds, history = state["step"], state["seconds"], state["history"]
        print(f"resuming at step {first} of {steps}", flush=True)
    step_model = torch.compile(model) if args.compile else model

    def save(step: int) -> None:
        state = {
            "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
            "step": step, "seconds": seconds, "history": history,
        }  # fmt: skip
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

    print(f"{num_parameters:,} parameters, {len(ids):,} training tokens, {device}", flush=True)
    smooth = None
    for step in range(first, steps):
        started = time.monotonic()
        long = step >= int(steps * (1 - LONG_FRACTION))
        length = CONTEXT if long else args.length
        batch = batch_of(ids, step, args.batch_tokens // length, length).to(device)
        rate = learning_rate(step, steps)
        for optimizer, base in zip(optimizers, base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate
        micro = max(1, args.micro_tokens // length)
        loss_value = 0.0
        for rows in batch.split(micro):
            loss = loss_of(step_model, rows, autocast) * (len(rows) / len(batch))
            loss.backward()
            loss_value += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        took = time.monotonic() - started
        seconds += took
        smooth = loss_value if smooth is None else 0.95 * smooth + 0.05 * loss_value
        if (step + 1) % 10 == 0 or step == first:
            left = (steps - step - 1) * took / 60
            print(f"step {step + 1}/{steps} loss {smooth:.3f} {args.batch_tokens / took:,.0f} tokens/s"
                  f" {left:.0f} min left", flush=True)  # fmt: skip
        if (step + 1) % 100 == 0 or step + 1 == steps:
            held_loss = held_out_loss(model, held, device, autocast)
            history.append({"step": step + 1, "loss": smooth, "held_out_loss": held_loss})
            print(f"  held-out loss {held_loss:.3f}", flush=True)
            save(step + 1)
    return {
        "steps": steps, "batch_tokens": args.batch_tokens, "num_parameters": num_parameters,
        "training_tokens": len(ids), "held_out_tokens": len(held), "minutes": seconds / 60, "history": history,
        "flags": " ".join(f for f, on in (("--bfloat16", args.bfloat16), ("--compile", args.compile)) if on),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
    }  # fmt: skip


def model_card(work: Path, report: dict) -> str:
    sizes = json.loads((work / "corpus.json").read_text())
    last = report["history"][-1]
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    corpus = "\n".join(
        f"| {name} | {sizes[name] / 1e6:.2f} | {PACKAGES.get(name, 'PSF-2.0')} |" for name in sorted(sizes)
    )
    curve = "\n".join(f"| {h['step']} | {h['loss']:.3f} | {h['held_out_loss']:.3f} |" for h in report["history"])
    return f"""---
license: apache-2.0
library_name: transformers
tags: [demo, python, llama]
---
# lp_runtime demo model

A {report["num_parameters"] / 1e6:.1f}M-parameter Llama-architecture model of Python source, so that the first run of
lp_runtime needs no download and its tests have a really trained model. It writes text that reads like Python; it does
not write correct programs. Context {CONTEXT:,} tokens, byte-level BPE of {VOCABULARY:,} tokens, bfloat16 on disk.

Made by `scripts/train_demo_model.py {report["flags"]}`: {report["steps"]:,} steps of {report["batch_tokens"]:,} tokens
({report["steps"] * report["batch_tokens"] / 1e6:.1f}M seen; the corpus has {report["training_tokens"] / 1e6:.1f}M),
{report["minutes"]:.0f} minutes on {report["device"]}, Python {platform.python_version()},
{", ".join(f"{k} {v}" for k, v in versions.items())}.

- training loss (smoothed, nats a token): **{last["loss"]:.3f}**
- held-out loss ({report["held_out_tokens"]:,} tokens of files never trained on): **{last["held_out_loss"]:.3f}**
  (perplexity {math.exp(last["held_out_loss"]):.1f})

| step | training loss | held-out loss |
| --- | --- | --- |
{curve}

## Text

Source files that a Python installation has, under permissive licences; leading comment blocks are dropped.

| package | million characters | licence |
| --- | --- | --- |
{corpus}
"""


def export(work: Path, out: Path, report: dict) -> None:
    state = torch.load(work / "checkpoint.pt", map_location="cpu", weights_only=True)
    model: Any = LlamaForCausalLM(model_config())
    model.load_state_dict(state["model"])
    model.to(torch.bfloat16)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(out)
    PreTrainedTokenizerFast.from_pretrained(work / "tokenizer").save_pretrained(out)
    (out / "README.md").write_text(model_card(work, report))


def main() -> None:
    parser = argparse.ArgumentParser(description="train the demo model (resumes from its work folder)")
    parser.add_argument("--work", type=Path, default=Path("work/demo"), help="corpus, tokenizer, checkpoints")
    parser.add_argument("--out", type=Path, default=Path("lp_runtime/demo_model"), help="where the model is exported")
    parser.add_argument("--steps", type=int, default=None, help="default: 1,600 on a CPU, 20,000 on a GPU")
    parser.add_argument("--batch-tokens", type=int, default=8_192)
    parser.add_argument("--micro-tokens", type=int, default=4_096, help="tokens per backward pass")
    parser.add_argument("--length", type=int, default=512, help="sequence length before the full-context part")
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--bfloat16", action="store_true", help="autocast on the CPU too")
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for name, build in (("corpus.json", build_corpus), ("tokenizer", build_tokenizer), ("held_out.npy", build_ids)):
        if not (args.work / name).exists():
            started = time.monotonic()
            build(args.work)
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    export(args.work, args.out, train(args.work, args))
    print(f"exported to {args.out}")


if __name__ == "__main__":
    main()
