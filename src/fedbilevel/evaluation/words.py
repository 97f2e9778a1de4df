"""Metrics in words and figures, for people."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_TITLES = {"auc": "AUC", "brier_score": "Brier score", "r2": "R2"}

MEANINGS = {
    "log_loss": "the mean surprise at the true class: 0 would be certain and right",
    "auc": "the chance that a row of a class ranks above one of another: 0.5 is luck",
    "balanced_accuracy": "the share of right answers, each class counting alike",
    "accuracy": "the share of right answers",
    "brier_score": "the mean squared error of the probabilities: 0 is perfect",
    "root_mean_squared_error": "the typical error, in the units of what is predicted",
    "mean_absolute_error": "the mean size of an error, in the same units",
    "r2": "the share of the differences between rows that is explained: 1 is perfect",
}


def title(name: str) -> str:
    """Return the name of a metric for people."""
    return _TITLES.get(name, name.replace("_", " "))


def figure(value: float, like: float | None = None) -> str:
    """Write a number with three digits, or with as many decimals as another one has."""
    size = abs(value if like is None else like)
    decimals = 2 - math.floor(math.log10(size)) if size > 0 else 3
    return f"{value:,.{min(max(decimals, 0), 4)}f}"


def with_interval(metric: Sequence[float]) -> str:
    """Write a value with its interval."""
    value, low, high = metric
    return f"{figure(value)} ({figure(low, value)} to {figure(high, value)})"


def sentence(about: Mapping[str, Any]) -> str:
    """Say how good the shared model is, and what else there would be."""
    main = about["metric"]
    named = title(main)
    shared, base, *others = about["models"]
    found = shared["metrics"]
    other = "auc" if about["predicts"] == "class" else "r2"
    more = ""
    if found[other] is not None:
        more = f" and {title(other)} {with_interval(found[other])}"
    each = next((one for one in others if one["kind"] == "each_alone"), None)
    where = f" of {len(about['sites'])} sites" if each is not None else ""
    first = (
        f"{named[:1].upper()}{named[1:]} {with_interval(found[main])}{more} on "
        f"{about['rows']:,} held-out rows{where}."
    )
    value = found[main][0]
    second = f"The {base['name']} has {figure(base['metrics'][main][0], value)}"
    largest = next((one for one in others if one["kind"] == "alone"), None)
    if largest is not None:
        alone = figure(largest["metrics"][main][0], value)
        second += f"; {largest['name']}, the largest site, {alone}"
    if each is not None:
        second += f"; {each['name']} {figure(each['metrics'][main][0], value)}"
    return f"{first} {second} ({named}: lower is better)."
