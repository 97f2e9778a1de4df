"""Published figures have commands, and one that moved is seen."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks import results, sources
from benchmarks.results import PAGE, Figure, measured, published
from benchmarks.sources import NotMeasuredError

from tests.test_doc_blocks import check_names, given

SHORT = """# Page

## A section

Words | with a line.

    fedbilevel run TASK --seed SEED  # SEED=0..1
    python other.py

| TASK | metric | figure |
|---|---|---|
| quadratic | `upper_loss` | 1.25 +- 0.1 |

    fedbilevel compare quadratic --algorithms fedavg,fedbio  # plain
    fedbilevel compare quadratic --algorithms fednest  # nested

| command | method | words | `test_error` |
|---|---|---|---|
| plain | `fedbio` | 7 | 2e-4 |
| nested | `fednest` | | not finite |
"""


def test_figures_are_found_with_their_commands():
    runs = tuple(f"fedbilevel run quadratic --seed {seed}" for seed in (0, 1))
    compared = ("fedbilevel compare quadratic --algorithms fedavg,fedbio",)
    found = [(one.commands, one.heading, one.text) for one in published(SHORT)]
    assert found == [
        (runs, "figure", "1.25 +- 0.1"),
        (compared, "words", "7"),
        (compared, "`test_error`", "2e-4"),
    ]


RUN, TABLES = "fedbilevel run quadratic", "python -m benchmarks.tables --out a.jsonl"


@pytest.mark.parametrize(
    ("command", "text", "bounds"),
    [
        (RUN, "1.25 +- 0.1", [(1.05, 1.45)]),
        (RUN, "0.0767", [(0.0766, 0.0768)]),
        (RUN, "2e-4", [(1e-4, 3e-4)]),
        (RUN, "78.3 (77.4)", [(78.2, 78.4), (77.3, 77.5)]),
        (TABLES, "1.25 +- 0.1", [(1.15, 1.35)]),  # of 95 %
        (f"time {RUN}", "20", [(14, 26)]),
    ],
)
def test_a_figure_may_differ_by_deviations_or_its_last_digit(command, text, bounds):
    found = Figure("", (command,), "", text, {}).bounds
    assert found == [pytest.approx(one) for one in bounds]


def listed(page: str, folder: Path, monkeypatch, capsys) -> list[str]:
    """Return what the comparison with a page prints, in a folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(results, "PAGE", folder / "page.md")
    results.PAGE.write_text(page)
    monkeypatch.setattr("sys.argv", ["results", "--out", str(folder / "out")])
    results.main()
    return capsys.readouterr().out.splitlines()


def leaving(place: Path, found: dict[str, Any], counts: dict[str, int] | None = None):
    place.mkdir(parents=True)
    kept = {"final": found, "counts": counts or {}}
    (place / "result.json").write_text(json.dumps(kept))


def test_what_moved_is_listed(tmp_path, monkeypatch, capsys):
    typed = []

    def type_command(command, folder):
        typed.append(command)
        place = folder / "fedbio" / "seed-0" if "compare" in command else folder
        leaving(place, {"upper_loss": 1.3, "test_error": 0.5})
        return "", "", ""

    monkeypatch.setattr(sources, "type_command", type_command)
    told = listed(SHORT, tmp_path, monkeypatch, capsys)
    # What is there is not run again.
    assert told == listed(SHORT, tmp_path, monkeypatch, capsys)
    compared = "compare quadratic --algorithms fedavg,fedbio"
    assert typed == ["run quadratic --seed 0", "run quadratic --seed 1", compared]
    assert told == [
        f"moved: plain `fedbio` `test_error` 2e-4 is 0.5: fedbilevel {compared}",
        f"not run: fedbilevel {compared}: no command has it",
        "1 of 2 measured figures moved.",
    ]


SPLITS = [("iid", 1.2), ("size", 1.3), ("dirichlet", 1.6)] * 2
LINES: dict[str, list[dict[str, Any]]] = {
    "python -m benchmarks.tables": [
        {"table": "wine", "deal": deal, "pooled": 2.0, "ours": ours}
        | {"one strength": 2.5, "largest site": 10 * ours}
        for deal, ours in SPLITS
    ],
    "python benchmarks/adaptive.py": [
        {"row": "fedbio-controls | plain | 0.03", "accuracy": [1.0]},
        {"row": "fedbio | plain | 0.03", "accuracy": [70.0, 80.0]},
        {"row": "fedbio | server adam | 0.003", "accuracy": [60.0, 70.0, 80.0]},
    ],
    "python benchmarks/architecture.py": [
        {"split": 0, "trained again": 98.61, "rank among 16": 1},
        {"split": 1, "trained again": 96.1, "rank among 16": 5},
    ],
}
TABLE = """
| table | pooled | iid | Dirichlet | largest site alone | one strength |
|---|---|---|---|---|---|
| wine | 2.0 | 0.60 +- 0.01 | 0.80 | 6.0, 6.5, 8.0 | 1.25 |
"""
ADAPTIVE = """
| method | plain | server adam | local adam |
|---|---|---|---|
| `fedbio` | 75.0 (70.0) | 70.0 (60.0) | not possible |
"""
ARCHITECTURE = """
| split | chosen | trained again | rank among 16 |
|---|---|---|---|
| 1 | identity, convolution_5 | 96.10 | 5 |
"""


