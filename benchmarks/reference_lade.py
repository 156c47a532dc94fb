"""Measures S of the reference implementation of lookahead decoding (PyPI package `lade` 0.0.2).

It needs a separate environment, because lade 0.0.2 needs an old transformers (4.34.1 works; CPU; torch first, pinned):

    python3.11 -m venv LADE
    LADE/bin/pip install torch==2.13.0
    LADE/bin/pip install torch==2.13.0 transformers==4.34.1 'numpy<2'
    LADE/bin/pip install --no-deps lade==0.0.2
    LADE/bin/python benchmarks/reference_lade.py --model lp_runtime/demo_model \
        --prompts humaneval.jsonl --field prompt --limit 40 --output reference_lade.json

Decoding is greedy, in float32, on the CPU, and goes past end-of-text to exactly --max-new-tokens. A step is one call
of the model's forward, counted in a wrapper around it, the prefill included. S = new tokens / steps, over all prompts.
lade itself cuts the tokens beyond the limit that its last step commits; they are not counted.

The PyPI release has no prompt pool, adds no committed text to its pool, and loses the bonus token of a guess that is
accepted in full. These three handicaps can be lifted. The edits are ours, made in memory, and each asserts that it
found its place:

    --pool-from-prompt   add the n-grams of the prompt, and of committed text as it comes, to the pool (the default)
    --full-match-bonus   a guess that is accepted in full commits N tokens, not N - 1

`--no-pool-from-prompt` alone is the PyPI release, unchanged.
"""

import argparse
import importlib.metadata
import inspect
import json
import os
import random
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["USE_LADE"] = "0"  # lade reads it at every call; generate() below switches it
os.environ["TRANSFORMERS_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import lade  # noqa: E402
import lade.decoding  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip


def load_model(folder: Path) -> LlamaForCausalLM:
    """Load the model in float32 without an end-of-text token; config.json may be of transformers 4 or 5."""
    new = json.loads((folder / "config.json").read_text())
    rope = new.get("rope_parameters") or new
    kind = rope.get("rope_type", "default")
    head_dim = new["hidden_size"] // new["num_attention_heads"]
    if new["model_type"] != "llama" or kind != "default" or (new.get("head_dim") or head_dim) != head_dim:
        raise ValueError(f"need a Llama with plain rotary embedding and heads of {head_dim}, got {new}")
    sizes: dict[str, Any] = {name: new[name] for name in NUMBERS} | {"rope_theta": rope["rope_theta"]}
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    state = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    if config.tie_word_embeddings:
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if "inv_freq" not in name]
    assert not missing and not unexpected, (missing, unexpected)
    model.tie_weights()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=None)
    return model.eval()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a current tokenizer.json (merges are pairs) with the old tokenizers (merges are strings)."""
    text = json.loads((folder / "tokenizer.json").read_text())
    merges = text["model"].get("merges", [])
    text["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    return Tokenizer.from_str(json.dumps(text))


class ForwardCounter:
    """Counts calls of the model's two forwards (plain and lade's) and the tokens fed to each."""

    def __init__(self, model: LlamaForCausalLM):
        self.fed: list[int] = []
        for name in ("forward", "LlamaModeljforward"):
            setattr(model.model, name, self.counted(getattr(model.model, name)))

    def counted(self, forward):
        def wrapper(input_ids, **kwargs):
            self.fed.append(input_ids.shape[1])
            return forward(input_ids=input_ids, **kwargs)

        return wrapper


def insert(pool: dict, ngram: list[int], level: int, guess_set_size: int) -> None:
    """Add an n-gram in lade's order, by first token: newest last, no duplicates, at most guess_set_size."""
    if len(ngram) < level:
        return
    entries = pool.setdefault(ngram[0], [])
    rest = tuple(ngram[1:])
    if rest in entries:
        entries.remove(rest)
    entries.append(rest)
    del entries[:-guess_set_size]


def edit_greedy_loop(pool_from_prompt: bool, full_match_bonus: bool) -> None:
    """Replace lade's greedy loop by a copy with the requested edits (see the module's docstring)."""
    source = inspect.getsource(lade.decoding.jacobi_greedy_search_multilevel)

    def replace(old: str, new: str) -> None:
        nonlocal source
        assert source.count(old) == 1, f"not once in lade's greedy loop: {old!r}"
        source = source.replace(old, new)

    def seeded_pool(prompt: list[int], level: int, guess_set_size: int) -> dict:
        pool: dict[int, list[tuple[int, ...]]] = {}
        for start in range(len(prompt) - level + 1):
            insert(pool, prompt[start : start + level], level, guess_set_size)
        return pool

    def note_committed(history: list[int], run: list[int], pool: dict, level: int, guess_set_size: int) -> None:
        for token in run:
            history.append(token)
            insert(pool, history[-level:], level, guess_set_size)

    if pool_from_prompt:
        replace(
            "    token_map = {}\n",
            "    token_map = seeded_pool(all_old_tokens, LEVEL, GUESS_SET_SIZE)\n    history = list(all_old_tokens)\n",
        )
        accepted = "        lst_token = hits[max_hit]\n"
        note = "        note_committed(history, hits[:max_hit + 1], token_map, LEVEL, GUESS_SET_SIZE)\n"
        replace(accepted, accepted + note)
    if full_match_bonus:
        replace("for gg in range(len(myguess)):", "for gg in range(len(myguess) + 1):")
        replace("if myguess[gg] != correct[gg]:", "if gg == len(myguess) or myguess[gg] != correct[gg]:")
    names = vars(lade.decoding)
    names.update(seeded_pool=seeded_pool, note_committed=note_committed)
    exec(compile(source, "<edited lade greedy loop>", "exec"), names)


