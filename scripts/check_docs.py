#!/usr/bin/env python3
"""Check references in the documentation: links, figures, files and settings; also tables and spelling.

    python scripts/check_docs.py        prints FILE:LINE: complaint; exits with 1 if there are any

Pages are TOP_PAGES and docs/**/*.md. The rules:

- a relative link or figure leads to a file of the repository, and an anchor to a heading of that file;
- a path in `code` or in a code block that begins with a folder of the repository (FOLDERS) exists;
- a setting in `code`, or in a command in a code block, is one that the command takes (not in CHANGELOG.md, which has
  old names);
- a table of docs/results/ has at most ten rows, and README.md at most 120 lines;
- words are spelled as codespell expects, if it is installed ([tool.codespell] in pyproject.toml).
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from lp_runtime.config.commands import BenchConfig, ChatConfig, GenerateConfig
from lp_runtime.config.serving import ServeConfig

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    *("lp_runtime", "tests", "scripts", "benchmarks", "examples", "experiments"),
    *("conf", "launch", "docs", ".ci"),
)
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
MAX_ROWS = 10  # of a table in docs/results/
MAX_README_LINES = 120

COMMANDS = {"lp-generate": GenerateConfig, "lp-chat": ChatConfig, "lp-serve": ServeConfig, "lp-bench": BenchConfig}
LIKE_GENERATE = ("-m lp_runtime ", "scripts/demo.sh", "launch/torchrun.sh", "launch/ray_job.sh", "launch/slurm.sbatch")
LIKE_SERVE = ("lp_runtime.server.ray_serve:build",)
# In `code`, NAME= may also be an argument of Python or of another program.
OTHER_ARGUMENTS = {
    *("custom_generate", "do_sample", "launcher", "num_samples", "seed", "share_ranks", "tp_plan"),
    *("last_call_timeout",),
}
# In `code`, a dot may also be an attribute access in Python, on an object with the name of a group.
OTHER_ATTRIBUTES = {"model.generate", "model.forward", "sampling.sampler"}


@dataclass(frozen=True)
class Line:
    """One line of a page.

    Attributes:
        number: the line's number, from 1.
        text: the line.
        is_code: whether the line is in a code block, fenced or indented.
    """

    number: int
    text: str
    is_code: bool


def read_lines(text: str) -> list[Line]:
    """Return a page's lines; join continuation lines (after a trailing backslash in a code block)."""
    lines: list[Line] = []
    fence, after_blank = None, True
    for number, raw in enumerate(text.splitlines(), 1):
        marker = re.match(r"\s*(```+|~~~+)(.*)", raw)
        if fence is not None:
            is_end = bool(marker and marker[1].startswith(fence) and not marker[2].strip())
            fence, is_code = (None, False) if is_end else (fence, True)
        elif marker:
            fence, is_code = marker[1], False
        else:
            is_code = raw.startswith("    ") and (after_blank or lines[-1].is_code)
        lines.append(Line(number, raw, is_code))
        after_blank = not raw.strip()
    return join_continued(lines)


def join_continued(lines: list[Line]) -> list[Line]:
    """Return the lines; each line of code that ends in a backslash is joined with the code below it."""
    joined: list[Line] = []
    for line in lines:
        last = joined[-1] if joined else None
        if last and last.is_code and line.is_code and last.text.endswith("\\"):
            joined[-1] = Line(last.number, f"{last.text[:-1].rstrip()} {line.text.strip()}", True)
        else:
            joined.append(line)
    return joined


