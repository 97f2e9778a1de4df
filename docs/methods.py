"""Writes the table of methods into README.md, from the algorithms themselves."""

from pathlib import Path

from fedbilevel import algorithms
from fedbilevel.experiments.traits import known_how

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


def counted() -> str:
    """Return how many of the methods are known how well, as a sentence."""
    known = [known_how(algorithms.find(name)) for name in algorithms.names()]
    read, guessed = known.count("read"), known.count("reconstructed")
    return (
        f"Of these {len(known)} methods, {read} were read as a listing in their paper, "
        f"{guessed} are\nreconstructed from an abstract and unverified, and "
        f"{len(known) - read - guessed} are known in part, or from memory.\n"
    )


def with_table(text: str) -> str:
    """Return a text with the table, and what it counts, between its marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{table()}\n{counted()}{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
