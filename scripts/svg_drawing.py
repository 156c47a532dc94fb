"""SVG pictures, composed shape by shape, with a light and a dark style; used by draw_figures.py."""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"
GAP = 6  # pixels between an arrow and the box it points to

# Class of a shape -> (style on a light page, style on a dark page).
STYLES = {
    "page": ("fill:#ffffff", "fill:#0d1117"),
    "ink": ("fill:#1f2328", "fill:#e6edf3"),
    "dim": ("fill:#59636e", "fill:#9198a1"),
    "line": ("fill:none;stroke:#8c959f;stroke-width:1.3", "fill:none;stroke:#7d8590;stroke-width:1.3"),
    "head": ("fill:#8c959f", "fill:#7d8590"),
    "box": ("fill:#f6f8fa;stroke:#8c959f", "fill:#161b22;stroke:#7d8590"),
    "frame": ("fill:none;stroke:#8c959f;stroke-dasharray:4 4", "fill:none;stroke:#7d8590;stroke-dasharray:4 4"),
    "first": ("fill:#cfe2ff;stroke:#0969da", "fill:#12305e;stroke:#58a6ff"),
    "second": ("fill:#ffdfb8;stroke:#bc4c00", "fill:#5a2e0b;stroke:#f0883e"),
    "badge0": ("fill:#0969da", "fill:#58a6ff"),
    "badge1": ("fill:#bc4c00", "fill:#f0883e"),
    "badge": ("fill:#ffffff", "fill:#0d1117"),
    "yes": ("fill:none;stroke:#1a7f37;stroke-width:3", "fill:none;stroke:#3fb950;stroke-width:3"),
    "bonus": (
        "fill:#dafbe1;stroke:#1a7f37;stroke-width:2;stroke-dasharray:5 3",
        "fill:#12301c;stroke:#3fb950;stroke-width:2;stroke-dasharray:5 3",
    ),
    "grey": ("fill:#8c959f", "fill:#6e7681"),
    "grid": ("fill:none;stroke:#d1d9e0", "fill:none;stroke:#30363d"),
    "blue": ("fill:none;stroke:#0969da;stroke-width:2", "fill:none;stroke:#58a6ff;stroke-width:2"),
    "orange": ("fill:none;stroke:#bc4c00;stroke-width:2", "fill:none;stroke:#f0883e;stroke-width:2"),
}
FONTS = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; font-size: 13px; }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; }
.small { font-size: 11.5px; } .large { font-size: 15px; font-weight: 600; } .strong { font-weight: 600; }
"""


class Drawing:
    """SVG picture that is composed shape by shape.

    Args:
        width: width in pixels.
        height: height in pixels.
        title: description of the picture for screen readers.
    """

    def __init__(self, width: int, height: int, title: str):
        self._width, self._height, self._title = width, height, title
        self._shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 6) -> None:
        """Draw a rectangle; x and y are its upper left corner."""
        self._shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def path(self, data: str, kind: str) -> None:
        """Draw a path given as SVG path data."""
        self._shapes.append(f'<path class="{kind}" d="{data}"/>')

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        """Draw a circle around (x, y)."""
        self._shapes.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "middle") -> None:
        """Write a line; y is its baseline, anchor is start, middle or end."""
        self._shapes.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through two or more points, with a head at the last one; its last part is straight."""
        (x0, y0), (x, y) = points[-2:]
        length = abs(x - x0) + abs(y - y0)
        dx, dy = (x - x0) / length, (y - y0) / length
        self.path("M" + " L".join(f"{px:g} {py:g}" for px, py in points), "line")
        left, right = (x - 8 * dx - 4 * dy, y - 8 * dy + 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy - 4 * dx)
        self.path(f"M{x:g} {y:g} L{left[0]:g} {left[1]:g} L{right[0]:g} {right[1]:g} Z", "head")

    def titled_box(
        self, x: float, y: float, width: float, height: float, title: str, lines: tuple[str, ...], where: str
    ) -> None:
        """Draw a box with a title, some lines and the name of its file."""
        self.rect(x, y, width, height, "box")
        self.text(x + width / 2, y + 23, title, "ink strong")
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + 43 + 16 * number, line, "dim small")
        self.text(x + width / 2, y + height - 10, where, "dim small code")

    def save(self, name: str) -> None:
        """Write the picture to docs/figures/NAME."""
        light = "\n".join(f".{kind} {{ {style} }}" for kind, (style, _) in STYLES.items())
        dark = "\n".join(f".{kind} {{ {style} }}" for kind, (_, style) in STYLES.items())
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {self._height}"'
            f' width="{self._width}" height="{self._height}" role="img">',
            f"<title>{escape(self._title)}</title>",
            f"<style>{FONTS}{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}</style>",
            f'<rect class="page" width="{self._width}" height="{self._height}"/>',
            *self._shapes,
            "</svg>",
        ]
        (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
