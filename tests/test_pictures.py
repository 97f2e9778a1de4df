"""Pictures of curves: a title, axes that suit, ticks that can be read."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedbilevel.report.drawing import (
    _draw_bars,
    axes_of,
    cost_scale,
    curves_figure,
    value_scale,
)
from fedbilevel.result import Result


def made_up(name: str, values: list[float], metric: str, price: int) -> Result:
    rounds = np.arange(1, len(values) + 1)
    columns = {
        "round": rounds,
        "exchanges": rounds,
        "bytes": 1000 * price * rounds,
        "samples": 10 * rounds,
        metric: np.asarray(values, np.float32),
    }
    ends = {"run": 3.0, "compile": 1.0}
    return Result("numbers", name, {}, {}, columns, {}, {}, {}, ends)


def drawn(metric: str, *curves: list[float], prices: tuple[int, ...] = (1, 2)):
    results = {
        f"method{k}": [made_up(f"method{k}", values, metric, price)]
        for k, (values, price) in enumerate(zip(curves, prices, strict=False))
    }
    figure = curves_figure(results, metric, 0.5)
    figure.canvas.draw()  # which places the ticks
    return figure


def tick_texts(axis) -> list[str]:
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
    return [one.get_text() for place, one in ticks if low <= place <= high]


def test_accuracies_are_linear_with_plain_ticks_and_a_title():
    figure = drawn("test_accuracy", [0.05, 0.3, 0.6], [0.1, 0.5, 0.95])
    title = figure.get_suptitle()
    assert "numbers" in title and "test_accuracy" in title
    for panel in figure.axes:
        assert (panel.get_xscale(), panel.get_yscale()) == ("linear", "linear")
    for panel in figure.axes[::2]:  # the others share their ticks
        texts = tick_texts(panel.yaxis)
        assert len(texts) >= 3
        assert all(0 <= float(text) <= 1 for text in texts)


def test_losses_over_decades_are_logarithmic_and_their_ticks_are_numbers():
    figure = drawn("upper_loss", [30.0, 2.0, 0.6], [20.0, 0.7, 0.02])
    panel = figure.axes[0]
    assert panel.get_yscale() == "log"
    texts = tick_texts(panel.yaxis)
    assert {"0.1", "1", "10"} <= set(texts)
    assert not any("10^" in text or "times" in text for text in texts)
    minor = panel.yaxis.get_minorticklabels()
    assert not any(one.get_text() for one in minor)


def test_thousands_are_written_with_a_comma():
    figure = drawn("upper_loss", [1.0] * 1200)
    (panel,) = [one for one in figure.axes if one.get_xlabel() == "samples drawn"]
    texts = tick_texts(panel.xaxis)
    assert "10,000" in texts and "1e4" not in texts


def test_a_narrow_loss_is_linear():
    assert drawn("upper_loss", [0.9, 0.5], [0.8, 0.6]).axes[0].get_yscale() == "linear"


def test_costs_are_logarithmic_only_where_they_are_far_apart():
    near = drawn("upper_loss", [0.9, 0.5], [0.8, 0.6], prices=(1, 9))
    far = drawn("upper_loss", [0.9, 0.5], [0.8, 0.6], prices=(1, 11))
    assert [panel.get_xscale() for panel in near.axes] == ["linear"] * 5
    scales = [panel.get_xscale() for panel in far.axes]
    assert scales == ["linear", "log", "linear", "linear", "linear"]


def test_what_nobody_pays_has_no_panel():
    figure = drawn("upper_loss", [0.9, 0.5], [0.8, 0.6], prices=(0, 0))
    labels = [panel.get_xlabel() for panel in figure.axes]
    assert labels == ["exchanges", "samples drawn", "rounds", "seconds"]


def test_what_costs_nothing_is_missing_there_and_still_named():
    figure = drawn("upper_loss", [0.9, 0.5], [0.8, 0.6], prices=(0, 1))
    assert [len(panel.lines) for panel in figure.axes] == [3, 2, 3, 3, 3]
    (legend,) = figure.legends
    assert [one.get_text() for one in legend.get_texts()] == ["method0", "method1"]


@pytest.mark.parametrize(
    ("metric", "values", "scale"),
    [
        ("upper_loss", [1.0, 10.0], "linear"),
        ("upper_loss", [1.0, 10.1], "log"),
        ("upper_loss", [0.0, 10.1], "linear"),
        ("upper_loss", [-1.0, 100.0], "linear"),
        ("upper_loss", [np.nan, np.nan], "linear"),
        ("upper_loss", [np.nan, 1.0, 99.0, np.inf], "log"),
        ("accuracy_group_0", [0.01, 0.9], "linear"),
        ("weight_auc", [0.01, 0.9], "linear"),
        ("test_error", [0.01, 0.9], "log"),
    ],
)
def test_a_scale_suits_the_values(metric, values, scale):
    assert value_scale(metric, np.asarray(values)) == scale


def test_a_cost_of_nothing_does_not_decide():
    assert cost_scale([0.0, 5.0, 6.0]) == "linear"
    assert cost_scale([0.0, 5.0, 51.0]) == "log"
    assert cost_scale([]) == "linear"


def test_what_has_no_counts_is_drawn_against_rounds():
    whole = made_up("one", [1.0], "upper_loss", 1)
    costs = ("exchanges", "megabytes", "samples")
    assert axes_of([whole]) == (*costs, "rounds", "seconds")
    bare = {name: whole.columns[name] for name in ("round", "upper_loss")}
    part = Result("numbers", "one", {}, {}, bare, {}, {}, {}, {"run": 1.0})
    assert axes_of([whole, part]) == ("rounds", "seconds")


@pytest.mark.parametrize("seeds", [1, 2, 4, 5])
def test_a_band_needs_five_seeds_and_the_title_says_how_many(seeds):
    ends = 1.0 + np.arange(seeds)
    many = [made_up("one", [9.0, end], "upper_loss", 1) for end in ends]
    figure = curves_figure({"one": many}, "upper_loss", 0.5)
    bands = [len(panel.collections) for panel in figure.axes]
    assert bands == [int(seeds >= 5)] * 5
    said = "one seed" if seeds == 1 else f"mean of {seeds} seeds"
    assert said in figure.get_suptitle()
    if seeds == 5:
        (band,) = figure.axes[0].collections
        low, high = (f(band.get_paths()[0].vertices[:, 1]) for f in (np.min, np.max))
        half = 2.7764 * np.std(ends, ddof=1) / np.sqrt(5)
        assert high == 9.0
        np.testing.assert_allclose(low, 3.0 - half, rtol=1e-3)


def test_curves_begin_before_the_first_round():
    result = made_up("one", [9.0, 4.0], "upper_loss", 1)
    begun = replace(result, start={"upper_loss": 20.0})
    for panel in curves_figure({"one": [begun] * 5}, "upper_loss", 0.5).axes:
        line = panel.lines[0]
        assert (line.get_xdata()[0], line.get_ydata()[0]) == (0.0, 20.0)
        (band,) = panel.collections
        assert band.get_paths()[0].vertices[:, 0].min() == 0
    # A cost of nothing has no place on a logarithmic axis.
    dear = made_up("dear", [9.0, 4.0], "upper_loss", 100)
    dear = replace(dear, start={"upper_loss": 20.0})
    figure = curves_figure({"one": [begun], "dear": [dear]}, "upper_loss", 0.5)
    found = {panel.get_xlabel(): panel for panel in figure.axes}
    assert found["megabytes sent"].get_xscale() == "log"
    assert list(found["megabytes sent"].lines[0].get_ydata()) == [9.0, 4.0]
    assert list(found["rounds"].lines[0].get_ydata()) == [20.0, 9.0, 4.0]


def test_bars_of_rows_fit_into_their_panel():
    panel = Figure().subplots()
    _draw_bars(panel, np.asarray([[30, 40], [10, 0]]), np.eye(4)[:2])
    assert 70 < panel.get_xlim()[1] < 80
