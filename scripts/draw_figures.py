"""Draw the figures of README.md and docs/ as SVG files in docs/figures/.

    python scripts/draw_figures.py

Plain Python without dependencies. The same source gives the same bytes. Every figure has a light and a dark style;
the reader's browser chooses one of them (`prefers-color-scheme`).
"""

from __future__ import annotations

from typing import NamedTuple

from svg_drawing import FOLDER, GAP, Drawing


class Node(NamedTuple):
    """A node of the token tree in `shared_tree.svg`.

    Attributes:
        token: its text, without leading spaces; "↵" is a line break.
        parent: index of its parent, -1 for the first.
        depth: depth below the root; negative for pending tokens before it.
        replicas: ranks that compute it.
        owner: rank that reports its successor; None for pending tokens before the root.
    """

    token: str
    parent: int
    depth: int
    replicas: str
    owner: int | None


# Step 14 of the demo model and the prompt of scripts/demo.sh, drafter full, W=8 N=3 G=8 budget=20, and the result of
# `partition(tree, [1.0, 1.0])` (2026-11-22).
TREE = (
    Node("read", -1, -3, "01", None),
    Node("_", 0, -2, "01", None),
    Node("json", 1, -1, "01", None),
    Node("(", 2, 0, "01", 0),
    Node("path", 3, 1, "01", 0),
    Node(":", 4, 2, "0", 0),
    Node("str", 5, 3, "0", 0),
    Node(")", 4, 2, "1", 1),
    Node("f", 3, 1, "1", 1),
    Node(")", 6, 4, "0", 0),
    Node("file", 3, 1, "1", 1),
    Node("->", 9, 5, "0", 0),
    Node("↵↵", 4, 2, "1", 1),
    Node("dict", 11, 6, "0", 0),
    Node("->", 7, 3, "1", 1),
    Node("encoding", 3, 1, "1", 1),
    Node(":", 13, 7, "0", 0),
    Node("(", 4, 2, "0", 0),
    Node(".", 10, 2, "1", 1),
    Node("↵", 16, 8, "0", 0),
)
ROOT = 3
ACCEPTED = (4, 5, 6, 9, 11)  # nodes below the root that the model confirmed
BONUS = "str"  # the model's successor of the last of them


def rows_of(tree: tuple[Node, ...]) -> list[int]:
    """Return each node's row: a first child shares its parent's row, every other child opens a new one."""
    rows = [0] * len(tree)
    num_rows = 1

    def place(node: int, row: int) -> None:
        nonlocal num_rows
        rows[node] = row
        for number, child in enumerate(index for index, each in enumerate(tree) if each.parent == node):
            if number:
                num_rows += 1
            place(child, row if number == 0 else num_rows - 1)

    place(0, 0)
    return rows


