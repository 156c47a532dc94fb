"""Measures the steps that drafting saves: S by drafter, step tokens, LP degree, prompt kind, source.

    python benchmarks/drafting.py drafters --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --output out/
    python benchmarks/drafting.py headline degrees chains ablation sampling draft_tables sources host --prompts ...
    python benchmarks/drafting.py categories --prompts spec_bench.jsonl:turns --limit 480 --each 4
    python benchmarks/drafting.py peers peers_kept --model DIR --chat --eos --prompts code_edits agent records
    python benchmarks/drafting.py starting_rates --also OTHER/starting_rates.npz --model DIR --prompts ... --output out/
    python benchmarks/drafting.py peers peers_sampled peers_kept --model DIR --chat --eos --each 8 --limit 480 \\
        --prompts spec_bench.jsonl:turns humaneval.jsonl:prompt --record RECORDED --output out/

S = new tokens / steps over all prompts, the prefill's step included. Decoding continues past end-of-text to exactly
--max-new-tokens, unless --eos. Each output is compared with decoding one token per step; the command ends with status
1 at the first difference. `step tokens` is the number of tokens that the busiest replica feeds, averaged over steps.
`least repetitive` is S over the third of the prompts whose outputs repeat the fewest 4-grams.

The model is queried once per node for all drafters (studies/recorded_model.py). --record saves its answers to files, so
that a study that was cut off, or is repeated with another drafter, feeds new nodes only. The vocabulary prior is saved
there, too. It takes several starts to know all of it, on a CPU many: --prior-seconds asks for all of it now, and
--prior-of-trees for the part that the trees of these prompts look up, which gives the same S within minutes.

With several replicas, a step is computed as one forward pass of the whole tree. The tree, the partition and therefore
the number of steps are those of that many replicas. Only the study `host` measures time. Results go to OUTPUT/STUDY.md
and .json, and, if matplotlib is installed, to OUTPUT/STUDY.svg.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from common import add_output_argument, add_prompt_arguments, one_line_errors
from studies.drafting import STUDIES
from studies.drafting_bench import Bench
from studies.drafting_table import Study

from lp_runtime.calibration import vocabulary_prior


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [study.__name__ for study in STUDIES]
    parser.add_argument("studies", nargs="+", choices=names, metavar="STUDY", help=", ".join(names))
    add_prompt_arguments(parser)
    parser.add_argument("--each", type=int, default=1 << 30, help="maximum prompts of each kind")
    parser.add_argument("--eos", action="store_true", help="stop at end-of-text instead of decoding past it")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompts")
    parser.add_argument(
        "--also",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="starting_rates: other models' starting_rates.npz",
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="save the model's answers there")
    parser.add_argument(
        "--prior-seconds",
        type=float,
        default=vocabulary_prior.ASKING_SECONDS,
        metavar="SECONDS",
        help="time limit for asking the model for the vocabulary prior",
    )
    parser.add_argument(
        "--prior-of-trees",
        action="store_true",
        help="also ask for it after all tokens of the trees, and decode again until none is unknown",
    )
    add_output_argument(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the studies named on the command line (None: the process's), in the order of `STUDIES`."""
    args = make_parser().parse_args(arguments)
    vocabulary_prior.ASKING_SECONDS = args.prior_seconds
    bench = Bench(args)
    sources = ", ".join(Path(source.rpartition(":")[0] or source).stem for source in args.prompts)
    about = f"{len(bench.prompts)} prompts ({sources}), {args.max_new_tokens} new tokens each"
    about += " at most, to the end of the text" if args.eos else ""
    about += ", by the chat template" if args.chat else ""
    for fill in STUDIES:
        if fill.__name__ in args.studies:
            study = Study(fill.__name__, bench, args.output, args.also)
            fill(study)
            study.finish(about)


if __name__ == "__main__":
    with one_line_errors():
        main()