@torch.no_grad()
def generate(model: Any, prompt: list[int], max_new_tokens: int, use_lade: bool) -> list[int]:
    os.environ["USE_LADE"] = "1" if use_lade else "0"
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    tokens = output[0, len(prompt) :].tolist()
    assert len(tokens) == max_new_tokens, f"{len(tokens)} tokens, not {max_new_tokens}"
    return tokens


@torch.no_grad()
def difference(model: LlamaForCausalLM, prompt: list[int], tokens: list[int], plain: list[int]) -> dict:
    """Return where two outputs first differ, and the gap of the two best logits there (0 is a tie)."""
    place = next(i for i, (a, b) in enumerate(zip(tokens, plain, strict=True)) if a != b)
    logits = model(torch.tensor([prompt + plain[:place]])).logits[0, -1]
    top = logits.topk(2).values
    return {"new_token": place, "top_2_gap": (top[0] - top[1]).item()}


def measure(model, counter, prompts, plain, setting, max_new_tokens) -> dict:
    window, ngram, guesses = setting
    lade.config_lade(WINDOW_SIZE=window, LEVEL=ngram, GUESS_SET_SIZE=guesses, DEBUG=0)
    steps, prefill_tokens, step_tokens, differences, per_prompt = 0, 0, 0, [], []
    started = time.monotonic()
    for index, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
        counter.fed.clear()
        tokens = generate(model, prompt, max_new_tokens, use_lade=True)
        fed = list(counter.fed)
        steps += len(fed)
        prefill_tokens += fed[0]
        step_tokens += sum(fed[1:])
        per_prompt.append(len(fed))
        if tokens != expected:
            differences.append({"prompt": index, **difference(model, prompt, tokens, expected)})
    new_tokens = max_new_tokens * len(prompts)
    return {
        "setting": {"W": window, "N": ngram, "G": guesses}, "S": new_tokens / steps, "num_prompts": len(prompts),
        "new_tokens": new_tokens, "steps": steps,
        "mean_step_tokens": step_tokens / max(1, steps - len(prompts)),  # the prefill excluded, as T in the design
        "mean_prefill_tokens": prefill_tokens / len(prompts),
        "num_equal_to_greedy": len(prompts) - len(differences), "equal_to_greedy": not differences,
        "differences": differences, "steps_per_prompt": per_prompt, "seconds": time.monotonic() - started,
    }  # fmt: skip


def triple(text: str) -> tuple[int, int, int]:
    window, ngram, guesses = (int(part) for part in text.split(","))
    if window < 2 or ngram < 3 or guesses < 1:
        raise argparse.ArgumentTypeError(f"W,N,G needs W >= 2, N >= 3 and G >= 1, got {text}")
    return window, ngram, guesses


def main() -> None:
    parser = argparse.ArgumentParser(description="compression ratio of the reference implementation (lade 0.0.2)")
    parser.add_argument("--model", type=Path, required=True, help="folder of a Llama: config, weights, tokenizer.json")
    parser.add_argument("--prompts", type=Path, required=True, help="file with one JSON object per line")
    parser.add_argument("--field", required=True, help="the field that holds the prompt")
    parser.add_argument("--limit", type=int, default=None, help="number of prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--settings", type=triple, nargs="+", default=[(5, 3, 5), (7, 5, 7), (15, 5, 15)], help="W,N,G")
    parser.add_argument("--pool-from-prompt", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--full-match-bonus", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)  # lade 0.0.2 reseeds it with 10 in every call
    edit_greedy_loop(args.pool_from_prompt, args.full_match_bonus)
    lade.augment_all()
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    counter = ForwardCounter(model)
    lines = args.prompts.read_text().splitlines()[: args.limit]
    prompts = [tokenizer.encode(json.loads(line)[args.field], add_special_tokens=False).ids for line in lines]

    plain = []
    for prompt in prompts:
        counter.fed.clear()
        plain.append(generate(model, prompt, args.max_new_tokens, use_lade=False))
        assert len(counter.fed) == args.max_new_tokens, "plain greedy takes one forward a token"
    results = []
    for setting in args.settings:
        results.append(measure(model, counter, prompts, plain, setting, args.max_new_tokens))
        last = results[-1]
        print(
            f"W,N,G {setting}: S {last['S']:.3f} ({last['new_tokens']} tokens, {last['steps']} steps,"
            f" {last['mean_step_tokens']:.1f} tokens a step), {last['num_equal_to_greedy']} of {len(prompts)}"
            f" prompts equal to greedy, {last['seconds']:.0f} s", flush=True,
        )  # fmt: skip
    report = {
        "implementation": "lade 0.0.2",
        "pool_from_prompt": args.pool_from_prompt,
        "full_match_bonus": args.full_match_bonus,
        "dtype": "float32",
        "max_new_tokens": args.max_new_tokens,
        "prompts": f"{args.prompts.name}:{args.field}",
        "versions": {name: importlib.metadata.version(name) for name in ("lade", "torch", "transformers")},
        "results": results,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
