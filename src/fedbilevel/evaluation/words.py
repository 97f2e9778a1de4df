"""Metrics in words and figures, for people."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

TITLES = {
    "log_loss": "log loss",
    "auc": "AUC",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "brier_score": "Brier score",
    "root_mean_squared_error": "root mean squared error",
    "mean_absolute_error": "mean absolute error",
    "r2": "R2",
}


def figure(value: float, like: float | None = None) -> str:
    """Write a number with three digits, or with as many decimals as another one has."""
    size = abs(value if like is None else like)
    decimals = 2 - math.floor(math.log10(size)) if size > 0 else 3
    return f"{value:,.{min(max(decimals, 0), 6)}f}"


def with_interval(metric: Sequence[float]) -> str:
    """Write a value with its interval."""
    value, low, high = metric
    return f"{figure(value)} ({figure(low, value)} to {figure(high, value)})"


def sentence(about: Mapping[str, Any]) -> str:
    """Say how good the shared model is, and what else there would be."""
    main = about["metric"]
    title = TITLES[main]
    shared, base, *others = about["models"]
    found = shared["metrics"]
    second = "auc" if about["predicts"] == "class" else "r2"
    more = ""
    if found[second] is not None:
        more = f" and {TITLES[second]} {with_interval(found[second])}"
    first = (
        f"{title[:1].upper()}{title[1:]} {with_interval(found[main])}{more} on "
        f"{about['rows']:,} rows that nobody trained on."
    )
    value = found[main][0]
    simple = (
        "base rate" if about["predicts"] == "class" else "mean of the training rows"
    )
    second = f"The {simple} has {figure(base['metrics'][main][0], value)}"
    largest = next((one for one in others if one["kind"] == "alone"), None)
    if largest is not None:
        alone = figure(largest["metrics"][main][0], value)
        second += f"; {largest['name']}, the largest site, {alone}"
    return f"{first} {second} ({title}: lower is better)."
