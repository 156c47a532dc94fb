"""Times a constraint's host work in a step: the masks of a tree, pruning, and forced tokens.

    python benchmarks/micro.py masks --model DIR                   # V of the model's tokenizer
    python benchmarks/micro.py masks --model DIR --vocabulary 131072

`masks` fills the masks of all nodes of a tree whose branches are allowed. In a step, this happens after the launch of
the forward pass, for the nodes that a replica owns. `examine` finds which nodes are allowed and what must follow them;
`forced` does that for the root; `advance` advances by five tokens. `tree` is all work of the drafter `full` for a tree
under a constraint, before the pass; `plain` is the same without a constraint. Medians over --repeats, in microseconds.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import Results

from lp_runtime import ConstraintConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.constraints.compiled import compile_constraint
from lp_runtime.constraints.grammar_guide import Grammars, Vocabulary
from lp_runtime.constraints.library import library
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.drafters.best_first.drafter import BestFirstDrafter, compile_drafter
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.text.token_text import TokenTexts

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "notes": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "notes"],
}
TEXT = '{"name": "Ada Lovelace", "notes": ["the first of all programs", "an engine of analysis", "the first of'
TABLES_BYTES = 1 << 22


class LargerVocabulary(Grammars):
    """Grammars of a tokenizer whose vocabulary is enlarged by pairs of its tokens.

    Args:
        tokenizer: tokenizer of the model.
        size: size of the vocabulary.
    """

    def __init__(self, tokenizer: Any, size: int):
        super().__init__(lambda: tokenizer, len(tokenizer), {tokenizer.eos_token_id})
        texts = list(super().vocabulary(False).info.decoded_vocab)
        plain, rng = [text for text in texts if text], random.Random(0)
        texts += [rng.choice(plain) + rng.choice(plain) for _ in range(size - len(texts))]
        xgrammar = library()
        info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, stop_token_ids=[tokenizer.eos_token_id])
        self._larger = Vocabulary(info, TokenTexts(tokenizer))

    def vocabulary(self, with_special_tokens: bool) -> Vocabulary:
        return self._larger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--model", help="directory; the demo model if not given")
    parser.add_argument("--vocabulary", type=int, help="size of the vocabulary, enlarged by pairs of tokens")
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--repeats", type=int, default=200)


def median_us(task: Callable[[], object], repeats: int) -> float:
    """Return the median duration of a task in microseconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter_ns()
        task()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1000


def run(args: argparse.Namespace) -> int:
    """Measure every tree size."""
    compile_drafter()
    tokenizer = load_tokenizer(ModelConfig(path=args.model))
    size = args.vocabulary or len(tokenizer)
    grammars = LargerVocabulary(tokenizer, size)
    vocabulary = grammars.vocabulary(False)
    compiled = compile_constraint(ConstraintConfig(json_schema=SCHEMA), vocabulary.info)
    tokens = tokenizer(TEXT, add_special_tokens=False).input_ids
    guide = grammars.guide(compiled)
    guide.advance(tokens)
    words = [token for token in tokenizer(" and so on as it was before that").input_ids if guide.allows((), token)]
    results = Results("masks", args.output)
    for num_nodes in args.nodes:
        tree = TokenTree(tokens[-1:], max_depth=8)
        frontier = [tree.root]
        while len(tree) < num_nodes:
            parent = frontier.pop(0)
            frontier += [node for word in words[:3] if (node := tree.add(parent, word)) is not None]
        tree.truncate(num_nodes)
        arrays = tree.arrays()
        row = {"V": size, "nodes": num_nodes}
        row["masks"] = median_us(functools.partial(guide.masks, *arrays[:2], 0, range(len(arrays[0]))), args.repeats)
        row["examine"] = median_us(functools.partial(guide.examine, *arrays[:2], 0, 1, 8), args.repeats)
        row["forced"] = median_us(lambda: guide.forced(8), args.repeats)
        fresh = [grammars.guide(compiled) for _ in range(20)]
        row["advance"] = statistics.median(median_us(functools.partial(each.advance, tokens[:5]), 1) for each in fresh)
        drafter = BestFirstDrafter(num_nodes, DraftTables(TABLES_BYTES), None, None, max_depth=8)
        drafter.begin(tokens[:-1])
        drafter.advance_prefill(tokens)
        for name, given in (("tree", guide), ("plain", None)):
            task = functools.partial(drafter.propose, tokens, len(tokens) - 1, 8, num_nodes, given)
            row[f"{name} nodes"] = len(task())
            row[name] = median_us(task, args.repeats)
        results.add(row)
    results.finish(f"{args.model or 'demo model'}, medians of {args.repeats}")
    return 0
