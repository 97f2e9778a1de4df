"""Tables and sentences with figures, cell by cell, for small results made up here."""

import math
from typing import Any

import numpy as np
import pytest

from fedbilevel.evaluation.assessment import figure, with_interval
from fedbilevel.report import tables
from fedbilevel.report.tables import measured, show
from fedbilevel.result import Result, as_html, short, to_plain
from fedbilevel.standings import (
    Standing,
    _standing,
    about_seeds,
    cost_said,
    default_target,
    equal_cost,
    margin,
    ranking,
    sample_bound,
    seconds,
    seconds_at,
    stacked,
    t_quantile,
    tuning_said,
)


def cells(table) -> list[list[str]]:
    """Return the heading and the rows of a table."""
    columns = [[str(one.header), *map(str, one.cells)] for one in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def sides(table) -> str:
    return "".join(str(one.justify)[0] for one in table.columns)


def result_of(values=(4.0, 2.0), **more: Any) -> Result:
    count = len(values)
    rounds = np.arange(1, count + 1) * 10
    columns = {
        "round": rounds,
        "exchanges": rounds * 2,
        "bytes": rounds * 1000,
        "samples": rounds * 5,
        "loss": np.asarray(values),
    }
    usual: dict[str, Any] = {
        "task": "t",
        "algorithm": "a",
        "config": {"headline": "loss"},
        "versions": {},
        "columns": columns,
        "point": {},
        "final": {"round": int(rounds[-1]), "accuracy": 0.5, "loss": float(values[-1])},
        "counts": {
            "rounds": 20,
            "exchanges": 40,
            "per_client_and_round": {"floats_up": 7, "floats_down": 9.5},
            "bytes_up": 2_500_000,
            "bytes_down": 1_250_000,
            "samples": {"upper": 100, "lower": 1100},
            "calls": {"hessian_product": 1234, "gradient": 9},
        },
        "seconds": {"compile": 1.5, "run": 3.0},
    }
    return Result(**{**usual, **more})


# Single figures.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ("text", "text"),
        (1234567, "1,234,567"),
        (-3, "-3"),
        (2.0, "2"),
        (1e6, "1,000,000"),
        (0.1234567, "0.123457"),
        (1234.5678, "1234.57"),
        ([1, 2.5, None], "[1, 2.5, -]"),
        (True, "1"),
    ],
)
def test_a_number_of_a_table_has_six_digits(value, text):
    assert show(value) == text


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [
        (0.0, None, "0.000"),
        (1.0, None, "1.00"),
        (9.99, None, "9.99"),
        (12.34, None, "12.3"),
        (100.4, None, "100"),
        (1234.5, None, "1,234"),
        (0.1, None, "0.100"),
        (0.01234, None, "0.0123"),
        (0.0001234, None, "0.0001"),  # four decimals at most
        (-0.5, None, "-0.500"),
        (0.123456, 12.0, "0.1"),
        (0.123456, 0.0, "0.123"),
        (12.3456, 0.01, "12.3456"),
    ],
)
def test_a_figure_has_three_digits_or_the_decimals_of_another(value, like, text):
    assert figure(value, like) == text


def test_an_interval_has_the_decimals_of_its_value():
    assert with_interval((12.34, 9.876, 100.4)) == "12.3 (9.9 to 100.4)"
    assert measured((12.34, 9.876, 100.4)) == "12.3 (9.9 to 100.4)"
    assert measured((12.34, 9.876, 100.4), bare=True) == "12.3"
    assert measured(None) == measured(None, bare=True) == "-"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.12346"),
        (123456.7, "1.2346e+05"),
        (7, "7"),
        ("x" * 40, "x" * 40),
        ("x" * 41, "x" * 37 + "..."),
        (None, "None"),
    ],
)
def test_a_value_is_written_in_few_characters(value, text):
    assert short(value) == text


def test_what_json_cannot_write_is_null():
    given = {1: (np.float32(0.5), math.inf), "a": np.asarray([1, 2]), "b": [math.nan]}
    assert to_plain(given) == {"1": [0.5, None], "a": [1, 2], "b": [None]}


# Results.


