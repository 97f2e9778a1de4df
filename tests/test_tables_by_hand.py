"""Tables of trials, rows, models and theory, cell by cell, for numbers made up here."""

import math
from typing import Any

import numpy as np
import pytest

from fedbilevel.evaluation.assessment import sentence, title
from fedbilevel.report import drawing, tables
from fedbilevel.report.theory import (
    conditions_table,
    estimates_table,
    plan_table,
    scaling_names,
    scaling_table,
    terms_table,
)
from tests.test_figures_by_hand import cells, sides

# Trials, rows, and models.


def test_trials_are_in_order_of_length_and_value():
    many = [({"lr": "1"}, 0.5, 3), ({"lr": "2"}, 0.25, 3), ({"lr": "3"}, 0.125, 1)]
    many += [({"lr": "4", "m": "5"}, math.nan, 9)]
    table = tables.trials_table({"a": many}, "loss")
    assert cells(table) == [
        ["algorithm", "options", "rounds", "loss"],
        ["a", "lr=2", "3", "0.25"],
        ["", "lr=1", "3", "0.5"],
        ["", "lr=3", "1", "0.125"],
        ["", "lr=4 m=5", "9", "diverged"],
    ]
    assert (table.title, sides(table)) == ("loss of what was tried", "llrr")
    for count in (9, 10, 11):
        more = [({"lr": str(k)}, float(k), 1) for k in range(count)]
        rows = cells(tables.trials_table({"a": more}, "loss"))[1:]
        assert len(rows) == min(count, 10)
        if count > 9:
            told = f"{count - 9} more, which ended earlier or worse"
            assert rows[-1] == ["", told, "", ""]


def site(number: int, classes: int) -> dict[str, Any]:
    counts = {f"c{k}": 1000 * (k == 0) for k in range(classes)}
    return {"name": f"s{number}", "training": 1500, "validation": 2, "classes": counts}


@pytest.mark.parametrize(
    ("count", "classes", "headings", "row", "caption"),
    [
        (20, 2, ["c0", "c1"], ["1,000", "0"], None),
        (21, 8, [f"c{k}" for k in range(8)], ["1,000"] + ["0"] * 7, "and 1 more"),
        (1, 9, ["classes"], ["1"], None),
    ],
)
def test_rows_of_sites_are_shown_with_few_classes(
    count, classes, headings, row, caption
):
    sites = [site(k, classes) for k in range(count)]
    table = tables.holdings_table({"sites": sites, "site_column": ""})
    found = cells(table)
    assert found[0] == ["client", "training", "validation", *headings]
    assert found[1] == ["s0", "1,500", "2", *row] and len(found) == min(count, 20) + 1
    assert table.caption == caption


def test_rows_by_class_have_names_and_totals():
    counts = np.asarray([[1, 1200], [3, 0]])
    names = ("[a]", "b")
    table = tables.label_counts_table(counts, names, "Rows", ("x", "y"))
    assert [row[0] for row in cells(table)] == ["site", "x", "y", "all"]
    assert cells(table)[0][1] == "\\[a]" and table.title == "Rows"
    for classes, headings in ((12, 14), (13, 4)):
        table = tables.label_counts_table(
            np.eye(2, classes, dtype=int), ["c"] * classes
        )
        assert len(cells(table)[0]) == headings


def quality(models=3, sites=2, r2=(0.5, 0.4, 0.6)) -> dict[str, Any]:
    metrics = {"mean_absolute_error": (2.0, 1.0, 3.0), "r2": r2, "accuracy": (1, 1, 1)}
    kinds = ["shared", "baseline", "each_alone", "alone"]
    return {
        "metric": "mean_absolute_error",
        "predicts": "number",
        "rows": 1234,
        "models": [
            {"name": f"[m{k}]", "kind": kinds[min(k, 3)], "metrics": metrics}
            for k in range(models)
        ],
        "sites": [
            {"name": f"s{k}", "rows": 10, "metrics": {"shared": {"r2": (1, 1, 1)}}}
            for k in range(sites)
        ],
    }


def test_models_are_shown_by_the_main_metric_and_the_others_bare():
    made = tables.quality_tables(quality())
    assert cells(made[0]) == [
        ["model", "mean absolute error", "R2"],
        *([f"\\[m{k}]", "2.00 (1.00 to 3.00)", "0.500"] for k in range(3)),
    ]
    assert [one.no_wrap for one in made[0].columns] == [False, True, True]
    assert cells(made[1]) == [
        ["site", "rows", "shared model", "site alone"],
        ["s0", "10", "-", "-"],
        ["s1", "10", "-", "-"],
    ]
    assert made[1].title == "On the tested rows of every site: mean absolute error"
    assert len(tables.quality_tables(quality(sites=0))) == 1
    many = tables.quality_tables(quality(21, 21))
    assert [len(cells(one)) for one in many] == [21, 21]


