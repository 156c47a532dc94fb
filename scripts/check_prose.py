#!/usr/bin/env python3
"""Check that docstrings, comments and docs use ever fewer phrases that make a reader stop.

    python scripts/check_prose.py          fail if a phrase is used more often than scripts/prose_ceilings.toml allows
    python scripts/check_prose.py --list   print every use
    python scripts/check_prose.py --lower  lower the ceilings to the current counts

The phrases are correct English with an unusual meaning, for example prepositions of place for time or comparison.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = ROOT / "scripts" / "prose_ceilings.toml"
CHECKED = (
    "lp_runtime", "tests", "benchmarks", "experiments", "scripts", "examples", "docs",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
)  # fmt: skip
MAX_FIRST_SENTENCE = 110  # characters of a docstring's first sentence
LONG_FIRST = "a long first sentence"
OPENING = "an opening without a verb or a noun"
OPENINGS = re.compile(r"(Of|What|How|Where|When|Have|As|Such|The same|These|Those|It|Them)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def texts_of(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (first line, text, is a docstring) of a file's docstrings and comments, or of a whole page."""
    source = file.read_text()
    if file.suffix != ".py":
        yield 1, source, False
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def uses_in(file: Path, phrases: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Yield (phrase, line, text) for every use of a phrase in a file, and for every hard first sentence."""
    for first_line, text, is_docstring in texts_of(file):
        if is_docstring:
            sentence = re.split(r"(?<=[.:;])\s", text.replace("\n", " "), maxsplit=1)[0]
            if len(sentence) > MAX_FIRST_SENTENCE:
                yield LONG_FIRST, first_line, sentence
            if OPENINGS.match(sentence):
                yield OPENING, first_line, sentence
        for number, row in enumerate(text.splitlines(), first_line):
            for phrase in phrases:
                if re.search(phrase, row, re.IGNORECASE):
                    yield phrase, number, row.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every use")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to the current counts")
    options = parser.parse_args(arguments)
    ceilings: dict[str, int] = tomllib.loads(CEILINGS.read_text())
    phrases = [phrase for phrase in ceilings if phrase not in (LONG_FIRST, OPENING)]
    names = subprocess.run(["git", "ls-files", *CHECKED], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    uses: dict[str, list[str]] = defaultdict(list)
    for name in names.splitlines():
        if name.endswith((".py", ".md")) and (ROOT / name).is_file():
            for phrase, line, text in uses_in(ROOT / name, phrases):
                uses[phrase].append(f"{name}:{line}: {phrase}: {text}")
    if options.list:
        print(*(line for lines in uses.values() for line in lines), sep="\n")
    if options.lower:
        head = "# How often each phrase may be used: scripts/check_prose.py. Counts only ever fall.\n"
        lowered = {phrase: min(ceiling, len(uses[phrase])) for phrase, ceiling in ceilings.items()}
        CEILINGS.write_text(head + "".join(f"'{phrase}' = {count}\n" for phrase, count in lowered.items()))
        return 0
    too_many = {phrase: lines for phrase, lines in uses.items() if len(lines) > ceilings[phrase]}
    for phrase, lines in too_many.items():
        print(*lines, f"{phrase}: {len(lines)} uses, {ceilings[phrase]} are allowed", sep="\n", file=sys.stderr)
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main())
