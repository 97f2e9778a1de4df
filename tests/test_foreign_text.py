"""Names that files chose: as text in a terminal and in a spreadsheet, nothing more."""

import csv
import io

import numpy as np
import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from fedbilevel._files import read_arrays, write_arrays
from fedbilevel._text import csv_text, for_terminal, without_apostrophe
from fedbilevel.cli.app import app
from fedbilevel.cli.output import Console
from fedbilevel.errors import CheckpointError
from fedbilevel.experiments.built import _write_listed
from fedbilevel.report.page.sections import Grid
from fedbilevel.result import Result
from fedbilevel.tasks._base import Listed
from tests.reports import made_up, save_run

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e"
FORMULAS = (
    *("=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "=cmd|' /C calc'!A0"),
    *("-", "+", "=", "-a", "\uff1d1+1", "\n=1", "'=1", "''@a", "-1e", "+1,=2"),
)
HARMLESS = (
    *("", "a=b", "a", "'", "'s Hertogenbosch", " =1", "0.5", "-1", "+1", "-1e-5"),
    *("-.5", "+2.", "-1,234.5", "-0.3 \u00b1 0.1", "-12 %", "\u00e9"),
)


@pytest.mark.parametrize("cell", [*FORMULAS, *HARMLESS])
def test_no_cell_is_a_formula_and_all_are_found_again(cell):
    text = csv_text([["name", cell], [cell, -1.5], [-3, cell]])
    rows = list(csv.reader(io.StringIO(text, newline="")))
    written = rows[0][1]
    assert written.startswith("'") if cell in FORMULAS else written == cell
    assert rows == [["name", written], [written, "-1.5"], ["-3", written]]
    assert without_apostrophe(written) == cell


INSIDE = {
    "x;=HYPERLINK(1)": "x;'=HYPERLINK(1)",
    "a\t=1": "a\t'=1",
    "a\n\t+1;'-2;3": "a\n'\t'+1;''-2;3",
    "=1;@2": "'=1;'@2",
    "5;6": "5;6",
}


@pytest.mark.parametrize("cell", INSIDE)
def test_no_part_of_a_cell_is_a_formula_where_a_spreadsheet_splits_it(cell):
    (row,) = csv.reader(io.StringIO(csv_text([[cell]]), newline=""))
    assert row == [INSIDE[cell]] and without_apostrophe(row[0]) == cell


def test_lists_and_pages_are_written_so(tmp_path):
    row = ("=a.csv", 3, "@site", -0.25, "-1")
    _write_listed(tmp_path / "suspicious.csv", Listed(("file", "=h"), [row], None))
    lines = (tmp_path / "suspicious.csv").read_bytes().decode().split("\r\n")
    assert lines == ["file,'=h", "'=a.csv,3,'@site,-0.25,-1", ""]
    assert Grid("c", ("=h",), [("-0.3",)]).as_csv("\t") == "'=h\n-0.3\n"


def printed(what, **options) -> str:
    written = io.StringIO()
    Console(file=written, width=200, force_terminal=True).print(what, **options)
    return written.getvalue()


def _table(name: str) -> Table:
    table = Table(name, title=name, caption=name)
    table.add_row(name)
    table.add_row(Text(name, style="bold"))
    return table


@pytest.mark.parametrize("form", [str, Text, _table], ids=["text", "styled", "table"])
def test_no_control_character_of_a_name_is_printed(form):
    """Those of Rich itself, which are styles, stay."""
    shown = printed(form(ESCAPE), highlight=False)
    assert "\\x1b]0;owned" in shown and "\\x9b31m" in shown and "\\u202e" in shown
    for code in ("\x1b]", "\x1b[2J", "\x9b", "\x07", "\x08", "\u202e"):
        assert code not in shown
    assert "\x1b[" in printed("styled", style="red")
    assert for_terminal("two\nlines\u00a0here") == "two\nlines\u00a0here"


def test_commands_print_names_of_files_without_control_characters(tmp_path):
    path = tmp_path / "rows.csv"
    name = ESCAPE[:13]
    lines = [f"{k / 7 % 1:.3f},{k % 2}{name}\n" for k in range(40)]
    path.write_text(f"a,label{name}\n{''.join(lines)}")
    words = ["label-counts", "regularization", "--clients", "2", "--data", str(path)]
    for more in (["--label", f"label{name}"], ["--label", "none"]):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exception is None or done.exit_code == 2, done.output
        assert "\x1b" not in done.output and "\\x1b" in done.output


def test_an_archive_that_grows_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "arrays.npz"
    np.savez_compressed(path, one=np.zeros(100_000))
    monkeypatch.setattr(np.lib.format, "read_array", None)
    with pytest.raises(ValueError, match="unpack to 800,"):
        read_arrays(path)
    monkeypatch.undo()
    write_arrays(path, {"one": np.zeros(100_000), "none": np.zeros(0)})
    assert read_arrays(path)["one"].shape == (100_000,)


@pytest.mark.parametrize("name", ["columns.npz", "point.npz", "last_point.npz"])
def test_results_that_grow_are_refused_in_a_sentence(tmp_path, name):
    folder = save_run(tmp_path / "run", made_up("one"))
    np.savez_compressed(folder / name, one=np.zeros(100_000))
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: it would unpack"):
        Result.load(folder)