def test_a_result_is_told_in_a_few_lines():
    assert repr(result_of()) == ("Result of a on t, 20 rounds:\n  loss 2, accuracy 0.5")
    told = result_of(
        ended="at its target",
        events=["one", "two"],
        quality={"sentence": "It is good."},
        config={"headline": "loss", "batch": 8},
    )
    assert repr(told) == (
        "Result of a on t, at its target, 8 rows a sample:\n  It is good.\n"
        "  loss 2, accuracy 0.5\n  Note: one\n  Note: two"
    )
    rows = repr(result_of(config={"batch": None}, counts={}))
    # Without its headline the others are in the order in which they are.
    assert (
        rows == "Result of a on t, ? rounds, all rows a sample:\n  accuracy 0.5, loss 2"
    )


def test_a_result_in_a_notebook_is_a_table():
    made = result_of(events=["<one>"])
    assert made._repr_html_() == (
        "<table><caption>a on t, 20 rounds</caption>"
        "<tr><th style='text-align:left'>loss</th><td>2</td></tr>"
        "<tr><th style='text-align:left'>accuracy</th><td>0.5</td></tr></table>"
        "<p>Note: &lt;one&gt;</p>"
    )
    good = result_of(quality={"sentence": "<It>"})._repr_html_()
    assert good.startswith("<p>&lt;It&gt;</p><table>")
    assert as_html("<a>", [("<b>", "<c>")]).count("&lt;") == 3


def test_a_summary_has_what_there_is():
    names = ["task", "algorithm", "config", "final", "counts", "seconds", "ended"]
    assert list(result_of().summary()) == [*names, "events"]
    more = result_of(start={"loss": 9.0}, quality={"a": 1})
    assert list(more.summary()) == [*names, "events", "start", "quality"]


def test_columns_begin_before_the_first_round_where_that_was_measured():
    plain = result_of()
    assert plain.from_start is plain.columns
    found = result_of(start={"loss": 9.0}).from_start
    assert found["loss"].tolist() == [9.0, 4.0, 2.0]
    assert found["round"].tolist() == [0, 10, 20] and found["round"].dtype == int
    # A start that lacks a column is none.
    lacking = result_of(start={"accuracy": 0.1})
    assert lacking.from_start is lacking.columns


def test_results_stand_side_by_side():
    other = result_of(final={"loss": 3.0, "f1": 1})
    table = tables.result_table({"one": result_of(), "two": other})
    assert cells(table) == [
        ["metric", "one", "two"],
        ["round", "20", "-"],
        ["accuracy", "0.5", "-"],
        ["loss", "2", "3"],
        ["f1", "-", "1"],
    ]
    assert (table.title, sides(table)) == ("Result", "lrr")


def test_costs_stand_side_by_side():
    counts = {**result_of().counts, "calls": {}, "epsilon": 0.25, "delta": 1e-5}
    counts |= {"bounds": {"lower_samples": "at most", "gradient": "at least"}}
    table = tables.cost_table({"one": result_of(), "two": result_of(counts=counts)})
    assert cells(table) == [
        ["", "one", "two"],
        ["rounds", "20", "20"],
        ["exchanges", "40", "40"],
        ["floats up, a client and round", "7", "7"],
        ["floats down, a client and round", "9.5", "9.5"],
        ["megabytes up, in all", "2.5", "2.5"],
        ["megabytes down, in all", "1.25", "1.25"],
        ["samples, in all, at most", "1,200", "1,200"],
        ["Hessian products, in all", "1,234", "0"],
        ["seconds to compile", "1.5", "1.5"],
        ["seconds to run", "3", "3"],
        ["epsilon", "-", "0.25"],
        ["at delta", "-", "1e-05"],
    ]
    assert len(cells(tables.cost_table({"one": result_of()}))) == 11


# Rankings.

FIRST = Standing(
    "a", 1.23456, 0.5, 0.0345, 5, 10, 1234, 2_500_000, 99, 0.123, "at most"
)
SECOND = Standing("b", 20000.0, None, None, 5, None, None, None, None, None)


def test_a_ranking_has_figures_that_fit_into_a_terminal():
    table = tables.ranking_table([FIRST, SECOND], "loss", 0.123456)
    assert cells(table) == [
        ["algorithm", "loss", "exchanges", "MB", "samples", "seconds"],
        ["a", "1.235 +- 0.03", "1,234", "2.5", "at most 99", "0.12"],
        ["b", "2e+04", "-", "-", "-", "-"],
    ]
    assert table.title == (
        "loss after the last round, mean of 5 seeds with its 95 % t interval; and the "
        "cost from which on it stays at 0.1235 or below"
    )
    assert "loss at 9 bytes, mean" in str(
        tables.ranking_table([FIRST], "loss", 1.0, "at 9 bytes").title
    )
    shown = [tables._short(one) for one in (99.4, 100.0, 1234.5, None)]
    assert shown == ["99", "100", "1,234", "-"]


