"""Tables of a page: as HTML, to be copied, as CSV and as LaTeX."""

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Grid", "escaped"]

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\u00b1": r"$\pm$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def escaped(text: object) -> str:
    """Return text that a page shows as it is, whatever it holds."""
    return html.escape(str(text), quote=True)


@dataclass(frozen=True)
class Grid:
    """A table: what it is of, its headings, its rows; the first column names a row."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_html(self, identity: str = "") -> str:
        """Return the table in a box of its own that scrolls if it is too wide."""
        caption = escaped(self.caption)
        name = f' id="{escaped(identity)}"' if identity else ""
        head = "".join(f'<th scope="col">{escaped(one)}</th>' for one in self.headings)
        body = "".join(map(_row, self.rows))
        return (
            # Inside the table it would scroll away with it.
            f'<p class="caption">{caption}</p>'
            f'<div class="wide" role="region" tabindex="0" aria-label="{caption}">'
            f'<table{name} aria-label="{caption}"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def as_csv(self, separator: str = ",") -> str:
        """Return the table for programs, or for a spreadsheet to paste."""
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator, lineterminator="\n")
        writer.writerow(self.headings)
        writer.writerows(self.rows)
        return text.getvalue()

    def as_latex(self) -> str:
        """Return the table for a paper; it needs the package booktabs."""
        columns = "l" + "r" * (len(self.headings) - 1)
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in self.rows]
        head = " & ".join(map(_latex, self.headings)) + r" \\"
        return "\n".join(
            [
                r"\begin{table}",
                rf"\caption{{{_latex(self.caption)}}}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                head,
                r"\midrule",
                *lines,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def _row(cells: Sequence[str]) -> str:
    first, *rest = map(escaped, cells)
    return (
        f'<tr><th scope="row">{first}</th>'
        + "".join(f"<td>{cell}</td>" for cell in rest)
        + "</tr>"
    )


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
