"""CSV as people have it: every way to write a table is the same table, everywhere."""

import csv
import gzip
import io
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel import datasets
from fedbilevel.cli.app import app
from fedbilevel.datasets import Preparation, TableChoices
from fedbilevel.datasets.cells import is_number, parse_number
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Dense, Model
from fedbilevel.report import holdings_notes

ROWS = 60
HEADER = ["id", "Tag", "Größe", "Einkommen", "Ort", "krank"]
IGNORED = "id,Tag"


def rows_of(seed: int = 0) -> list[list[Any]]:
    """Return rows whose sizes and incomes need every mark that numbers can have."""
    draw = np.random.default_rng(seed)
    places = ["Köln", "Mün\nchen", 'Bad "Aibling"']
    return [
        [
            f"p{number}",
            f"{number % 28 + 1:02d}.03.2021",
            round(draw.normal(170, 10), 1),
            round(draw.uniform(500, 2e6), 2),
            places[draw.integers(3)],
            ["ja", "nein"][draw.integers(2)],
        ]
        for number in range(ROWS)
    ]


def german(number: float, apart: str = ".") -> str:
    return f"{number:,}".translate({ord(","): apart, ord("."): ","})


WAYS = {
    "excel in germany": (";", "cp1252", "\r\n", german),
    "excel as unicode text": ("\t", "utf-16", "\r\n", german),
    "excel in america": (",", "utf-8-sig", "\r\n", lambda one: f"{one:,}"),
    "python": (",", "utf-8", "\n", str),
    "tabs": ("\t", "utf-8", "\n", str),
    "old unix": ("|", "latin-1", "\n", lambda one: german(one, " ")),
    "swiss": (";", "utf-8", "\n", lambda one: f"{one:,}".replace(",", "'")),
    "without a mark": (",", "utf-16-le", "\n", str),
}


def write(path: Path, way: str, rows: list[list[Any]], more: str = "") -> str:
    separator, encoding, end, number = WAYS[way]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator, lineterminator=end)
    cells = [[number(v) if isinstance(v, float) else v for v in row] for row in rows]
    writer.writerows([HEADER, *cells])
    content = (more + text.getvalue()).encode(encoding)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def load(path: str, **chosen: str) -> datasets.Dataset:
    choices = TableChoices(**{"label": "krank", "ignore": IGNORED, **chosen})
    return datasets.load(path, choices=choices)


def fails(message: str):
    return pytest.raises(InvalidInputError, match=message)


