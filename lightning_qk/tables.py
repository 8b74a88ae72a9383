"""Tables of the report: how numbers are written, and rows as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "<": "$<$", ">": "$>$"},
}


@dataclass(frozen=True)
class Table:
    """Rows by column heading under a title; the note says what the numbers are."""

    title: str
    rows: Sequence[Mapping[str, str]]
    note: str = ""

    def lines(self) -> list[list[str]]:
        """The headings, then the cells of every row; a row without a heading has a dash there."""
        headings = list(dict.fromkeys(heading for row in self.rows for heading in row))
        return [headings, *([row.get(heading, "-") for heading in headings] for row in self.rows)]


def short(value: float) -> str:
    """About three significant digits: 0.0443, 3.21, 81.2, 378,880."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:#.3g}"


def p_value(value: float | None) -> str:
    """Two significant digits; below a ten-thousandth only that."""
    return "-" if value is None else "<0.0001" if value < 1e-4 else f"{value:.2g}"


def spread(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> str:
    """The middle and, over values that differ, the range; values that are not finite are counted apart."""
    usable = [value for value in values if math.isfinite(value)]
    text = short(middle(usable)) if usable else ""
    if len(set(usable)) > 1:
        text += f" [{short(min(usable))}..{short(max(usable))}]"
    if missing := len(values) - len(usable):
        text = f"{text} + {missing} not finite" if text else "not finite"
    return text or "-"


def as_text(tables: Sequence[Table], markdown: bool = False) -> str:
    """All tables, as aligned text or as Markdown tables (which are aligned text with rules)."""
    parts = []
    for table in tables:
        lines = table.lines()
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        cells.insert(1, ["-" * width for width in widths])
        grid = [("| " + " | ".join(line) + " |") if markdown else "  ".join(line).rstrip() for line in cells]
        title = f"## {table.title}" if markdown else table.title
        parts += [title, "\n".join(grid), *([table.note] if table.note else [])]
    return "\n\n".join(parts)


def as_latex(tables: Sequence[Table]) -> str:
    """All tables as `tabular`s with the rules of booktabs."""
    parts = ["% needs \\usepackage{booktabs}; tables may be wider than a page: \\resizebox or \\small"]
    for table in tables:
        headings, *rows = ([escape(cell) for cell in line] for line in table.lines())
        body = "\n".join(f"{' & '.join(line)} \\\\" for line in rows)
        parts.append(
            f"\\begin{{table}}\n\\centering\n\\caption{{{escape(table.title)}}}\n"
            f"\\begin{{tabular}}{{{'l' * len(headings)}}}\n\\toprule\n{' & '.join(headings)} \\\\\n\\midrule\n{body}\n"
            f"\\bottomrule\n\\end{{tabular}}\n"
            + (f"\n\\smallskip\\footnotesize {escape(table.note)}\n" if table.note else "")
            + "\\end{table}"
        )
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(LATEX.get(character, character) for character in text)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with numbers as they are; None is an empty cell."""
    buffer = io.StringIO()
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    writer = csv.DictWriter(buffer, headings, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