def draw_shared_tree() -> None:
    """Draw one token tree, shared by two replicas."""
    width, height, pitch, line = 66, 28, 83, 40
    drawing = Drawing(1020, 428, "One step's token tree, shared by two replicas")
    rows = rows_of(TREE)

    def place(depth: int, row: int) -> tuple[float, float]:
        return 22 + (depth + 3) * pitch, 110 + row * line

    def edge(start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        x0, y0 = start[0] + width, start[1] + height / 2
        x1, y1 = end[0], end[1] + height / 2
        middle = (x0 + x1) / 2
        drawing.path(f"M{x0:g} {y0:g} C{middle:g} {y0:g} {middle:g} {y1:g} {x1:g} {y1:g}", kind)

    places = [place(node.depth, row) for node, row in zip(TREE, rows, strict=True)]
    drawing.text(
        22,
        26,
        "One step: 20 nodes, fed by two replicas in one forward pass each; 6 tokens committed",
        "ink large",
        "start",
    )
    bands = ((-3, 0, "committed, not cached yet"), (1, 8, "guesses, one column a position"))
    for first, last, label in bands:
        x0, x1 = place(first, 0)[0], place(last, 0)[0] + width
        drawing.path(f"M{x0:g} 62 v-6 H{x1:g} v6", "line")
        drawing.text((x0 + x1) / 2, 50, label, "dim")
    for index, node in enumerate(TREE):
        if node.parent >= 0:
            edge(places[node.parent], places[index], "yes" if index in ACCEPTED else "line")
    bonus = (place(6, 0)[0], place(6, 0)[1] - line)
    edge(places[ACCEPTED[-1]], bonus, "yes")
    drawing.rect(*bonus, width, height, "bonus")
    drawing.text(bonus[0] + width / 2, bonus[1] + 18, BONUS, "ink code small")
    for index, (node, (x, y)) in enumerate(zip(TREE, places, strict=True)):
        draw_node(drawing, x, y, width, height, node.replicas)
        if index in ACCEPTED:
            drawing.rect(x - 1, y - 1, width + 2, height + 2, "yes", 7)
        drawing.text(x + width / 2, y + 18, node.token, "ink code small")
        if len(node.replicas) > 1 and node.owner is not None:
            draw_owner(drawing, x + width - 4, y + 2, node.owner)
    drawing.text(place(0, 0)[0] + width / 2, 100, "root", "dim small")

    counts = [sum(str(rank) in node.replicas for node in TREE) for rank in (0, 1)]
    x, y = 22, 184
    for number, (replicas, label) in enumerate(
        (
            ("0", f"replica 0 computes: {counts[0]} tokens"),
            ("1", f"replica 1 computes: {counts[1]} tokens"),
            ("01", "both compute"),
        )
    ):
        draw_node(drawing, x, y + 30 * number, 34, 20, replicas)
        drawing.text(x + 46, y + 30 * number + 15, label, "ink", "start")
    draw_owner(drawing, x + 17, y + 100, 0)
    drawing.text(x + 46, y + 105, "its owner reports what follows it", "ink", "start")
    drawing.path(f"M{x} {y + 130} h34", "yes")
    drawing.text(x + 46, y + 135, "the model agrees: accepted", "ink", "start")
    drawing.rect(x, y + 150, 34, 20, "bonus", 4)
    drawing.text(x + 46, y + 165, "bonus token, from the last node", "ink", "start")
    drawing.text(x, y + 204, "↵ is a line break; leading spaces are left out.", "dim small", "start")
    drawing.text(x, y + 222, "A tree that the demo model's text has grown.", "dim small", "start")
    drawing.save("shared_tree.svg")


def draw_node(drawing: Drawing, x: float, y: float, width: float, height: float, replicas: str) -> None:
    """Draw a node in the color of the replica that computes it, or half and half in those of two."""
    if len(replicas) == 1:
        drawing.rect(x, y, width, height, ("first", "second")[int(replicas)])
        return
    r, half = 6, width / 2
    down, up = f"v{height - 2 * r:g}", f"v{2 * r - height:g}"
    drawing.path(
        f"M{x + half:g} {y:g} h{r - half:g} a{r} {r} 0 0 0 -{r} {r} {down} a{r} {r} 0 0 0 {r} {r} h{half - r:g} Z",
        "first",
    )
    corner = f"a{r} {r} 0 0 0"
    drawing.path(
        f"M{x + half:g} {y + height:g} h{half - r:g} {corner} {r} -{r} {up} {corner} -{r} -{r} h{r - half:g} Z",
        "second",
    )


def draw_owner(drawing: Drawing, x: float, y: float, rank: int) -> None:
    """Draw the badge of the replica that owns a node."""
    drawing.circle(x, y, 8, f"badge{rank}")
    drawing.text(x, y + 4, str(rank), "badge small strong")


def draw_request() -> None:
    """Draw the life of a request: the parts of the package that a prompt passes through, in order."""
    drawing = Drawing(1110, 400, "The life of a request: from the prompt to the last delta")
    width, height, pitch = 136, 100, 152
    xs = [22 + pitch * number for number in range(7)]
    top, bottom = 66, 262

    drawing.text(22, 28, "Life of a request", "ink large", "start")
    drawing.text(22, 52, "caller's process", "dim", "start")
    drawing.titled_box(
        xs[0], top, width, height, "1  runtime", ("generate, stream:", "receives a prompt"), "runtime.py"
    )
    drawing.titled_box(
        xs[1],
        top,
        width,
        height,
        "2  request builder",
        ("tokens, defaults,", "checks: a Request"),
        "request_builder.py",
    )
    drawing.titled_box(
        xs[2], top, width, height, "3  launcher", ("hands the Request", "to every replica"), "launchers/"
    )
    drawing.titled_box(
        xs[6], top, width, height, "8  stream", ("token ids to text:", "a Delta per step"), "generation.py"
    )
    drawing.text(xs[4] + 60, top + 44, "for delta in runtime.stream(prompt):", "ink code")
    drawing.text(xs[4] + 60, top + 64, "print(delta.text)", "ink code")
    drawing.arrow((xs[6] - 2, top + 84), (xs[3] + 40, top + 84))

    for shift in (10, 5, 0):  # three overlapping frames
        drawing.rect(xs[2] - 14 + shift, bottom - 52 - shift, 5 * pitch + 12, height + 66, "frame", 8)
    drawing.text(xs[3], bottom - 30, "every replica, each with the whole model", "dim", "start")
    columns = [xs[2] + 4 * pitch / 3 * number for number in range(4)]  # of the replica's boxes
    rooms = (
        ("4  engine", ("opens the request:", "slot, drafter, sampler"), "running_request.py"),
        ("5  prefill", ("the prompt in chunks,", "then a first token"), "runner.py"),
        ("6  step loop", ("propose, forward,", "exchange, advance"), "engine.py"),
        ("7  delivery", ("tokens to the caller,", "once a step"), "delivery.py"),
    )
    for column, (title, lines, file) in zip(columns, rooms, strict=True):
        drawing.titled_box(column, bottom, width, height, title, lines, file)
    for left in (0, 1):
        drawing.arrow((xs[left] + width, top + 50), (xs[left + 1] - GAP + 4, top + 50))
    for left in (0, 1, 2):
        drawing.arrow((columns[left] + width, bottom + 50), (columns[left + 1] - 2, bottom + 50))
    drawing.arrow((xs[2] + width / 2, top + height), (xs[2] + width / 2, bottom - 2))
    drawing.arrow((xs[6] + width / 2, bottom), (xs[6] + width / 2, top + height + 2))
    x = columns[2] + width / 2
    drawing.path(
        f"M{x + 36:g} {bottom:g} C{x + 36:g} {bottom - 36:g} {x - 36:g} {bottom - 36:g} {x - 36:g} {bottom - 10:g}",
        "line",
    )
    drawing.arrow((x - 36, bottom - 12), (x - 36, bottom - 2))
    drawing.text(22, bottom + 24, "With one local replica, both", "dim small", "start")
    drawing.text(22, bottom + 40, "are one process. Otherwise", "dim small", "start")
    drawing.text(22, bottom + 56, "every replica is a process, and", "dim small", "start")
    drawing.text(22, bottom + 72, "the first one streams back.", "dim small", "start")
    drawing.save("life_of_a_request.svg")


def draw_step() -> None:
    """Draw the life of a step: the parts that are the same on every replica, and those that differ."""
    drawing = Drawing(1020, 356, "The life of a step: propose, partition, forward, exchange, advance")
    width, height, pitch = 164, 100, 203
    xs = [22 + pitch * number for number in range(5)]
    middle, upper, lower = 142, 82, 202
    drawing.text(22, 28, "Life of a step", "ink large", "start")
    bands = (
        (0, 1, "the same on every replica"),
        (2, 2, "each its own share"),
        (3, 3, "the only communication"),
        (4, 4, "the same on every replica"),
    )
    for first, last, label in bands:
        drawing.path(f"M{xs[first]:g} 66 v-6 H{xs[last] + width:g} v6", "line")
        drawing.text((xs[first] + xs[last] + width) / 2, 54, label, "dim")
    drawing.titled_box(xs[0], middle, width, height, "propose", ("the drafter grows", "one token tree"), "lookahead/")
    drawing.titled_box(
        xs[1], middle, width, height, "partition", ("a share for each replica,", "all done at one time"), "partition.py"
    )
    for y, kind, rank in ((upper, "first", 0), (lower, "second", 1)):
        drawing.rect(xs[2], y, width, height, kind)
        drawing.text(xs[2] + width / 2, y + 23, f"forward, replica {rank}", "ink strong")
        drawing.text(xs[2] + width / 2, y + 43, "logits of its share;", "ink small")
        drawing.text(xs[2] + width / 2, y + 59, "its nodes' successors", "ink small")
        drawing.text(xs[2] + width / 2, y + height - 10, "runner.py, sampler.py", "ink small code")
        drawing.arrow(
            (xs[1] + width, middle + 50),
            (xs[1] + width + 18, middle + 50),
            (xs[1] + width + 18, y + 50),
            (xs[2] - 2, y + 50),
        )
        drawing.arrow(
            (xs[2] + width, y + 50),
            (xs[2] + width + 18, y + 50),
            (xs[2] + width + 18, middle + 50),
            (xs[3] - 2, middle + 50),
        )
    drawing.titled_box(
        xs[3], middle, width, height, "exchange", ("one gather of integers:", "successors of all nodes"), "exchange.py"
    )
    drawing.titled_box(
        xs[4], middle, width, height, "advance", ("accept, commit, learn:", "1 token or more"), "decoder.py"
    )
    drawing.arrow((xs[0] + width, middle + 50), (xs[1] - 2, middle + 50))
    drawing.arrow((xs[3] + width, middle + 50), (xs[4] - 2, middle + 50))
    drawing.arrow(
        (xs[4] + width / 2, middle + height),
        (xs[4] + width / 2, 326),
        (xs[0] + width / 2, 326),
        (xs[0] + width / 2, middle + height + 2),
    )
    drawing.text(510, 345, "next step", "dim")
    drawing.save("life_of_a_step.svg")


# docs/results: 285M parameters in bfloat16 on 2 CPU cores, 4 prompts; tokens per second.
RATES = (
    ("transformers, greedy", 31.2, "grey"),
    ("transformers, prompt lookup", 62.5, "grey"),
    ("lp_runtime, one token a step", 64.8, "badge0"),
    ("lp_runtime, drafter paper (15, 5, 15)", 43.3, "badge0"),
    ("lp_runtime, default", 149.4, "badge0"),
)
# docs/results: tokens committed per step (S) by tokens fed per step; the demo model, 40 prompts.
FULL = ((16.0, 4.42), (32.0, 5.84), (45.9, 6.46), (53.8, 6.65), (82.9, 7.11))
PAPER = ((14.6, 2.37), (35.0, 3.10), (65.3, 3.28))
PEERS = (("prompt lookup", 9.3, 3.36), ("token recycling", 67.9, 2.88), ("SAM decoding", 31.4, 4.21))


def draw_results() -> None:
    """Draw the two plots of README.md: tokens per second by method, tokens committed by tokens fed."""
    drawing = Drawing(1020, 330, "Tokens per second by method; tokens committed a step by tokens fed a step")
    drawing.text(22, 28, "Tokens per second, one replica", "ink large", "start")
    drawing.text(22, 48, "demo model at a 285M model's cost, bfloat16, 2 CPU cores, no GPU", "dim", "start")
    for number, (label, rate, kind) in enumerate(RATES):
        top = 70 + 48 * number
        drawing.text(22, top + 10, label, "ink", "start")
        drawing.rect(22, top + 16, 2.6 * rate, 16, kind, 3)
        drawing.text(30 + 2.6 * rate, top + 29, f"{rate:.1f}", "ink strong", "start")

    def place(fed: float, committed: float) -> tuple[float, float]:
        return 560 + 4.6 * fed, 282 - 27 * committed

    drawing.text(524, 28, "Tokens committed a step, by tokens fed a step", "ink large", "start")
    drawing.text(524, 48, "demo model (5M parameters), 40 prompts, greedy, one replica", "dim", "start")
    for tick in range(0, 9, 2):
        x, y = place(0, tick)
        drawing.path(f"M{x:g} {y:g} H{place(90, 0)[0]:g}", "grid" if tick else "line")
        drawing.text(x - 10, y + 4, str(tick), "dim small", "end")
    for tick in range(0, 91, 20):
        drawing.text(place(tick, 0)[0], 300, str(tick), "dim small")
    drawing.text(place(45, 0)[0], 320, "tokens fed a step", "dim")
    for points, label, kind, badge in (
        (FULL, "full (default)", "blue", "badge0"),
        (PAPER, "paper", "orange", "badge1"),
    ):
        places = [place(*point) for point in points]
        drawing.path("M" + " L".join(f"{x:g} {y:g}" for x, y in places), kind)
        for x, y in places:
            drawing.circle(x, y, 4, badge)
        drawing.text(places[-1][0], places[-1][1] - 12, label, "ink strong", "end")
    for label, fed, committed in PEERS:
        x, y = place(fed, committed)
        drawing.circle(x, y, 4, "grey")
        drawing.text(x + 10, y + (16 if label == "token recycling" else 4), label, "ink", "start")
    drawing.save("results.svg")


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    draw_shared_tree()
    draw_request()
    draw_step()
    draw_results()
