"""Files that `prepare` and `export` write, and what is said of them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.datasets import Preparation
from fedbilevel.datasets.preparation import NumericColumn
from fedbilevel.models.export import FORMATS


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", ["npz", "safetensors", "onnx"])
def test_a_model_is_exported_in_the_format_and_to_the_file_that_is_asked(
    kind, monkeypatch
):
    got = []
    monkeypatch.setattr("fedbilevel.models.Model.load", lambda folder: ("of", folder))
    monkeypatch.setitem(FORMATS, kind, lambda *given: got.append(given))
    for words in ([], ["--out", "mine.file"]):
        done = CliRunner().invoke(app, ["export", "run", "--to", kind, *words])
        assert done.exit_code == 0, done.output
    model = ("of", Path("run"))
    assert got == [(model, Path(f"model.{kind}")), (model, Path("mine.file"))]


def test_what_an_export_would_write_over_is_refused(tmp_path):
    """Beside weights of safetensors there is a file that says what they are."""
    for there, kind in (("model.npz", "npz"), ("model.json", "safetensors")):
        (tmp_path / there).touch()
        done = CliRunner().invoke(app, ["export", "run", "--to", kind])
        assert done.exit_code == 2 and there in done.output


def test_a_preparation_says_what_it_is_made_of(tmp_path):
    lines = [f"{n},{n % 2},7,{n % 3}" for n in range(12)]
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("\n".join(["age,bit,same,sick", *lines]) + "\n")
    words = "prepare a.csv b.csv --label sick --label-kind classes"
    done = CliRunner().invoke(app, [*words.split(), "--out", "p.json"])
    assert done.exit_code == 0, done.output
    read = "comma between cells, decimal point, encoding utf-8."
    assert done.stderr.splitlines() == [
        f"a.csv: {read}",
        f"b.csv: {read}",
        "2 features of 24 rows: p.json",
        "Left out, the same in every row: same.",
        "In a federation client 0 has 12, client 1 has 12.",
    ]
    made = Preparation.from_json((tmp_path / "p.json").read_text())
    assert made.sites == (12, 12)


def test_a_table_with_gaps_is_prepared_with_means_only_where_that_is_asked(tmp_path):
    rows = [f"{'' if n == 3 else n},{n % 2}" for n in range(12)]
    (tmp_path / "a.csv").write_text("\n".join(["age,sick", *rows]) + "\n")
    words = (
        "prepare a.csv --label sick --label-kind classes --missing mean --out".split()
    )
    done = CliRunner().invoke(app, [*words, "p.json"])
    assert done.exit_code == 0, done.output
    (age,) = Preparation.from_json((tmp_path / "p.json").read_text()).columns
    # The mean of 0 to 11 without 3 is 63 / 11.
    assert isinstance(age, NumericColumn) and age.fill == pytest.approx(63 / 11)
    words[words.index("mean")] = "drop"
    CliRunner().invoke(app, [*words, "q.json"])
    (age,) = Preparation.from_json((tmp_path / "q.json").read_text()).columns
    assert isinstance(age, NumericColumn) and age.fill is None
