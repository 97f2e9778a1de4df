"""Tables of the methods: what each is, into docs/methods.md, and how each did."""

from pathlib import Path

from fedbilevel import algorithms
from fedbilevel.experiments.recommendation import Row, shipped
from fedbilevel.experiments.traits import QUESTIONS, known_how, question_of

PAGE = Path(__file__).parent / "methods.md"
START, END = "<!-- methods -->\n", "<!-- end of methods -->\n"
# The settings of `benchmarks/field.py`, in its order.
SETTINGS = {
    "quadratic": "8 clients that are alike, 400 rounds, p = 5",
    "two-client": "two clients that differ, 400 rounds, p = 5",
    "regularization": "digits, 8 clients, 200 rounds, p = 10",
    "representation": "digits, 8 clients, 100 rounds, p = 5",
    "representation-shards": "two classes a client, 5 of 20 a round, 150 rounds, p = 5",
}
MEASURED = (
    "result | after a tenth | exchanges | MB | samples | seconds | trials diverged"
)


def table() -> str:
    """Return tables as Markdown, one for each question, a row for every algorithm."""
    parts = []
    for question, meaning in QUESTIONS.items():
        parts.append(
            f"## {question}\n\nThese find {meaning}.\n\n"
            "| method | what it is | how known |\n|---|---|---|\n"
        )
        for one in map(algorithms.find, algorithms.names()):
            if question_of(one) == question:
                # The heading says that x is given.
                summary = one.summary.rstrip(".").replace(" at the given x", "")
                parts.append(f"| `{one.name}` | {summary} | {known_how(one)} |\n")
        parts.append("\n")
    return "".join(parts)


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
    return f"{before}{START}{table()}{counted()}{END}{after}"


def measured_page() -> str:
    """Return what every method came to in every setting, best first."""
    parts = [
        "# The field\n\nFor readers who compare methods. Each is tuned over nine "
        "points of its own steps and weights, with two seeds a point, on held-out "
        "rows. The result is the mean and deviation of three other seeds; lower is "
        "better. "
        "Methods without exchanges have all rows on one machine. Seconds are of one "
        "seed, three in a program, on an H200 or a processor that 15 programs share. "
        "[Which algorithm?](which-algorithm.md) reads these tables.\n\n"
        "    python benchmarks/field.py FOLDER\n"
    ]
    for setting, sizes in SETTINGS.items():
        rows = [row for row in shipped() if row["setting"] == setting]
        rows.sort(key=lambda row: (row.get("mean", float("inf")), row["method"]))
        metric = next(row["metric"] for row in rows if "metric" in row)
        parts.append(f"\n## {setting}\n\n`{metric}`; {sizes}.\n\n")
        parts.append(_measured("method", [(_linked(row), row) for row in rows]))
    return "".join(parts)


def measured_of(name: str) -> str:
    """Return what one method came to in each setting, or nothing."""
    rows = {row["setting"]: row for row in shipped() if row["method"] == name}
    if not rows:
        return ""
    named = [
        (f"`{one}`: {SETTINGS[one]}", rows[one]) for one in SETTINGS if one in rows
    ]
    return (
        "## Measured\n\nTuned, three seeds, lower is better; "
        f"[all methods](../field.md).\n\n{_measured('setting', named)}\n"
    )


def _linked(row: Row) -> str:
    return f"[{row['method']}](algorithms/{row['method']}.md)"


def _measured(first: str, rows: list[tuple[str, Row]]) -> str:
    lines = [f"| {first} | {MEASURED} |", "|---" * 8 + "|"]
    lines += [f"| {name} | {_cells(row)} |" for name, row in rows]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> str:
    if "mean" not in row:
        return " | ".join((row["failed"].partition(";")[0], *("",) * 6))
    seconds = f"{row['seconds']:.2g}" if "seconds" in row else ""
    note = f" ({row['note']}: not comparable)" if "note" in row else ""
    return (
        f"{row['mean']:.3g} +- {row['spread']:.1g}{note} | {row['early']:.3g} | "
        f"{row['exchanges']:,} | {row['megabytes']:.3g} | {row['samples']:,} | "
        f"{seconds} | {row['diverged']:.0%}"
    )


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
