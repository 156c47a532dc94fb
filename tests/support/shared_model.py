"""Several threads on one model object, and interrupts: for a test and for benchmarks/correctness.py."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import PreTrainedModel

from lp_runtime import lookahead_generate

NUM_NEW = 12
KINDS: dict[str, dict[str, object]] = {
    "fast": {"custom_generate": lookahead_generate, "W": 5, "N": 4, "G": 5},
    "strict": {"custom_generate": lookahead_generate, "W": 5, "N": 4, "G": 5, "exactness": "strict"},
    "plain": {},
    "sampled": {"custom_generate": lookahead_generate, "do_sample": True, "seed": 3, "W": 5, "N": 4, "G": 5},
}


def state_of(model: PreTrainedModel) -> tuple:
    """Return all that a call could change: attention, modes, attributes, identity and version of weights."""
    weights = [(id(each), each._version) for each in (*model.parameters(), *model.buffers())]
    attributes = [(name, sorted(vars(module)), module.training) for name, module in model.named_modules()]
    return model.config.to_dict(), model.config._attn_implementation, weights, attributes


def call(model: PreTrainedModel, kind: str, prompt: list[int]) -> list[int]:
    """Return the new tokens of one call of a kind."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": None, "pad_token_id": 0} | KINDS[kind]
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def run_threads(model: PreTrainedModel, num_calls: int, num_threads: int = 4) -> tuple[int, list[str]]:
    """Make calls of all kinds from several threads.

    Returns:
        (wrong, errors): the number of calls whose tokens differ from those of one thread, and what was raised.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    jobs = [(kind, prompt) for prompt in prompts for kind in KINDS]
    expected = {(kind, tuple(prompt)): call(model, kind, prompt) for kind, prompt in jobs}
    wrong, errors = [0], []
    gate = threading.Barrier(num_threads)

    def work(thread: int) -> None:
        torch.set_num_threads(1)
        mine = random.Random(thread)
        gate.wait()
        for _ in range(num_calls // num_threads):
            kind, prompt = mine.choice(jobs)
            try:
                wrong[0] += call(model, kind, prompt) != expected[kind, tuple(prompt)]
            except Exception as error:  # any error is reported
                errors.append(f"{kind}: {error!r}")

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
    return wrong[0], errors


def num_calls_of(task: Callable[[], object]) -> int:
    """Run a task; return how many Python functions it calls in this thread."""
    count = 0

    def profile(frame, event, argument) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        task()
    finally:
        sys.setprofile(None)
    return count


def interrupted(task: Callable[[], object], num_calls: int) -> bool:
    """Run a task with a KeyboardInterrupt at its n-th Python call; return whether that ended it.

    Args:
        num_calls: n, counted in this thread.
    """
    left = num_calls

    def profile(frame, event, argument) -> None:
        nonlocal left
        left -= event == "call"
        if not left:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        task()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