@pytest.mark.parametrize(
    ("start", "table", "altered"),
    [
        (
            "python -m benchmarks.tables",
            TABLE,
            ["2.0 |", "0.60", "0.80", "6.5", "1.25"],
        ),
        ("python benchmarks/adaptive.py", ADAPTIVE, ["75.0", "(70.0)", "| 70.0"]),
        ("python benchmarks/architecture.py", ARCHITECTURE, ["6.10", "5 |"]),
    ],
)
def test_a_table_is_compared_with_the_file_of_its_command(
    start, table, altered, tmp_path, monkeypatch, capsys
):
    command = f"{start} found.jsonl --seeds 8"
    page = f"# Page\n\n## A section\n\n    {command}\n{table}"
    many = len(list(published(page)))

    def told(text: str) -> list[str]:
        return listed(text, tmp_path, monkeypatch, capsys)

    if "architecture" not in start:  # which is run instead
        assert told(page) == [f"not run: {command}", "0 of 0 measured figures moved."]
    lines = map(json.dumps, LINES[start])
    (tmp_path / "found.jsonl").write_text("\n".join(lines))
    assert told(page) == [f"0 of {many} measured figures moved."]
    for one in altered:
        other = page.replace(one, re.sub(r"\d", "9", one, count=1))
        assert other != page
        moved, last = told(other)
        assert moved.startswith("moved: ") and last.startswith("1 of ")


def test_a_file_that_is_missing_is_written_by_a_command_of_minutes(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    program = tmp_path / "benchmarks" / "architecture.py"
    written = """import sys; open(sys.argv[1], "a").write('{"split": 1, "best": 7}')"""
    program.write_text(written)
    command, row = "python benchmarks/architecture.py a.jsonl", {"split": "1"}
    figure = Figure("", (command,), "best", "7", row)
    # The second time the file is there.
    assert [measured(figure, tmp_path) for _ in range(2)] == [[7.0], [7.0]]
    program.write_text("raise SystemExit('no such module')")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(NotMeasuredError, match="no such module"):
        measured(figure, tmp_path)


RUNS = """# Page

## A section

    fedbilevel run quadratic --seed SEED  # SEED=0..1

| METHOD | `test_accuracy` | worst seed | exchanges | million floats, both ways |
|---|---|---|---|---|
| `fedbio` | 0.75 | 0.70 | 21 | 5 |

    time fedbilevel run TASK

| TASK | seconds |
|---|---|
| quadratic | 20 |
"""


def test_counts_the_worst_seed_and_seconds_are_compared(tmp_path, monkeypatch, capsys):
    taken: list[Any] = []

    def type_command(command, folder):
        counts = {"exchanges": 21, "floats_down": 2_000_000, "floats_up": 3_000_000}
        leaving(folder, {"test_accuracy": 0.7 if "0" in command else 0.8}, counts)
        return "", "", ""

    def timed(words, cache):
        taken.append((words, list(Path(cache).iterdir())))
        return 25.0, 50.0

    monkeypatch.setattr(sources, "type_command", type_command)
    monkeypatch.setattr(sources, "timed", timed)

    def told(page: str) -> list[str]:
        return listed(page, tmp_path, monkeypatch, capsys)

    assert told(RUNS) == ["0 of 5 measured figures moved."]
    for one in ("0.75 |", "0.70 |", "21 |", "5 |\n", "20 |"):
        assert one in RUNS
        moved, last = told(RUNS.replace(one, f"9{one}"))
        assert moved.startswith("moved: ") and last.startswith("1 of ")
    # Timed once, without compiled programs.
    assert taken == [(["run", "quadratic"], [])]


def test_every_table_of_the_page_is_compared():
    text = PAGE.read_text()
    figures = list(published(text))
    assert len(figures) > 190
    for one in figures:
        assert one.commands and one.reader, f"{one.section}: {one.heading} {one.text}"
    ends = [one.end() for one in re.finditer(r"^\|---.*\n(?:\|.*\n)+", text, re.M)]
    counts = [0, *(len(list(published(text[:end]))) for end in ends)]
    assert counts[-1] == len(figures)
    assert all(less < more for less, more in zip(counts, counts[1:], strict=False))


def test_a_table_without_a_command_or_a_known_heading_is_noticed():
    alone = "## A\n\n| table | loss |\n|---|---|\n| wine | 0.6 |\n"
    (other,) = published(f"# Page\n\n{alone}")
    assert not other.commands and other.reader is None
    unknown, *_ = (one for one in published(SHORT) if one.heading == "words")
    assert unknown.commands and unknown.reader is None


def test_every_figure_of_the_page_has_a_command_that_can_be_typed(
    tmp_path, monkeypatch
):
    figures = list(published(PAGE.read_text()))
    for one in figures:
        for command in one.commands:
            if "fedbilevel " not in command:
                # A program of ours, and the file that is read.
                words = command.replace("-m benchmarks.", "benchmarks/").split()
                program = Path(words[1]).with_suffix(".py")
                assert (PAGE.parent.parent / program).exists(), command
                assert sum(word.endswith(".jsonl") for word in words) == 1
                continue
            _, values = given(command.partition("fedbilevel ")[2])
            check_names(values, command)
            method = one.row.get("method", "").strip("`")
            assert not method or method in re.split("[ ,]", command)
    # The one that had moved unseen: .100 was published, .0767 measured.
    shown = ("fedbilevel run few-shot --set instance=0",)
    few = next(one for one in figures if one.commands == shown)
    assert few.holds([0.07667]) and not few.holds([0.1])
    own = next(one for one in figures if "FOLDER" in one.commands[0].split())
    with pytest.raises(NotMeasuredError, match="put your FOLDER"):
        measured(own, tmp_path)
    typed = []

    def type_command(command, folder):
        typed.append(command)
        return "", "stopped", ""

    monkeypatch.setattr(sources, "type_command", type_command)
    monkeypatch.setenv("FOLDER", "images")
    with pytest.raises(NotMeasuredError, match="stopped"):
        measured(own, tmp_path)
    assert "--data images " in typed[0]
