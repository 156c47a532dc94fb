"""Records a model's answer after every node of its drafted trees, for tests with a real model's text.

tests/support/recorded.py reads the file and documents its contents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from peers import NUM_SHOWN

from lp_runtime.kernels.types import NO_TOKEN
from lp_runtime.lookahead.top_k import ENTRY, K
from studies.drafting_bench import Bench


def save_texts(path: Path, bench: Bench) -> None:
    """Write the recordings of all prompts so far, and the vocabulary prior's entries for their tokens.

    Args:
        path: the file.
        bench: has decoded its prompts greedily, and in no other way.
    """
    prior = bench.calibration.vocabulary()
    arrays: dict[str, Any] = {"kinds": np.array([kind for kind, _ in bench.prompts])}
    is_asked = np.zeros(NO_TOKEN, np.bool_)
    for index, (_, prompt) in enumerate(bench.prompts):
        recording = bench.recording(index)
        nodes, said = recording.asked()
        assert recording.text is not None  # all prompts were decoded
        arrays |= {
            f"prompt_{index}": np.array(prompt, np.int32),
            f"length_{index}": np.array(len(recording.text)),
            f"nodes_{index}": nodes.astype(np.int32),
            f"packed_{index}": said[:, : -2 * NUM_SHOWN],
        }
        is_asked[np.concatenate([prompt, nodes[1:, 1]])] = True
    tokens = np.flatnonzero(is_asked)
    pairs = prior.after_pair.reshape(-1, K, ENTRY)
    arrays |= {"vocabulary_size": np.array(len(prior.after_token)), "num_paired": np.array(len(pairs))}
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays |= {"prior_tokens": tokens.astype(np.int32), "prior_entries": prior.after_token[tokens]}
    arrays["prior_pairs"] = pairs[tokens[tokens < len(pairs)]]
    np.savez_compressed(path, **arrays)
