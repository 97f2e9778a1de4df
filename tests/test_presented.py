"""A comparison as a frame, a LaTeX table, a figure and a page, from made-up results."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from fedbilevel.errors import CheckpointError, DivergedError, FedbilevelError
from fedbilevel.report.page import write_page
from fedbilevel.report.tables import cost_rows, ranking_table
from fedbilevel.saved import Saved
from fedbilevel.standings import ranking, tuning_said
from fedbilevel.studies import Comparison
from tests.reports import Read, made_up, save_comparison


@pytest.fixture
def compared():
    results = {
        name: [made_up(name, seed) for seed in (3, 4)] for name in ("fedbio", "simfbo")
    }
    return Comparison("upper_loss", results, {"broken": DivergedError("in round 2")})


def test_a_frame_has_a_row_for_algorithm_seed_and_round(compared):
    pytest.importorskip("pandas")
    frame = compared.to_pandas()
    assert len(frame) == 2 * 2 * 12
    one = frame[(frame.algorithm == "simfbo") & (frame.seed == 4)]
    expected = compared.results["simfbo"][1].columns["upper_loss"]
    np.testing.assert_array_equal(one.upper_loss, expected)


def test_a_latex_table_ranks_all(compared):
    lines = compared.to_latex().splitlines()
    rows = [line for line in lines if line.rstrip().endswith(r"\\")]
    means = {
        name: np.mean([one.columns["upper_loss"][-1] for one in many])
        for name, many in compared.results.items()
    }
    best, worst = sorted(means, key=lambda name: means[name])
    assert len(rows) == 3 and best in rows[1] and worst in rows[2]


def test_methods_at_equal_cost_are_ranked_at_what_all_of_them_took():
    """The dear one is ahead after the last round only."""
    dear = [made_up("dear", seed, 24, 1000) for seed in (3, 4)]
    cheap = [made_up("cheap", seed, 12, 100) for seed in (3, 4)]
    results = {"dear": dear, "cheap": cheap}
    usual = Comparison("upper_loss", results).to_latex()
    equal = Comparison("upper_loss", results, equal="bytes").to_latex()
    assert "after the last round" in usual and "after the last round" not in equal
    most = cheap[0].columns["bytes"][-1]
    assert f"at {most:,.0f} bytes" in equal
    shown = repr(Comparison("upper_loss", results, equal="bytes"))
    assert f"at {most:,.0f} bytes" in shown and shown.index("cheap") < shown.index(
        "dear"
    )
    first = repr(Comparison("upper_loss", results))
    assert first.index("dear") < first.index("cheap")


def test_tables_say_how_much_each_was_tuned(compared, tmp_path):
    spent = {"trials": 18, "cost": 1_234_567, "unit": "samples", "budget": 1_300_000}
    tuned = [
        replace(one, config={**one.config, "tuning": spent})
        for one in compared.results["fedbio"]
    ]
    made = Comparison("upper_loss", {**compared.results, "fedbio": tuned})
    says = "18 trials, 1,234,567 of 1,300,000 samples"
    lines = {line.split()[0]: line for line in repr(made).splitlines()[1:]}
    assert f"(tuned in {says})" in lines["fedbio"] and "tuned" not in lines["simfbo"]
    rows = [line for line in made.to_latex().splitlines() if " & " in line]
    assert "tuned in" in rows[0] and any(says in row for row in rows[1:])
    assert says in made._repr_html_()
    assert says in made.report(tmp_path / "page.html").read_text()
    free = {**spent, "budget": None, "cost": 4.567, "unit": "seconds"}
    assert tuning_said(free) == "18 trials, 4.57 seconds"
    assert not any(map(tuning_said, (None, "text", {"cost": "much"})))
    assert "tuned" not in repr(compared) and "tuned" not in compared.to_latex()


def test_samples_that_are_a_bound_are_said_to_be_one(compared, tmp_path):
    known = {"bounds": {"hessian_product": "at most"}}
    bound = {"bounds": {"lower_samples": "at most", "hessian_product": "at most"}}
    many = {
        name: [replace(one, counts={**one.counts, **more}) for one in results]
        for (name, results), more in zip(
            compared.results.items(), (known, bound), strict=True
        )
    }
    made, metric = Comparison("upper_loss", many), "upper_loss"
    aim = made.results["fedbio"][0].columns[metric][5]
    rows = {line.split(" & ")[0]: line for line in made.to_latex(aim).splitlines()}
    assert "at most" in rows["simfbo"] and "at most" not in rows["fedbio"]
    table = ranking_table(ranking(many, metric, aim), metric, aim)
    cells = dict(zip(table.columns[0].cells, table.columns[4].cells, strict=True))
    assert str(cells["simfbo"]).startswith("at most ")
    assert not str(cells["fedbio"]).startswith("at")
    labels = {panel.get_xlabel() for panel in made.plot().axes}
    assert "samples drawn, at most" in labels
    plain = {panel.get_xlabel() for panel in compared.plot().axes}
    assert "samples drawn" in plain
    page = made.report(tmp_path / "page.html").read_text()
    assert Read(page=page).data["curves"]["bound"] == "at most"
    assert "samples, in all, at most" in Read(page=page).text
    one = Read(page=write_page(Saved("one", {"simfbo": many["simfbo"][:1]}, metric)))
    assert "drew at most 120 samples" in one.text
    assert any("at most" in label for label, _ in cost_rows(many["simfbo"]))
    assert not any("at most" in label for label, _ in cost_rows(many["fedbio"]))


def test_a_folder_comes_back_as_it_was(tmp_path):
    folder = save_comparison(tmp_path, {"fedbio": 100, "simfbo": 200})
    found = Comparison.load(folder)
    assert (found.headline, found.equal) == ("upper_loss", "trials")
    assert {n: len(many) for n, many in found.results.items()} == {
        "fedbio": 3,
        "simfbo": 3,
    }
    written = json.loads((folder / "comparison.json").read_text())
    more = {"equal": "bytes", "diverged": {"broken": "in round 2"}}
    (folder / "comparison.json").write_text(json.dumps({**written, **more}))
    found = Comparison.load(folder)
    assert found.equal == "bytes" and str(found.diverged["broken"]) == "in round 2"
    assert "bytes" in found.to_latex()
    (folder / "comparison.json").unlink()
    with pytest.raises(CheckpointError, match="no finished comparison. Not all of its"):
        Comparison.load(folder)
    with pytest.raises(CheckpointError, match="It is one run, which `Result.load`"):
        Comparison.load(folder / "fedbio" / "seed-0")


def test_a_figure_has_a_curve_for_each(compared):
    panel = compared.plot(target=1.5).axes[0]
    assert {line.get_label() for line in panel.lines} >= {"fedbio", "simfbo"}
    assert any(np.allclose(line.get_ydata(), 1.5) for line in panel.lines)


def test_a_page_begins_before_the_first_round(compared, tmp_path):
    start = {"upper_loss": 40.0, "test_accuracy": 0.1}
    many = {
        name: [replace(one, start=start) for one in results]
        for name, results in compared.results.items()
    }
    page = Comparison("upper_loss", many).report(tmp_path / "page.html").read_text()
    for run in Read(page=page).data["curves"]["runs"]:
        columns = run["columns"]
        assert columns["round"][:2] == [0, 1] and columns["bytes"][0] == 0
        assert columns["upper_loss"][0] == 40 and len(columns["upper_loss"]) == 13


def test_a_page_is_one_file_and_a_folder_is_refused(compared, tmp_path):
    written = compared.report(tmp_path / "page.html")
    text = written.read_text()
    assert "2 algorithms compared on numbers" in text and "in round 2" in text
    with pytest.raises(CheckpointError, match="is a folder"):
        compared.report(tmp_path)


def test_without_what_draws_a_sentence_says_what_to_install(
    compared, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "rich", None)
    path = tmp_path / "page.html"
    for shown in (compared.plot, compared.to_latex, lambda: compared.report(path)):
        with pytest.raises(FedbilevelError, match=r"fedbilevel\[report\]"):
            shown()
    assert not path.exists()