def test_a_sentence_says_how_good_a_model_is():
    assert sentence(quality()) == (
        "Mean absolute error 2.00 (1.00 to 3.00) and R2 0.500 (0.400 to 0.600) on "
        "1,234 held-out rows of 2 sites. The [m1] has 2.00; [m2] 2.00 (mean absolute "
        "error: lower is better)."
    )
    alone = sentence(quality(models=4, r2=None))
    assert alone == (
        "Mean absolute error 2.00 (1.00 to 3.00) on 1,234 held-out rows of 2 sites. "
        "The [m1] has 2.00; [m3], the largest site, 2.00; [m2] 2.00 (mean absolute "
        "error: lower is better)."
    )
    assert "rows. The [m1]" in sentence(quality(models=2))
    assert [title(name) for name in ("auc", "log_loss")] == ["AUC", "log loss"]


# Theory.


def test_constants_conditions_and_terms():
    one = {"value": 1.23456, "low": 0.5, "high": 20000.0}
    assert cells(estimates_table({"mu": one})) == [
        ["constant", "value", "range"],
        ["mu", "1.235", "0.5 to 2e+04"],
    ]
    held = {"name": "a <= b", "left": 1.0, "right": 2.0, "slack": 2.0, "advice": "no"}
    conditions = [{**held, "holds": True}, {**held, "holds": False}]
    about = {"theorem": 1, "algorithm": "a", "conditions": conditions}
    table = conditions_table(about)
    assert [row[4] for row in cells(table)] == ["holds", "yes", "no"]
    assert cells(table)[1] == ["a <= b", "1", "2", "2", "yes", "no"]
    assert (table.title, sides(table)) == ("Theorem 1 for a", "llllll")
    assert cells(terms_table({"x": 1.0, "y": 3.0})) == [
        ["term", "value", "share"],
        ["y", "3", "75.0%"],
        ["x", "1", "25.0%"],
    ]


def test_a_plan_shows_what_there_is():
    names = ["clients", "iterations", "local_steps", "rounds", "eta", "alpha", "beta"]
    names += ["rho1", "rho2", "theta", "q", "first_batch", "floats_up", "bytes_up"]
    names += ["samples_per_client", "promise", "dominating"]
    plan: dict[str, Any] = dict.fromkeys(names, "") | {"clients": 8, "eta": 0.5}
    plan |= {"algorithm": "a", "preset": "theory", "theorem": 1, "dominating": "t"}
    assert cells(plan_table(plan)) == [
        ["", "Plan for a, theory, theorem 1"],
        ["clients, K", "8"],
        ["eta", "0.5"],
        ["largest term of the bound", "t"],
    ]


def scaling(**more: Any) -> dict[str, Any]:
    point = {"clients": 2, "iterations": 1000, "local_steps": 3, "rounds": 334}
    point |= {"eta": "0.123456", "q": 4, "value": 1.0, "low": 0.5, "high": 2.0}
    fit = {"exponent": -0.5, "low": -0.625, "high": -0.375, "claimed": -0.5}
    usual = {"axis": "clients", "value": "loss", "algorithm": "a", "task": "t"}
    return {**usual, **fit, "points": [{**point, **more.pop("point", {})}], **more}


def test_a_study_shows_its_points_and_exponents():
    table = scaling_table(scaling())
    assert cells(table) == [
        ["K", "T planned", "p", "rounds", "eta", "Q", "loss", "95 % interval"],
        ["2", "1,000", "3", "334", "0.1235", "4", "1", "0.5 to 2"],
    ]
    assert (table.title, sides(table)) == ("a on t: loss against K", "r" * 8)
    assert table.caption == "loss ~ K^-0.500 [-0.625, -0.375], claimed -0.5"
    fit = {"exponent": 2.0, "low": 1.0, "high": 3.0, "claimed": None}
    point = {"target": 0.25, "criterion": 0.75, "eta": "decay 1"}
    table = scaling_table(scaling(rounds=fit, point=point, axis="target"))
    assert cells(table)[0][4:6] == ["target", "eta"]
    assert cells(table)[1][4:6] == ["0.25", "decay 1"]
    assert [row[-1] for row in cells(table)] == ["criterion", "0.75"]
    assert str(table.caption).endswith("\nrounds ~ epsilon^2.000 [1.000, 3.000]")
    assert scaling_names(scaling(floor=0.5)) == ("K", "loss - 0.5")
    assert scaling_names(scaling(floor=0.5, axis="target")) == ("epsilon - 0.5", "loss")
    assert scaling_names(scaling(floor=0.0)) == ("K", "loss")


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.123, "0.12"), (99.4, "99"), (99.6, "100")]
)
def test_costs_of_a_ranking_are_never_powers_of_ten(value, text):
    assert tables._short(value) == text


@pytest.mark.parametrize(
    ("margin", "text"), [(None, ""), (0.0123, " +- 0.01"), (24.0, " +- 20")]
)
def test_a_margin_of_a_ranking_has_one_digit(margin, text):
    assert tables._give_or_take(margin) == text


def test_a_drawing_of_a_study_names_its_lines(monkeypatch):
    drawn = []
    monkeypatch.setattr(drawing, "_png", drawn.append)
    points = [{"clients": k, "value": 1 / k, "low": 0.9 / k, "high": 2} for k in (1, 4)]
    drawing.draw_scaling({**scaling(), "points": points})
    (panel,) = drawn[0].axes
    named = [text.get_text() for text in panel.get_legend().get_texts()]
    assert sorted(named) == ["claimed: -0.5", "fitted: -0.5", "measured, 95 %"]
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("K", "loss")