def code_spans(line: Line) -> list[str]:
    """Return the texts between backticks in a line of prose."""
    return [] if line.is_code else re.findall(r"`([^`]+)`", line.text)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    slugs: set[str] = set(re.findall(r'<a (?:name|id)="([^"]+)"', text))
    for line in read_lines(text):
        heading = re.match(r"#{1,6} +(.+?) *#*$", line.text)
        if line.is_code or not heading:
            continue
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = sum(1 for other in slugs if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        slugs.add(f"{slug}-{count}" if count else slug)
    return slugs


def check_links(page: Path, lines: list[Line]) -> Iterator[tuple[int, str]]:
    """Yield (line number, complaint) for broken links and figures. Links to other sites are not checked."""
    for line in lines:
        if line.is_code:
            continue
        prose = re.sub(r"`[^`]+`", "", line.text)
        targets = re.findall(r"\]\(\s*<?([^)\s>]+)", prose) + re.findall(r'(?:src|srcset|href)="([^"\s]+)"', prose)
        for target in targets:
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists():
                yield line.number, f"link to {target}: there is no such file"
            elif anchor and anchor not in anchors(file.read_text()):
                yield line.number, f"link to {target}: {file.name} has no such heading"


def check_paths(lines: list[Line], root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Yield (line number, complaint) for paths of the repository, in code, that do not exist."""
    begins = re.compile(rf"(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*")
    for line in lines:
        words = line.text.split() if line.is_code else [word for span in code_spans(line) for word in span.split()]
        for word in words:
            match = begins.match(word)
            if not match:
                continue
            path = match[0].rstrip(".")
            is_there = any(root.glob(path)) if "*" in path else (root / path).exists()
            if not is_there:
                yield line.number, f"{path}: is not there"


def keys_of(schema: type, prefix: str = "") -> set[str]:
    """Return every key of a settings class: fields, fields of groups with dots, and groups (presets)."""
    hints = get_type_hints(schema)
    keys = set()
    for item in fields(schema):
        keys.add(prefix + item.name)
        if is_dataclass(hints[item.name]):
            keys |= keys_of(hints[item.name], f"{prefix}{item.name}.")
    return keys


KEYS = {command: keys_of(schema) for command, schema in COMMANDS.items()}
ALL_KEYS = set().union(*KEYS.values())
GROUPS = {key.partition(".")[0] for key in ALL_KEYS if "." in key}


def command_of(text: str) -> str | None:
    """Return which of our commands a line of a code block runs, or None."""
    for command in COMMANDS:
        if re.search(rf"(?:^|[\s/]){command}\s", text):
            return command
    if any(name in text for name in LIKE_SERVE):
        return "lp-serve"
    return "lp-generate" if any(name in text for name in LIKE_GENERATE) else None


def check_settings(lines: list[Line]) -> Iterator[tuple[int, str]]:
    """Yield (line number, complaint) for settings that the line's command, or any command, does not take."""
    dotted = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(GROUPS))})\.[A-Za-z_]\w*)(?![\w(/])")
    for line in lines:
        if line.is_code:
            command = command_of(line.text)
            if command is None:
                continue
            text = re.sub(r"\"[^\"]*\"|'[^']*'|\|.*|\s#.*", "", line.text)
            for key in re.findall(r"(?<=\s)([a-z][\w.]*)=", text):
                if key not in KEYS[command]:
                    yield line.number, f"{key}: is no setting of {command}"
            continue
        for span in code_spans(line):
            named = set(dotted.findall(span))
            assigned = re.match(r"([a-z]\w*(?:\.\w+)*)=", span)
            if assigned and assigned[1] not in OTHER_ARGUMENTS:
                named.add(assigned[1])
            for key in sorted(named - OTHER_ATTRIBUTES):
                if key not in ALL_KEYS and not re.search(r"\.(py|md|yaml|json|jsonl)$", key):
                    yield line.number, f"{key}: is no setting of any command"


def check_tables(lines: list[Line]) -> Iterator[tuple[int, str]]:
    """Yield (line number, complaint) for tables of more than MAX_ROWS rows."""
    start, rows = 0, 0
    for line in [*lines, Line(0, "", False)]:
        if line.text.startswith("|") and not line.is_code:
            start, rows = start or line.number, rows + 1
            continue
        if rows - 2 > MAX_ROWS:
            yield start, f"a table of {rows - 2} rows; at most {MAX_ROWS}: the rest belongs in docs/decisions/"
        start, rows = 0, 0


def check_page(page: Path, root: Path = ROOT) -> list[str]:
    """Return the complaints about a page, each with its file and line."""
    lines = read_lines(page.read_text())
    complaints = [*check_links(page, lines), *check_paths(lines, root)]
    if page.name != "CHANGELOG.md":
        complaints += check_settings(lines)
    if "results" in page.relative_to(root).parts:
        complaints += check_tables(lines)
    if page == root / "README.md" and len(lines) > MAX_README_LINES:
        complaints.append((len(lines), f"{len(lines)} lines; at most {MAX_README_LINES}: the rest belongs in docs/"))
    return [f"{page.relative_to(root)}:{number}: {complaint}" for number, complaint in sorted(complaints)]


def pages(root: Path = ROOT) -> list[Path]:
    """Return the existing pages of the documentation."""
    top = [root / name for name in TOP_PAGES]
    return [page for page in top if page.exists()] + sorted((root / "docs").rglob("*.md"))


def check_spelling(files: list[Path], root: Path = ROOT) -> list[str]:
    """Return codespell's complaints about files, as pyproject.toml configures it; none if it is not installed."""
    if importlib.util.find_spec("codespell_lib") is None:
        return []
    names = [str(file.relative_to(root)) for file in files]
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *names], cwd=root, capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def main() -> None:
    """Print all complaints, and exit with 1 if there are any."""
    files = pages()
    complaints = [complaint for page in files for complaint in check_page(page)] + check_spelling(files)
    print(*complaints, sep="\n", end="\n" if complaints else "")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
