"""Tables of a page: their content, to be copied, as CSV and as LaTeX."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedbilevel._text import csv_text

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "\u00b1": r"$\pm$",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    }
)
_LATEX_TABLE = r"""\begin{table}
\caption{%s}
\begin{tabular}{%s}
\toprule
%s\midrule
%s\bottomrule
\end{tabular}
\end{table}
"""


@dataclass(frozen=True)
class Grid:
    """A table: what it is of, its headings, its rows; the first column names a row."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_csv(self, separator: str = ",") -> str:
        """Return the table for programs, or for a spreadsheet to paste."""
        return csv_text([self.headings, *self.rows], separator=separator)

    def as_latex(self) -> str:
        """Return the table for a paper; it needs the package booktabs."""
        columns = "l" + "r" * (len(self.headings) - 1)
        head, *lines = (
            " & ".join(cell.translate(_LATEX) for cell in row) + " \\\\\n"
            for row in (self.headings, *self.rows)
        )
        caption = self.caption.translate(_LATEX)
        return _LATEX_TABLE % (caption, columns, head, "".join(lines))
