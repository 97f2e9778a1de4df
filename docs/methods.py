"""Writes the table of methods into README.md, from the algorithms themselves."""

from pathlib import Path

from fedbilevel import algorithms

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- methods -->\n", "<!-- end of methods -->\n"


def table() -> str:
    """Return the table as Markdown, a row for every algorithm."""
    lines = [
        "| method | what it is | answers | reference | how known |",
        "|---" * 5 + "|",
    ]
    for name in algorithms.names():
        one = algorithms.find(name)
        cells = (f"`{name}`", one.summary.rstrip("."), one.answers, one.reference)
        lines.append(f"| {' | '.join((*cells, one.provenance))} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Return a text with the table between its marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{table()}{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