def test_seeds_are_told():
    told = [about_seeds(count) for count in (1, 2, 4, 5)]
    assert told == [
        "one seed",
        "mean of 2 seeds (intervals need 5)",
        "mean of 4 seeds (intervals need 5)",
        "mean of 5 seeds with its 95 % t interval",
    ]
    assert margin(np.arange(4.0)) is None
    # Of 5 values, 4 degrees of freedom: 2.776 * sqrt(2.5) / sqrt(5)
    assert margin(np.arange(5.0)) == pytest.approx(2.7764 * math.sqrt(0.5), rel=5e-4)
    # Printed tables.
    for freedom, quantile in ((4, 2.7764), (9, 2.2622), (60, 2.0003)):
        assert t_quantile(freedom) == pytest.approx(quantile, rel=5e-4)


def test_a_mean_over_seeds_stays_at_the_last_value_of_those_that_ended():
    assert stacked([np.asarray([1, 2]), np.asarray([5])]).tolist() == [[1, 2], [5, 5]]
    longer, ended = result_of((8.0, 4.0, 2.0)), result_of((6.0, 2.0))
    found = ranking({"a": [longer, ended]}, "loss", 3.0)[0]
    # Means 7, 3, 2: from the second on, where both are at round 20.
    assert (found.mean, found.spread, found.margin) == (2.0, 0.0, None)
    assert (found.rounds, found.exchanges, found.bytes) == (20, 40, 20_000)
    # 3 seconds are 30 rounds of one, and 20 of the other: 2 and 3 at round 20.
    assert (found.samples, found.seconds, found.seeds) == (100, 2.5, 2)
    missed = ranking({"a": [longer, ended]}, "loss", 1.99)[0]
    assert (missed.rounds, missed.seconds, missed.bytes) == (None, None, None)
    assert ranking({"a": [longer]}, "loss", 8.0)[0].rounds == 10
    assert seconds(longer).tolist() == [1.0, 2.0, 3.0]
    assert seconds_at(ended, np.asarray([5, 20])).tolist() == [0.75, 3.0]


def test_diverged_methods_are_last_and_ties_stay():
    many = {"bad": [result_of((1.0, math.nan))], "worse": [result_of((3.0, 2.5))]}
    many["best"] = [result_of((3.0, 2.0))]
    assert [one.algorithm for one in ranking(many, "loss", 1.0)] == [
        *("best", "worse", "bad")
    ]


def test_a_target_is_a_tenth_of_the_way_from_the_best_end():
    many = {"a": [result_of((8.0, 2.0))], "b": [result_of((12.0, 7.0))]}
    assert default_target(many, "loss") == pytest.approx(2.0 + 0.1 * 10)
    many["a"] = [result_of((8.0, 2.0), start={"loss": 22.0})]
    assert default_target(many, "loss") == pytest.approx(2.0 + 0.1 * 20)


def test_at_equal_cost_the_last_measurement_counts_that_all_could_pay():
    many = {"a": [result_of((8.0, 4.0, 2.0))], "b": [result_of((6.0, 3.0))]}
    assert equal_cost(many, "bytes") == 20_000  # what b took in all
    assert cost_said(many, "bytes") == "at 20,000 bytes"
    assert cost_said(many, "seconds") == "at 3 seconds"
    assert (equal_cost(many, "rounds"), cost_said(many, "trials")) == (math.inf, "")
    found = {one.algorithm: one.mean for one in ranking(many, "loss", 1.0, "bytes")}
    assert found == {"a": 4.0, "b": 3.0}  # at the bound it still counts
    # Where even the first is dearer it is the first.
    assert _standing("a", many["a"], "loss", 1.0, 0).mean == 8.0
    spent = {"trials": 3, "cost": 99.94, "unit": "seconds", "budget": 1000}
    assert tuning_said(spent) == "3 trials, 99.9 of 1,000 seconds"
    assert sample_bound([]) == ""