def invoke(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_table_is_the_same_table(tmp_path, way):
    rows, name = rows_of(), "t.tsv" if way == "tabs" else "t.csv.gz"
    found = load(write(tmp_path / name, way, rows))
    expected = np.asarray([row[2:4] for row in rows])
    np.testing.assert_array_equal(found.features[:, :2], expected)
    assert found.preparation is not None
    texts = ('Bad "Aibling"', "Köln", "Mün\nchen")
    assert found.preparation.feature_names[:2] == ("Größe", "Einkommen")
    assert found.notes["encoded"] == {"Ort": list(texts)}
    places = [texts.index(row[4]) for row in rows]
    np.testing.assert_array_equal(found.features[:, 2:], np.eye(3)[places])
    # A row is where it begins, though a place has two lines.
    lines = 2 + np.cumsum([0, *(1 + (row[4] == texts[2]) for row in rows)])[:-1]
    np.testing.assert_array_equal(found.places, lines)


def test_what_was_understood_is_said_and_can_be_overruled(tmp_path):
    path = write(tmp_path / "t.csv", "excel in germany", rows_of())
    found = load(path)
    told = "semicolon between cells, decimal comma, encoding cp1252"
    assert found.notes["read_as"] == told
    given = {"separator": "semicolon", "decimal": "comma", "encoding": "cp1252"}
    np.testing.assert_array_equal(load(path, **given).features, found.features)
    # Overruled it is read as it is not, and so refused.
    with fails("line 2: 3 values; .* more such, but the header names 1 columns"):
        load(path, separator="comma")
    with fails("column 'Einkommen' has another text in every row"):
        load(path, decimal="point")
    with fails("cannot be read as CSV: 'utf-8' codec"):
        load(path, encoding="utf-8")
    for wrong in ({"separator": "x"}, {"decimal": "-"}, {"encoding": "utf-9"}):
        with fails(f"unknown .*'{next(iter(wrong.values()))}'"):
            load(path, **wrong)
    done = invoke("prepare", path, "--label", "krank", "--ignore", IGNORED, "--sums",
                  tmp_path / "s.json")  # fmt: skip
    assert done.exit_code == 0 and f"t.csv: {told}." in " ".join(done.stderr.split())


def test_excel_names_its_separator_and_nameless_columns_have_a_name(tmp_path):
    path = write(tmp_path / "t.csv", "swiss", rows_of(), more="sep=;\n;")
    text = path and Path(path).read_text().replace("\np", "\n7;p")
    Path(path).write_text(text)
    found = load(path, ignore=f"{IGNORED},column 1")
    assert found.places is not None and found.places[0] == 3
    assert found.notes["left_out"]["column 1"] == "ignored"


@pytest.mark.parametrize(
    ("text", "point", "comma"),
    [
        ("47,3", None, 47.3),
        ("47.3", 47.3, None),
        ("1.234", 1.234, 1234),
        ("1,234", 1234, 1.234),
        ("0,123", None, 0.123),
        ("-1.234.567,5", None, -1234567.5),
        ("1,234,567", 1234567, None),
        ("1'234.5", 1234.5, None),
        ("1\u00a0234,5e-1", None, 123.45),
        ("1,23,4", None, None),
        ("12.03.2021", None, None),
        ("1.2345,5", None, None),
        ("1234", 1234, 1234),
        ("1e3", 1000, 1000),
    ],
)
def test_a_number_depends_on_its_mark(text, point, comma):
    for mark, expected in ((".", point), (",", comma)):
        assert is_number(text, mark) == (expected is not None)
        if expected is not None:
            assert parse_number(text, mark) == pytest.approx(expected)


def test_numbers_that_could_be_two_are_asked_for(tmp_path):
    rows = [[f"p{n}", "", f"{n % 7 + 1}.{100 + n}", n % 5, "Köln", "janein"[n % 2::2]]
            for n in range(ROWS)]  # fmt: skip
    path = write(tmp_path / "t.csv", "excel in germany", rows)
    with fails("'1.100', which is 1.1 with a decimal point and 1100 with a decimal"):
        load(path)
    assert load(path, decimal="comma").features[0, 0] == 1100
    assert load(path, decimal="point").features[0, 0] == 1.1
    # Separated by commas, decimal marks are points, as programs write them.
    assert load(write(tmp_path / "u.csv", "python", rows)).features[0, 0] == 1.1
    mixed = [[*row[:3], "2,5", *row[4:]] for row in rows]
    mixed[0][2] = "47.3"
    path = write(tmp_path / "v.csv", "excel in germany", mixed)
    with fails("'Einkommen' has a decimal comma, and column 'Größe' a decimal point"):
        load(path)
    # A column that nobody learns from has no say.
    assert load(path, ignore=f"{IGNORED},Einkommen").features[0, 0] == 47.3


def test_sites_that_write_differently_prepare_and_predict_alike(tmp_path):
    """Sums of three ways to write are those of one, and predictions are the same."""
    words = ("--label", "krank", "--ignore", IGNORED)
    sums = []
    for seed, way in enumerate(("excel in germany", "excel in america", "old unix")):
        path = write(tmp_path / f"{seed}.csv", way, rows_of(seed))
        sums.append(tmp_path / f"{seed}.json")
        done = invoke("prepare", path, *words, "--sums", sums[-1])
        assert done.exit_code == 0, done.output
    out = tmp_path / "preparation.json"
    assert invoke("prepare", *sums, "--out", out).exit_code == 0
    made = Preparation.from_json(out.read_text())
    pooled = [row for seed in range(3) for row in rows_of(seed)]
    whole = load(write(tmp_path / "all.csv", "python", pooled)).preparation
    assert whole is not None
    np.testing.assert_allclose(made.scales, whole.scales, rtol=1e-12)
    assert made.feature_names == whole.feature_names
    weight = np.random.default_rng(0).normal(size=(2, len(made.feature_names)))
    model = Model((Dense(weight, np.zeros(2), False),), made.label.classes, made)
    (tmp_path / "run").mkdir()
    model.save(tmp_path / "run")
    found = []
    for way in WAYS:
        path = write(tmp_path / "new.csv", way, rows_of(9)[:1])
        kept = tmp_path / f"{way}.csv"
        done = invoke("predict", tmp_path / "run", path, "--out", kept, "--keep", "id")
        assert done.exit_code == 0, done.output
        assert "Read as: " in done.output
        found.append(list(csv.reader(io.StringIO(kept.read_text())))[1][1:])
    assert len({tuple(one) for one in found}) == 1 and found[0][0] == "p0"


def test_all_that_is_wrong_is_said_at_once_and_as_a_shell_takes_it(tmp_path):
    rows = rows_of()
    rows[3][2], rows[5][3], rows[7][3], rows[9][5] = "groß", "", "", ""
    header = ["patient id", "Tag, Monat", *HEADER[2:]]
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    with fails("column 'patient id' has another text in every row") as caught:
        datasets.load(str(path))
    told = str(caught.value)
    for part in (
        "column 'Tag, Monat' holds dates, such as '01.03.2021' (day first)",
        "column 'Größe': 'groß' is not a finite number",
        "column 'Einkommen': the number is missing (and in 1 more)",
        "column 'krank': the label is missing",
        "--missing mean",
    ):
        assert part in told
    words = shlex.split(told.partition("with --ignore ")[2])[0].rstrip(",")
    rest = ["Größe"]
    assert TableChoices(ignore=words).ignored == (*header[:2], *rest)
    found = datasets.load(str(path), choices=TableChoices(ignore=words, missing="drop"))
    assert found.notes["dropped_rows"] == 3
    assert found.notes["learned"] == ["Einkommen", "Ort"]
    with path.open("a") as file:
        file.write("a,b\nc\n")
    with fails(r"2 values; line \d+: 1 values, but the header names 6 columns"):
        datasets.load(str(path))


@pytest.mark.parametrize(
    ("dates", "order"),
    [
        (["03/14/2021", "1/2/2021"], "month first"),
        (["14/03/2021", "1/2/2021"], "day first"),
        (["3/4/2021 10:30", "1/2/2021"], "day or month first"),
        (["3.4.2021", "1.2.21"], "day first"),
        (["2021/03/14", "2021-1-2"], "year first"),
    ],
)
def test_dates_are_known_and_said_how_they_were_understood(tmp_path, dates, order):
    rows = [[*row[:1], dates[n % 2], *row[2:]] for n, row in enumerate(rows_of())]
    with fails(rf"column 'Tag' holds dates, such as '{dates[0]}' \({order}\)"):
        load(write(tmp_path / "t.csv", "python", rows), ignore="id")


def test_whole_numbers_of_many_values_are_classes_or_a_number_as_is_said(tmp_path):
    rows = [[*row[:5], 100 + 7 * (n % 31)] for n, row in enumerate(rows_of())]
    path = write(tmp_path / "t.csv", "python", rows)
    with fails("'krank' has 31 different whole numbers, from 100 to 310. Say --label-"):
        load(path)
    assert len(load(path, label_kind="classes").classes) == 31
    assert load(path, label_kind="number").classes == ()
    few = [[*row[:5], n % 30] for n, row in enumerate(rows)]
    assert len(load(write(tmp_path / "t.csv", "python", few)).classes) == 30


def test_constant_columns_are_left_out_and_a_missing_text_is_a_value(tmp_path):
    rows = [[*row[:3], 5, row[4] if n % 3 else "", row[5]]
            for n, row in enumerate(rows_of())]  # fmt: skip
    found = load(write(tmp_path / "t.csv", "python", rows))
    assert found.notes["left_out"]["Einkommen"] == "the same in every row"
    assert found.notes["encoded"]["Ort"][0] == "(missing)"
    np.testing.assert_array_equal(found.features[:, 1], np.arange(ROWS) % 3 == 0)
    assert json.dumps(dict(found.notes))
    out = tmp_path / "p.json"
    done = invoke("prepare", tmp_path / "t.csv", "--label", "krank", "--ignore",
                  IGNORED, "--out", out)  # fmt: skip
    assert "Left out, the same in every row: Einkommen" in " ".join(done.stderr.split())


def test_whole_numbers_that_name_rows_are_said(tmp_path):
    """They may be a measurement, too: it is learned from, and the option is named."""
    path = tmp_path / "t.csv"
    assert "like_ids" not in load(write(path, "python", rows_of())).notes
    rows = [[*row[:3], 7919 * n % 10_007, *row[4:]] for n, row in enumerate(rows_of())]
    found = load(write(path, "python", rows))
    assert found.notes["like_ids"] == {"Einkommen": "--ignore Einkommen"}
    about = {"rows": 1, "tested": 1, "source": "t.csv", "own": True, "remarks": []}
    notes = holdings_notes({**about, **found.notes, "filled": {"a": 2, "b": 3}})
    assert "Filled in, missing values: 2 of 'a', 3 of 'b'." in notes
    (said,) = [one for one in notes if "whole number" in one]
    assert said.startswith("Another whole number in every row: 'Einkommen'.")
    assert said.endswith("leave it out with --ignore Einkommen.")
    rows[5][3] = rows[6][3]
    assert "like_ids" not in load(write(path, "python", rows)).notes


def test_columns_to_leave_out_may_be_given_one_by_one(tmp_path):
    """The last of them was the only one, without a word."""
    table = tmp_path / "people.csv"
    lines = ["age,number,city,ill"] + [
        f"{k * 7 % 30},{k},x{k % 2},{k % 2}" for k in range(40)
    ]
    table.write_text("\n".join(lines))
    words = ("prepare", table, "--ignore", "number", "--ignore", "city", "--sums")
    done = CliRunner().invoke(
        app, [str(word) for word in (*words, tmp_path / "s.json")]
    )
    assert done.exit_code == 0, done.output
    held = json.loads((tmp_path / "s.json").read_text())["columns"]
    assert [one["name"] for one in held] == ["age"]
